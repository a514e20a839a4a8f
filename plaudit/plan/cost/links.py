"""Collectives over two tiers: the scale-up domain and the network between domains.

S bytes of a device, n devices, B bytes per second one way (nccl-tests, PERFORMANCE.md):
    all-reduce S/B · 2(n-1)/n      all-gather, reduce-scatter, all-to-all S/B · (n-1)/n      broadcast S/B
A group that spans domains goes through both; what leaves a domain is 1/d of the bytes for ring collectives, as the d
devices of a domain share the work, and the part of the targets that are elsewhere for all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import Cluster


@dataclass(frozen=True, slots=True)
class Links:
    """`group` devices that talk to each other; `stride` others lie between two of them (their tensor ranks, say)."""

    up: float
    out: float
    group: int
    inside: int
    """Of the group in one domain."""
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
        """`size` is of the whole, once gathered. A reduce-scatter of the same whole takes as long."""
        if self.group == 1:
            return 0.0
        seconds = size * (self.inside - 1) / self.inside / self.up
        if self.spans:
            domains = self.group / self.inside
            seconds += size / self.inside * (domains - 1) / domains / self.out + self.hop
        return seconds

    def all_to_all(self, size: float, copies: float | None = None) -> float:
        """Every device sends `size`. `copies` of the same bytes to one domain cross the network once."""
        if self.group == 1:
            return 0.0
        away = 1 - self.inside / self.group
        near = size * (1 - 1 / self.group) / self.up
        if not self.spans:
            return near
        return max(near, size * away / max(1.0, copies or 1.0) / self.out) + self.hop
