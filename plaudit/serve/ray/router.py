"""Ray Serve's routing, left to the front: a call goes to the replica that it names.

Ray Serve keeps the list of replicas and tells every handle when it changes; the front hears of it here. (It sends this
class by value: what it uses of ours is imported when it runs.)
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class SeatRouter(RequestRouter):  # type: ignore[misc]
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One that is not there any more is answered for by another, which says so."""
        seat = None if pending_request is None else pending_request.kwargs.get("seat")
        return [[r for r in candidate_replicas if r.replica_id.unique_id == seat] or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from plaudit.serve.ray.seats import tell

        super().update_replicas(replicas)
        tell(self.app_name, frozenset(replica.replica_id.unique_id for replica in replicas))
