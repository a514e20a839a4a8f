"""Configuration of a critic server: `critic.toml` and the flags of `plaudit critic`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, TypeAdapter

from plaudit.config.serve import LimitsTable, ListenTable, Port
from plaudit.config.supervised import TrainTable
from plaudit.config.table import NonNegative, Positive, Share, check


class CriticLimits(LimitsTable):
    body_bytes: PositiveInt = 256 * 2**20
    """Decompressed size of one request: it contains a whole step's rollouts, padded."""
    request_seconds: Positive = 3600.0
    """Maximum duration of a request, queueing included; X-Deadline can only shorten it."""


class CriticServerTable(ListenTable):
    port: Port = 5556
    """0: any free port."""
    limits: CriticLimits = CriticLimits()
    drain_seconds: Positive = 300.0
    """Time for running updates to finish when the server shuts down."""
    model: str
    """A model directory or an embedded name. A model without a value head gets a new one, initialised to zero."""
    reward: str | None = None
    """An outcome model that scores in the same call (NeMo-Aligner's combine_rm_and_critic_server)."""
    save_dir: str = "critic"
    """critic_save writes under this directory only."""
    keep: PositiveInt = 8
    """Number of saves kept; older ones are removed. A trainer's checkpoints refer to them: keep at least as many as the
    trainer does."""
    resume: bool = False
    """Resume from the newest save, if there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    """auto: the GPU if there is one."""
    seed: Annotated[int, Field(ge=0)] = 1
    threads: PositiveInt | None = None
    lr: Positive = 1e-4
    warmup: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises; it is constant afterwards."""
    weight_decay: NonNegative = 0.0
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip_norm: Positive = 1.0
    clip: NonNegative = 0.2
    """Value clipping: how far a new value may differ from the old one in the loss; 0: no clipping. NeMo-Aligner's
    loss_clip_val."""
    batch: PositiveInt | None = None
    """Rows per update: a critic_train call with more rows makes several. Default: every call is one update."""
    micro_batch_tokens: PositiveInt = 8192
    """Maximum tokens in one forward pass. Affects memory and time, never the gradient."""

    def optimizer(self) -> TrainTable:
        return TrainTable(
            steps=1, lr=self.lr, schedule="constant", warmup=self.warmup, weight_decay=self.weight_decay,
            betas=self.betas, clip_norm=self.clip_norm,
        )  # fmt: skip


_CRITIC: TypeAdapter[CriticServerTable] = TypeAdapter(CriticServerTable)


def parse_critic(tree: Mapping[str, Any], source: str) -> CriticServerTable:
    table: CriticServerTable = check(_CRITIC, tree, source, CriticServerTable)
    return table
