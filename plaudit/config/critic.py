"""How a critic server is set up: `critic.toml` and the flags of `plaudit critic`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, TypeAdapter

from plaudit.config.serve import LimitsTable, ListenTable, Port
from plaudit.config.supervised import TrainTable
from plaudit.config.table import NonNegative, Positive, Share, check


class CriticLimits(LimitsTable):
    body_bytes: PositiveInt = 256 * 2**20
    """Of one request, unpacked: a whole step's rollouts, padded, come in one."""
    request_seconds: Positive = 3600.0
    """The most a request may take, its wait for those before it included; X-Deadline can only shorten it."""


class CriticServerTable(ListenTable):
    port: Port = 5556
    """0 takes a free one."""
    limits: CriticLimits = CriticLimits()
    drain_seconds: Positive = 300.0
    """An update under way is worth waiting for."""
    model: str
    """A model directory or an embedded name. Without a value head of its own it gets a new one, of zeros."""
    reward: str | None = None
    """An outcome model that scores in the same call (NeMo-Aligner's combine_rm_and_critic_server)."""
    save_dir: str = "critic"
    """What critic_save writes lies under this directory, and nowhere else."""
    keep: PositiveInt = 8
    """Saves that are kept; older ones are removed. A trainer's checkpoints name them: keep no fewer than it does."""
    resume: bool = False
    """Go on from the newest save, if there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    """auto takes the GPU if there is one."""
    seed: Annotated[int, Field(ge=0)] = 1
    threads: PositiveInt | None = None
    lr: Positive = 1e-4
    warmup: Annotated[int, Field(ge=0)] = 0
    """Updates over which the rate rises; it is constant after them."""
    weight_decay: NonNegative = 0.0
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip_norm: Positive = 1.0
    clip: NonNegative = 0.2
    """How far a new value may move from the old one in the loss; 0: freely. NeMo-Aligner's loss_clip_val."""
    batch: PositiveInt | None = None
    """Rows of one update: a critic_train with more makes several. Default: every call is one update."""
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens in one forward pass. Moves memory and time, never the gradient."""

    def optimizer(self) -> TrainTable:
        return TrainTable(
            steps=1, lr=self.lr, schedule="constant", warmup=self.warmup, weight_decay=self.weight_decay,
            betas=self.betas, clip_norm=self.clip_norm,
        )  # fmt: skip


_CRITIC: TypeAdapter[CriticServerTable] = TypeAdapter(CriticServerTable)


def parse_critic(tree: Mapping[str, Any], source: str) -> CriticServerTable:
    table: CriticServerTable = check(_CRITIC, tree, source, CriticServerTable)
    return table
