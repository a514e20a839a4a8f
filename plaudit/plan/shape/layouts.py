"""Parallel layouts: how a model is sharded over devices, for generation and for training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plaudit.errors import ConfigError
from plaudit.plan.shape.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class GenerationLayout:
    """Layout of one replica.

    Without `ep`, experts are sharded like every matrix, or distributed whole over the tensor ranks as in our engines,
    which takes the same bytes. With `ep` they are distributed whole and tokens are exchanged; if ep > tp, the attention
    runs in ep / tp data-parallel groups on different sequences.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def width(self) -> int:
        return max(self.tp, self.ep)

    @property
    def devices(self) -> int:
        return self.width * self.pp

    @property
    def attention_groups(self) -> int:
        return self.width // self.tp

    def check(self, model: ModelShape) -> None:
        _positive(self.tp, self.pp, self.ep)
        _divides("generation", self.tp, model)
        if self.ep > 1 and (not model.experts or model.experts % self.ep or (self.ep % self.tp and self.tp % self.ep)):
            raise ConfigError(
                f"generation ep = {self.ep}: {model.name} has {model.experts} experts, which ep must divide, "
                f"and ep and tp = {self.tp} must divide one another"
            )
        _stages(self.pp, model)

    @staticmethod
    def parse(text: str) -> GenerationLayout:
        """Parse the printed form: tp4 pp2 ep8."""
        return GenerationLayout(**_sizes(text, ("tp", "pp", "ep"), ())[0])

    def __str__(self) -> str:
        cuts = [f"tp{self.tp}"] + [f"{k}{v}" for k, v in (("pp", self.pp), ("ep", self.ep)) if v > 1]
        return " ".join(cuts)


@dataclass(frozen=True, slots=True)
class TrainingLayout:
    """`dp` copies of tp × cp × pp devices. Experts are distributed over `ep` of the tp × cp × dp devices.

    zero: 0 nothing sharded, 1 optimizer sharded over dp, 2 gradients too, 3 weights too (FSDP), gathered layer by layer
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    vpp: int = 1
    zero: int = 1
    micro_tokens: int = 4096
    """Tokens per micro-batch: packed sequences, or a single longer one."""
    recompute: str = "none"
    """none | selective (the attention core) | full (everything but a layer's input)"""
    gradient_bytes: int = 4
    """4 if gradients are accumulated in fp32 (Megatron), 2 if in bf16 (FSDP2, NeMo RL)."""
    plain: bool = False
    """Plain modules (as in Plaudit's and FSDP trainers) store what fused ones (Megatron) recompute: the activated gate
    and the normed input."""
    park: bool = False
    """Offload inference-only models (reference, reward) to the host between uses."""
    offload_optimizer: bool = False

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def expert_copies(self) -> int:
        """Devices with the same experts."""
        return max(1, self.tp * self.cp * self.dp // self.ep)

    def check(self, model: ModelShape) -> None:
        _positive(self.tp, self.pp, self.dp, self.ep, self.cp, self.micro_tokens)
        _divides("training", self.tp, model)
        if self.ep > 1 and (not model.experts or model.experts % self.ep):
            raise ConfigError(
                f"training ep = {self.ep}: {model.name} has {model.experts} experts, which it must divide"
            )
        if (self.tp * self.cp * self.dp) % self.ep:
            raise ConfigError(
                f"training ep = {self.ep} does not divide tp × cp × dp = {self.tp} × {self.cp} × {self.dp}"
            )
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"zero = {self.zero}: expected 0, 1, 2 or 3")
        if self.gradient_bytes not in (2, 4):
            raise ConfigError(f"gradient_bytes = {self.gradient_bytes}: expected 2 (bf16) or 4 (fp32)")
        _stages(self.pp, model)

    @staticmethod
    def parse(text: str, micro_tokens: int) -> TrainingLayout:
        """Parse the printed form: tp2 dp8 pp4 ep8 cp2 zero1, or fsdp; recompute; parked reference; offload."""
        words = ("fsdp", "recompute", "parked", "reference", "offload")
        sizes, flags = _sizes(text, ("tp", "pp", "dp", "ep", "cp", "vpp", "zero"), words)
        if "fsdp" in flags:
            sizes["zero"] = 3
        cut = TrainingLayout(micro_tokens=micro_tokens, recompute="full" if "recompute" in flags else "none",
                             park="parked" in flags, offload_optimizer="offload" in flags)  # fmt: skip
        return replace(cut, **sizes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        cuts = [f"tp{self.tp}", f"dp{self.dp}"]
        cuts += [f"{k}{v}" for k, v in (("pp", self.pp), ("ep", self.ep), ("cp", self.cp)) if v > 1]
        cuts += ["fsdp" if self.zero == 3 else f"zero{self.zero}"]
        cuts += ["recompute"] if self.recompute == "full" else []
        cuts += ["parked reference"] if self.park else []
        return " ".join(cuts + (["offload"] if self.offload_optimizer else []))


def _sizes(text: str, names: Sequence[str], words: Sequence[str]) -> tuple[dict[str, int], set[str]]:
    """Parse a printed layout: (sizes by name, flags)."""
    sizes, flags = {}, set()
    for part in text.replace(",", " ").split():
        match = re.fullmatch(r"([a-z]+)=?(\d+)", part)
        if match and match[1] in names:
            sizes[match[1]] = int(match[2])
        elif part in words:
            flags.add(part)
        else:
            kinds = ", ".join((*(f"{name}N" for name in names), *words))
            raise ConfigError(f"layout {text!r}: {part!r} is none of {kinds}")
    return sizes, flags


def _positive(*sizes: int) -> None:
    if min(sizes) < 1:
        raise ConfigError(f"parallel sizes {sizes}: each is one or more")


def _divides(what: str, tp: int, model: ModelShape) -> None:
    if model.heads % tp:
        fits = [size for size in (1, 2, 4, 8, 16, 32, 64) if model.heads % size == 0 and size <= model.heads]
        near = min(fits, key=lambda size: abs(size - tp))
        raise ConfigError(
            f"{what} tp = {tp} does not divide the {model.heads} heads of {model.name}; nearest that does: tp = {near}"
        )


def _stages(pp: int, model: ModelShape) -> None:
    if pp > model.layers:
        raise ConfigError(f"pp = {pp}: {model.name} has {model.layers} layers, and a stage needs at least one")
