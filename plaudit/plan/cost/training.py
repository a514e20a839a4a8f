"""Time of a training step and of a scoring pass: matmuls, attention, memory traffic, links, bubble, optimizer.

A device processes micro-batches of `tokens` tokens through its layers / pp layers. The time per layer is the
roofline's, and at least the host's kernel launch time. Backward costs twice the forward in matmuls, two and a half
times in fused attention (which recomputes its scores), and twice the forward in memory traffic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plaudit.plan.cost.links import Links
from plaudit.plan.cost.term import Term, total
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import Cluster, activation_bytes
from plaudit.plan.shape.layouts import TrainingLayout
from plaudit.plan.shape.model_shape import ModelShape

OWN_LOGITS = 1 << 24
"""Most logits that Plaudit's trainer materializes at once."""
FORMULAS = {
    "products": "2 · active parameters · tokens of a device · (1 forward + 2 backward, or 1 for frozen weights, "
    "+ 1 if recomputed) / (tp · pp) / (FLOP/s · gemm_share); what all tensor ranks of our trainer have, on each",
    "attention": "4 · layers · heads · head_dim · context · tokens · (1 + 2.5 backward + 1 if recomputed) / (tp · pp) "
    "/ (bf16 FLOP/s · attention_share)",
    "traffic": "(activations of a token · bytes of a number + 8 B · vocabulary) · activation_passes · tokens · "
    "(1 + 2 backward + 1 if recomputed) / (tp · pp) / (bandwidth · bandwidth_share)",
    "tensor parallel": "layers · 2 gathers and 2 scatters of tokens · hidden · bytes of a number, forward "
    "and again backward",
    "experts' all-to-all": "MoE layers · 2 · tokens · top_k · hidden · bytes of a number over ep, forward "
    "and again backward",
    "context parallel": "what passing keys and values around the cp devices, their gradients in backward, exceeds "
    "attention by: layers · tokens of all cp · keys and values · bytes of a number, (1 + 2 backward + 1 if recomputed)",
    "context exchange": "our trainer exchanges tokens for heads around attention: layers · tokens of a device · "
    "(queries + keys + values + outputs) · bytes of a number over cp, forward, again backward and if recomputed",
    "head again": "our trainer holds few logits at once: 2 · tokens · vocabulary · hidden once more in backward, and "
    "the head's gradient read and written for every stretch of 2²⁴ / vocabulary tokens",
    "launches": "what micro-batches · layers · (launch_seconds + experts of a device · expert_launch_seconds) exceeds "
    "the work by; in our trainer, the work of the layers alone",
    "weights gathered": "zero 3: what gathering each layer's weights, and scattering gradients, exceeds the work by",
    "pipeline bubble": "(pp - 1) / (micro-batches · vpp) of the above",
    "gradients": "reduce-scatter of gradients and all-gather of weights over dp, less one micro-batch's backward",
    "optimizer": "parameters of a device / dp · 28 B / (bandwidth · bandwidth_share); offloaded: 16 B over PCIe",
}


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model on the devices that train or score it."""

    model: ModelShape
    cluster: Cluster
    layout: TrainingLayout
    dtype: str
    constants: Constants
    keys_per_token: float = 1.0
    """Keys that attention materializes per computed token: more than one if responses share their prompt."""
    most_tokens: float = math.inf
    """Tokens of an update on one device: an upper bound for a micro-batch."""
    trained_share: float = 1.0
    """Share of the parameters that are trained; the others are frozen, without gradients or optimizer state."""
    stage: int | None = None
    """Stage of our trainer's pipeline that is computed; None: the mean of all stages."""

    @property
    def adapted(self) -> bool:
        return self.trained_share < 1

    def held_tokens(self, length: float) -> float:
        """Tokens of a micro-batch on one device, for sequences of `length` tokens."""
        return max(min(float(self.layout.micro_tokens), self.most_tokens), length) / self.layout.cp

    @property
    def layers_here(self) -> float:
        """Layers of this stage; if they do not divide evenly, the first stages have one more."""
        if self.stage is None:
            return self.model.layers / self.layout.pp
        each, more = divmod(self.model.layers, self.layout.pp)
        return float(each + (self.stage < more))

    @property
    def last(self) -> bool:
        return self.stage is None or self.stage == self.layout.pp - 1

    def expert_parameters_here(self) -> float:
        return self.model.routed_parameters / self.layout.ep * self.layers_here / self.model.layers

    def dense_parameters_here(self) -> float:
        model, share = self.model, self.layers_here / self.model.layers
        dense = model.parameters - model.routed_parameters
        if self.stage is None:
            return dense / self.layout.tp / self.layout.pp + self.copied_here
        # The first stage has the embedding, the last the head; tied ones are on both.
        ends = model.vocab * model.hidden * ((self.stage == 0) + self.last)
        return ((dense - model.embedding_parameters) * share + ends) / self.layout.tp + self.copied_here

    @property
    def copied_here(self) -> float:
        """Parameters replicated on all tensor ranks of our trainer."""
        if not self.layout.plain:
            return 0.0
        return self.model.copied_parameters(self.layout.tp, keys_whole=True) * self.layers_here / self.model.layers

    def parameters_here(self) -> float:
        return self.expert_parameters_here() + self.dense_parameters_here()

    def step(self, sequences: float, length: float, updates: int = 1, ragged: bool = False) -> Term:
        """Time to train on `sequences` of mean `length` tokens, forward and backward, in `updates` optimizer steps.

        If lengths differ (`ragged`), micro-batches are packed and not completely filled.
        """
        return self._pass("training", sequences, length, updates, True, ragged)

    def score(self, sequences: float, length: float, name: str = "scoring") -> Term:
        """Time of a forward pass over ragged sequences: log-probabilities, values, rewards."""
        return self._pass(name, sequences, length, 0, False, True)

    def _pass(self, name: str, sequences: float, length: float, updates: int, backward: bool, ragged: bool) -> Term:
        model, layout, fixed, chip = self.model, self.layout, self.constants, self.cluster.accelerator
        rounds = max(1, updates)
        fill = fixed.packing_share if ragged else 1.0
        # Micro-batches are whole: an uneven split takes as long as the device with the most.
        micro_tokens = max(float(layout.micro_tokens), length)
        micro_batches = max(1, math.ceil(sequences / rounds / layout.dp * length / fill / micro_tokens - 1e-9)) * rounds
        tokens = max(1.0, sequences / layout.dp * length / layout.cp) / fill
        again = 1.0 if backward and layout.recompute == "full" else 0.0
        core_again = 1.0 if backward and layout.recompute in ("full", "selective") else 0.0
        cuts = layout.tp * layout.pp
        seen = length / 2
        gemm = chip.flops(self.dtype) * (
            fixed.gemm_share if self.dtype in ("bf16", "fp32") else fixed.narrow_gemm_share
        )
        bandwidth = chip.bandwidth * fixed.bandwidth_share
        # Experts are sharded by ep only, so with tp > 1 each device computes its share of all tokens. Half of
        # backward's matmul time is weight gradients, which frozen weights do not have.
        learned = 1 + self.trained_share if backward else 0.0
        copied = model.copied_parameters(layout.tp) / layout.pp if layout.plain else 0.0
        products = 2 * (model.active_parameters / cuts + copied) * tokens * (1 + learned + again) / gemm
        attention = model.attention_flops(seen) * tokens * (1 + 2.5 * backward + core_again) / cuts
        attention /= chip.bf16 * fixed.attention_share
        logits = model.vocab * 8.0 / layout.tp / layout.pp  # two bytes, four bytes, and a two-byte gradient of each
        moved = (model.activation_numbers / cuts * activation_bytes(self.dtype) + logits) * fixed.activation_passes
        traffic = moved * tokens * (1 + 2 * backward + again) / bandwidth
        passes = 1 + backward + again
        work = {
            "products": products, "attention": attention, "traffic": traffic,
            "tensor parallel": self._tensor_parallel(tokens) * passes,
            "experts' all-to-all": self._all_to_all(tokens) * passes,
        }  # fmt: skip
        if layout.cp > 1 and layout.plain:
            work["context exchange"] = self._exchanged(tokens) * passes
        elif layout.cp > 1:
            passed = self._keys_passed(tokens) * (1 + 2 * backward + core_again)
            work["context parallel"] = max(0.0, passed - attention)
        if layout.plain and backward:
            work["head again"] = self._head_again(tokens, micro_batches, gemm, bandwidth)
        busy = sum(work.values())
        # In our trainer the layers finish before the head starts, so the head cannot hide the layers' kernel launches.
        apart = 0.0
        if layout.plain:
            head = 2 * model.vocab * model.hidden / cuts / gemm + logits * fixed.activation_passes / bandwidth
            apart = head * tokens * (1 + 2 * backward + again) + work.get("head again", 0.0)
        per_expert_layer = fixed.expert_launch_seconds * model.experts / layout.ep
        kernels = (model.layers * fixed.launch_seconds + model.moe_layers * per_expert_layer) / layout.pp
        launched = micro_batches * kernels * (1.0 if backward else 1 / 3)
        work["launches"] = max(0.0, launched - (busy - apart))
        busy += work["launches"]
        if layout.zero == 3:
            work["weights gathered"] = max(0.0, self._gathered(micro_batches, backward) - busy)
            busy += work["weights gathered"]
        work["pipeline bubble"] = busy * (layout.pp - 1) / (micro_batches / rounds * layout.vpp)
        if backward:
            overlap = busy / micro_batches * 2 / 3
            work["gradients"] = rounds * max(0.0, self._gradients() - overlap)
            work["optimizer"] = rounds * self._optimizer(bandwidth)
        inputs = (("sequences", sequences), ("length", length), ("micro-batches", micro_batches), ("tokens", tokens))
        return total(name, [Term(k, v, "s", FORMULAS[k], inputs) for k, v in work.items() if v], "s")

    def _head_again(self, tokens: float, micro_batches: float, gemm: float, bandwidth: float) -> float:
        head = self.model.vocab * self.model.hidden / self.layout.tp
        stretches = micro_batches * math.ceil(tokens / micro_batches * self.model.vocab / self.layout.tp / OWN_LOGITS)
        # The gradient of a chunk is accumulated in place if the head is in fp32; otherwise it is written, read and
        # added.
        touched = 8.0 if self.dtype == "fp32" else 12.0
        summed = stretches * head * touched / bandwidth if stretches > micro_batches and not self.adapted else 0.0
        return 2 * tokens * head / gemm + summed

    def _tensor_parallel(self, tokens: float) -> float:
        """Seconds of one forward pass. With sequence parallelism an all-reduce becomes a gather and a scatter of equal
        bytes."""
        if self.layout.tp == 1:
            return 0.0
        links = Links.of(self.cluster, self.layout.tp, self.constants)
        return (
            self.model.layers
            / self.layout.pp
            * 2
            * links.all_reduce(tokens * self.model.hidden * activation_bytes(self.dtype))
        )

    def _keys_passed(self, tokens: float) -> float:
        """Seconds of one forward pass of ring attention: every device receives the keys and values of the whole
        sequence."""
        model, layout = self.model, self.layout
        each = model.kv_numbers_per_layer
        if model.latent:  # training expands latents first
            each = model.heads * (model.head_dim + model.rope_dim + model.v_dim)
        links = Links.of(self.cluster, layout.cp, self.constants, stride=layout.tp)
        size = layout.cp * tokens * each * activation_bytes(self.dtype) / layout.tp
        return model.layers / layout.pp * links.all_gather(size)

    @property
    def key_copies(self) -> float:
        """Copies of each key-value head if our trainer exchanges tokens for heads over more ranks than heads."""
        keys = max(1, self.model.kv_heads // self.layout.tp)
        return math.lcm(keys, self.layout.cp) / keys if self.layout.plain else 1.0

    def _exchanged(self, tokens: float) -> float:
        """Seconds of the token-head exchange in one forward pass."""
        model, layout = self.model, self.layout
        around = model.heads * (model.head_dim + model.rope_dim + (model.v_dim or model.head_dim))  # queries, outputs
        # Latents are first expanded to keys and values of all heads.
        numbers = 2 * around if model.latent else around + model.kv_numbers_per_layer * self.key_copies
        links = Links.of(self.cluster, layout.cp, self.constants, stride=layout.tp)
        sent = tokens * numbers * activation_bytes(self.dtype) / layout.tp
        return model.layers / layout.pp * links.all_to_all(sent)

    def _all_to_all(self, tokens: float) -> float:
        if self.layout.ep == 1:
            return 0.0
        model, layout = self.model, self.layout
        links = Links.of(self.cluster, layout.ep, self.constants)
        sent = tokens / layout.tp * model.top_k * model.hidden * activation_bytes(self.dtype)
        copies = model.top_k / max(1.0, min(model.top_k, layout.ep / links.inside))
        return model.moe_layers / layout.pp * 2 * links.all_to_all(sent, copies)

    def _gathered(self, micro_batches: float, backward: bool) -> float:
        """ZeRO 3: per micro-batch weights are gathered twice and gradients scattered once; in scoring, weights once."""
        layout, size = self.layout, activation_bytes(self.dtype)
        ranks = layout.dp * layout.cp
        links = Links.of(self.cluster, ranks, self.constants, stride=layout.tp)
        if layout.ep == 1:
            gathered = links.all_gather(self.parameters_here() * size)
        else:  # experts are gathered only within the groups that have the same ones
            groups = Links.of(self.cluster, ranks // layout.ep, self.constants, stride=layout.tp * layout.ep)
            gathered = links.all_gather(self.dense_parameters_here() * size)
            gathered += groups.all_gather(self.expert_parameters_here() * size)
        return micro_batches * (3 if backward else 1) * gathered

    def _gradients(self) -> float:
        layout = self.layout
        if layout.zero == 3:
            return 0.0
        dense = Links.of(self.cluster, layout.dp * layout.cp, self.constants, stride=layout.tp)
        experts = Links.of(self.cluster, layout.expert_copies, self.constants, stride=layout.ep)
        # Gradients are reduce-scattered, weights all-gathered.
        return (
            self.trained_share
            * (layout.gradient_bytes + activation_bytes(self.dtype))
            * (dense.all_gather(self.dense_parameters_here()) + experts.all_gather(self.expert_parameters_here()))
        )

    def _optimizer(self, bandwidth: float) -> float:
        layout = self.layout
        owned = self.optimizer_parameters_here() * self.trained_share
        if layout.offload_optimizer:
            return owned * 16.0 / (self.cluster.accelerator.pcie * self.constants.bulk_link_share)
        return owned * 28.0 / bandwidth

    def optimizer_parameters_here(self) -> float:
        layout = self.layout
        if layout.zero == 0:
            return self.parameters_here()
        dense = self.dense_parameters_here() / (layout.dp * layout.cp)
        return dense + self.expert_parameters_here() / layout.expert_copies
