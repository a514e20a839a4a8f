"""Ray Serve's request router, with the choice left to our server: a call goes to the replica that it names.

Ray Serve notifies every handle of changes to the list of replicas, which is recorded here. (This class is pickled by
value: it imports our modules when it runs.)
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class ReplicaRouter(RequestRouter):  # type: ignore[misc]
    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the named replica. If it no longer exists, another one answers and reports that."""
        replica_id = None if pending_request is None else pending_request.kwargs.get("replica_id")
        return [[r for r in candidate_replicas if r.replica_id.unique_id == replica_id] or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from plaudit.serve.ray.replica_ids import update

        super().update_replicas(replicas)
        update(self.app_name, frozenset(replica.replica_id.unique_id for replica in replicas))
