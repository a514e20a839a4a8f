"""Time of a decode step and of a prefill on one replica: rooflines plus fixed costs per layer and step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plaudit.plan.cost.links import Links
from plaudit.plan.cost.term import Term, total
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import DTYPE_BYTES, Cluster, activation_bytes
from plaudit.plan.shape.layouts import GenerationLayout
from plaudit.plan.shape.model_shape import ModelShape

FORMULAS = {
    "dense weights": "the slower of reading (bytes of attention, shared and dense MLP matrices / tp / (bandwidth · "
    "bandwidth_share)) and multiplying (2 · their numbers · sequences / tp / (FLOP/s · gemm_share))",
    "experts": "the slower of reading (experts hit · bytes of one / width / (bandwidth · bandwidth_share)) and "
    "multiplying (2 · top_k · numbers of one · sequences · imbalance / width / (FLOP/s · gemm_share)); "
    "hit = E · (1 - (1 - top_k/E)^sequences)",
    "cache": "sequences · cache of one at this context · cache_passes / min(tp, kv heads) / (bandwidth · "
    "bandwidth_share)",
    "communication": "layers · 2 all-reduces of sequences · hidden · bytes of a number over tp; with ep an all-to-all "
    "there and back, behind the other half of the batch where it leaves the domain",
    "layers": "layers · layer_seconds + layers with experts · expert_layer_seconds",
    "activations": "sequences · activations of a token · bytes of a number · activation_passes / tp / (bandwidth · "
    "bandwidth_share)",
    "step": "step_seconds + sequences of a node · sequence_seconds, and pp - 1 hops",
}


@dataclass(frozen=True, slots=True)
class Replica:
    """A model on the devices of one generation replica."""

    model: ModelShape
    cluster: Cluster
    layout: GenerationLayout
    dtype: str
    kv_dtype: str
    constants: Constants

    def _rate(self) -> float:
        share = self.constants.gemm_share if self.dtype in ("bf16", "fp32") else self.constants.narrow_gemm_share
        return self.cluster.accelerator.flops(self.dtype) * share * self._unpacking()

    def _unpacking(self) -> float:
        return self.constants.unpack_share if self.cluster.accelerator.unpacks(self.dtype) else 1.0

    def _bandwidth(self) -> float:
        return self.cluster.accelerator.bandwidth * self.constants.bandwidth_share

    def dense_numbers(self) -> float:
        """Parameters of the matrices that every token uses, without the vocabulary head."""
        model = self.model
        return (
            model.active_parameters
            - model.vocab * model.hidden
            - model.moe_layers * model.top_k * model.expert_parameters
        )

    def dense_here(self) -> float:
        """Dense parameters that a device stores and computes with, summed over all pipeline stages."""
        return self.dense_numbers() / self.layout.tp + self.model.copied_parameters(self.layout.tp)

    def weight_bytes(self) -> float:
        """Weight bytes per device. Embedding and head are stored in at least bf16."""
        model, size = self.model, DTYPE_BYTES[self.dtype]
        head = model.embedding_parameters * activation_bytes(self.dtype)
        dense, experts = self.dense_here() * size, model.routed_parameters * size
        return (dense + head / self.layout.tp) / self.layout.pp + experts / self.layout.width / self.layout.pp

    def step_parts(self, sequences: float, context: float) -> dict[str, float]:
        """Seconds of one decode step by component, for `sequences` sequences of `context` tokens on the replica."""
        model, layout, fixed = self.model, self.layout, self.constants
        size, rate, bandwidth = DTYPE_BYTES[self.dtype], self._rate(), self._bandwidth()
        number = activation_bytes(self.dtype)
        # Pipeline stages work on different sequences at the same time, so the time is that of one stage's share of the
        # sequences passing through all layers.
        passing = max(1.0, sequences / layout.pp)
        local = max(1.0, passing / layout.attention_groups)
        dense, head = self.dense_here(), model.vocab * model.hidden / layout.tp
        reading = bandwidth * self._unpacking()
        read = dense * size / reading + head * number / bandwidth
        matrices = max(read, 2 * (dense + head) * local / rate)
        experts = 0.0
        if model.experts:
            hit = model.experts * (1 - (1 - model.top_k / model.experts) ** passing)
            read = hit * model.expert_parameters * size / reading
            multiply = 2 * model.top_k * model.expert_parameters * passing * self._imbalance(passing) / rate
            experts = model.moe_layers * max(read, multiply) / layout.width
        cache = local * model.kv_numbers(context) * DTYPE_BYTES[self.kv_dtype] * fixed.cache_passes
        cache /= self._kv_cuts() * bandwidth
        # The host CPU of each node handles the sequences of the attention groups on that node.
        hosts = max(1.0, layout.attention_groups * layout.tp / self.cluster.devices_per_node)
        hosted = sequences / min(hosts, layout.attention_groups) * fixed.sequence_seconds
        work = {
            "dense weights": matrices,
            "experts": experts,
            "cache": cache,
            "communication": self._reduces(local),
            "layers": model.layers * fixed.layer_seconds + model.moe_layers * fixed.expert_layer_seconds,
            "activations": local * model.activation_numbers * number * fixed.activation_passes / layout.tp / bandwidth,
            "step": fixed.step_seconds + hosted + (layout.pp - 1) * fixed.hop_seconds,
        }
        work["communication"] += self._exchanged(passing, work)
        return work

    def _exchanged(self, passing: float, work: dict[str, float]) -> float:
        """Seconds that the expert all-to-all adds to a step. If it leaves the scale-up domain, engines can overlap it
        by splitting the batch in two, which is counted if it is faster: weights are then read, and kernels launched,
        twice."""
        exchange = self._exchange(passing)
        if self.layout.ep <= self.cluster.domain:
            return exchange
        again = work["dense weights"] + work["experts"] + work["layers"]
        return min(exchange, max(again, exchange - sum(work.values())))

    def step_seconds(self, sequences: float, context: float) -> float:
        return sum(self.step_parts(sequences, context).values())

    def step(self, sequences: float, context: float) -> Term:
        inputs = (("sequences", sequences), ("context", context))
        parts = self.step_parts(sequences, context)
        return total("decode step", [Term(k, v, "s", FORMULAS[k], inputs) for k, v in parts.items() if v], "s")

    def prefill_seconds(self, tokens: float, prompts: float = 1.0) -> float:
        """Seconds to prefill `prompts` prompts of `tokens` tokens on all devices of the replica."""
        model, layout = self.model, self.layout
        matrices = 2 * (model.active_parameters - model.vocab * model.hidden) * tokens
        attention = model.attention_flops(tokens / 2) * tokens
        bf16 = self.cluster.accelerator.bf16 * self.constants.attention_share
        moved = tokens * model.activation_numbers * activation_bytes(self.dtype) * self.constants.activation_passes
        work = matrices / self._rate() + attention / bf16 + moved / self._bandwidth()
        talk = self._communication(tokens, tokens, bulk=True) / layout.attention_groups
        return prompts * (work / layout.devices + talk / layout.pp)

    def _kv_cuts(self) -> int:
        return 1 if self.model.latent else min(self.layout.tp, self.model.kv_heads)

    def _imbalance(self, sequences: float) -> float:
        """Load of the fullest device over the mean, for tokens routed to experts at random."""
        width = self.layout.ep
        if width == 1:
            return 1.0
        mean = sequences * self.model.top_k / width
        return 1 + min(width - 1.0, math.sqrt(2.0 * math.log(width) / mean))

    def _communication(self, local: float, passing: float, bulk: bool = False) -> float:
        return self._reduces(local, bulk) + self._exchange(passing, bulk)

    def _reduces(self, local: float, bulk: bool = False) -> float:
        model, layout = self.model, self.layout
        if layout.tp == 1:
            return 0.0
        links = Links.of(self.cluster, layout.tp, self.constants, bulk=bulk)
        # With expert parallelism, only the attention of an MoE layer needs an all-reduce.
        reduces = 2 * model.layers - (model.moe_layers if layout.ep > 1 else 0)
        return reduces * links.all_reduce(local * model.hidden * activation_bytes(self.dtype))

    def _exchange(self, passing: float, bulk: bool = False) -> float:
        model, layout = self.model, self.layout
        if layout.ep == 1:
            return 0.0
        links = Links.of(self.cluster, layout.ep, self.constants, bulk=bulk)
        sent = passing / layout.ep * model.top_k * model.hidden * activation_bytes(self.dtype)
        copies = model.top_k / max(1.0, min(model.top_k, layout.ep / links.inside))
        return model.moe_layers * 2 * links.all_to_all(sent, copies)
