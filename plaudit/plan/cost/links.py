"""Time of collectives over two tiers: the scale-up domain and the network between domains.

S bytes of a device, n devices, B bytes per second one way (nccl-tests, PERFORMANCE.md):

    all-reduce S/B · 2(n-1)/n      all-gather, reduce-scatter, all-to-all S/B · (n-1)/n      broadcast S/B

A group that spans domains uses both tiers. For ring collectives 1/d of the bytes leave a domain, because its d devices
share the work; for all-to-all, the fraction whose targets are in other domains.
"""

from __future__ import annotations

from dataclasses import dataclass

from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import Cluster


@dataclass(frozen=True, slots=True)
class Links:
    """`group` communicating devices; `stride` is the distance between two of them (their tp ranks, for example)."""

    up: float
    out: float
    group: int
    inside: int
    """Devices of the group in one domain."""
    hop: float

    @staticmethod
    def of(cluster: Cluster, group: int, constants: Constants, stride: int = 1, bulk: bool = True) -> Links:
        inside = max(1, min(group, cluster.domain // stride))
        share = constants.bulk_link_share
        up = cluster.accelerator.scale_up * (share if bulk else constants.link_share)
        return Links(up, cluster.accelerator.scale_out * share, group, inside, constants.hop_seconds)

    @property
    def spans(self) -> bool:
        return self.inside < self.group

    def all_reduce(self, size: float) -> float:
        return 2 * self.all_gather(size)

    def all_gather(self, size: float) -> float:
        """Seconds; `size` is the gathered whole. A reduce-scatter of the same size takes as long."""
        if self.group == 1:
            return 0.0
        seconds = size * (self.inside - 1) / self.inside / self.up
        if self.spans:
            domains = self.group / self.inside
            seconds += size / self.inside * (domains - 1) / domains / self.out + self.hop
        return seconds

    def all_to_all(self, size: float, copies: float | None = None) -> float:
        """Seconds if every device sends `size`; `copies` of the same bytes to one domain cross the network once."""
        if self.group == 1:
            return 0.0
        away = 1 - self.inside / self.group
        near = size * (1 - 1 / self.group) / self.up
        if not self.spans:
            return near
        return max(near, size * away / max(1.0, copies or 1.0) / self.out) + self.hop
