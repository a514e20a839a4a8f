"""Memory per device and per host in each phase.

Training follows Korthikanti et al., arXiv 2205.05198, with gated MLPs, grouped queries and experts counted separately;
weights take 2 B, gradients 4 or 2 B, Adam and master weights 12 B per parameter, sharded by tp, pp, ep and ZeRO.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.plan.cost.decode import Replica
from plaudit.plan.cost.term import Term, total
from plaudit.plan.cost.training import OWN_LOGITS, Trainer
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import DTYPE_BYTES, activation_bytes

GROUP_RATIO, GROUP_SLACK = 0.25, 4.0
"""Attention in groups of similar length: how far a sequence may exceed its group's shortest (ratio, tokens)."""
LEAST_KEYS, SCORES = 64, 32 * 2**20
"""Constants of `core/model/attention.py` on a CPU: minimum number of keys of a matmul, and bytes of scores computed at
once."""
HOST_SLACK = 1.5
"""Overhead of pinned copies and buffers of offloaded state (the factor of DeepSpeed's own estimator)."""


def weight_size(trainer: Trainer) -> float:
    """Bytes of one weight in training: for fp8 those of bf16, as it is cast from bf16 on use."""
    return activation_bytes(trainer.dtype)


def weights(trainer: Trainer, name: str = "weights") -> Term:
    here, layout, size = trainer.parameters_here(), trainer.layout, weight_size(trainer)
    inputs = (("bytes", size), ("parameters", here), ("dp", layout.dp))
    if layout.zero < 3:
        return Term(name, size * here, "B", "bytes of a weight · parameters of a device", inputs)
    ranks = layout.dp * layout.cp
    # Two layers are gathered at any time: the current one and the next.
    gathered = 2 * size * here / trainer.layers_here if ranks > 1 else 0.0
    shard = size * (trainer.dense_parameters_here() + trainer.expert_parameters_here() * layout.ep) / ranks
    return Term(name, shard + gathered, "B", "bytes of a weight · parameters / dp + two gathered layers", inputs)


def gradients(trainer: Trainer) -> Term:
    layout = trainer.layout
    cut = trainer.optimizer_parameters_here() if layout.zero >= 2 else trainer.parameters_here()
    cut *= trainer.trained_share
    size = float(layout.gradient_bytes)
    how = "bytes of a gradient · parameters whose gradients a device keeps"
    return Term("gradients", size * cut, "B", how, (("bytes", size), ("parameters", cut)))


def optimizer(trainer: Trainer) -> Term:
    own = trainer.optimizer_parameters_here() * trainer.trained_share
    size = 8.0 if trainer.dtype == "fp32" else 12.0
    how = "(8 Adam + 4 master where weights are narrower) · parameters a device updates"
    return Term("optimizer", size * own, "B", how, (("bytes", size), ("parameters", own)))


def activations(trainer: Trainer, length: float, fused: bool = True, sequence_parallel: bool = True) -> Term:
    """Activations kept for backward on the first stage, which keeps the most micro-batches."""
    model, layout = trainer.model, trainer.layout
    tokens = trainer.held_tokens(length)
    per_layer = activation_bytes_per_token(trainer, length, fused, sequence_parallel)
    layers = trainer.layers_here
    # 1F1B: the first stage has pp micro-batches in flight; interleaving adds (pp - 1) / (pp · vpp) of that.
    flight = layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.vpp) if layout.vpp > 1 else 1.0)
    if trainer.stage is not None:  # each later stage has one less; at most those of an update
        flight = min(layout.pp - trainer.stage, max(1.0, trainer.most_tokens / (tokens * layout.cp)))
    if layout.recompute == "full":
        kept = weight_size(trainer) * model.hidden * layers * flight + per_layer
        how = "bytes of a number · hidden · layers / pp · micro-batches in flight + one whole layer, per token"
    else:
        kept, how = per_layer * layers * flight, "bytes of a layer · layers / pp · micro-batches in flight, per token"
    if layout.plain and trainer.last:
        kept, how = kept + _end_bytes_per_token(trainer), f"{how}, and the last norm with the head's rows"
    inputs = (("tokens", tokens), ("bytes of a layer", per_layer), ("in flight", flight))
    return Term("activations", tokens * kept, "B", how, inputs)


def activation_bytes_per_token(
    trainer: Trainer, length: float, fused: bool = True, sequence_parallel: bool = True
) -> float:
    """Activation bytes of one layer on one device. `fused` attention stores no scores; sequence parallelism also shards
    the inputs of the norms."""
    model, layout = trainer.model, trainer.layout
    scores = 0.0 if fused or layout.recompute != "none" else 5.0 * model.heads * length
    inside = 2.0 * attention_numbers(trainer, length) + scores
    kept = 6.0 if _fused(trainer) else 8.0  # unfused, silu(gate) is kept beside gate, up and their product
    dense = (kept if model.gated else 4.0) * model.ffn
    share = model.moe_layers / model.layers
    routed = model.top_k * (2.0 * model.hidden + kept * model.expert_ffn) + kept * model.shared_ffn
    inside += routed * share + dense * (1 - share)
    wide = weight_size(trainer) / 2  # the sums above assume two bytes per value
    outside = _norm_bytes_per_token(trainer) if layout.plain else 10.0 * model.hidden
    return wide * (inside / layout.tp + outside / (layout.tp if sequence_parallel else 1))


def attention_numbers(trainer: Trainer, length: float) -> float:
    """Values stored per token in one layer: queries, keys, values and the attention output."""
    model = trainer.model
    queries = model.heads * (model.head_dim + model.rope_dim)
    keys = max(model.kv_heads, trainer.layout.tp) * model.head_dim  # each tensor rank has its own head or shares one
    out = float(model.heads * (model.v_dim or model.head_dim))
    # A shared prompt is computed once, but its keys and values are materialized for every response.
    laid_out = 2 * keys * trainer.keys_per_token * trainer.key_copies
    if not (trainer.layout.plain and trainer.dtype == "fp32"):
        # With context parallelism by heads (all-to-all), the output is kept on both sides of the exchange.
        return queries + laid_out + out * (2 if trainer.layout.plain and trainer.layout.cp > 1 else 1)
    # fp32 attention runs in groups of similar lengths (within a quarter plus four tokens): padded by half of that on
    # average, then repacked.
    padding = 1 + (GROUP_RATIO * length + GROUP_SLACK) / 2 / length
    return padding * (queries + laid_out + out + _kept_scores(model.heads, length)) + out


def _kept_scores(heads: int, length: float) -> float:
    """Stored scores per token in fp32 on a CPU: those of short sequences are kept, those of long ones recomputed."""
    scores = heads * max(LEAST_KEYS, length)
    return scores if 4 * length * scores <= SCORES else 0.0


def _norm_bytes_per_token(trainer: Trainer) -> float:
    """Activation bytes per token of a layer's two norms.

    Fused, a norm keeps its input (or the scaled input), and the next operation keeps its output; likewise for fp32 on a
    CPU with one process per model. Unfused modules compute in fp32: beside two-byte activations they keep a four-byte
    copy of their input.
    """
    layout, wide = trainer.layout, trainer.dtype == "fp32"
    if _fused(trainer) or (wide and layout.devices == 1):
        return 8.0 * trainer.model.hidden
    return (12.0 if wide else 16.0) * trainer.model.hidden


def _fused(trainer: Trainer) -> bool:
    """Whether norms and gates are single fused kernels. In Plaudit's trainer they are on a GPU with two-byte weights,
    one device per model and no recomputation."""
    layout = trainer.layout
    alone = layout.devices == 1
    return not layout.plain or (trainer.dtype != "fp32" and alone and layout.recompute == "none")


def _end_bytes_per_token(trainer: Trainer) -> float:
    """Activation bytes per token of the final norm and of the head's input."""
    return weight_size(trainer) / 2 * (_norm_bytes_per_token(trainer) / 2 + 2.0 * trainer.model.hidden)


def workspace(trainer: Trainer, length: float) -> Term:
    model, layout = trainer.model, trainer.layout
    tokens = trainer.held_tokens(length)
    per = activation_bytes_per_token(trainer, length)
    how = "gradients of one layer's activations, as backward passes it"
    if layout.plain:
        # A layer's activations are freed as their gradients are computed: at most the gradients of the MLP's two
        # branches exist at once.
        widest = max(float(model.ffn), model.top_k * model.expert_ffn + model.shared_ffn)
        per = weight_size(trainer) * (2 * widest / layout.tp + 2 * model.hidden)
        how = "gradients of an MLP's two branches, its input and its output, as backward passes it"
    return Term("workspace", tokens * per, "B", how, (("tokens", tokens),))


def holes(moment: Sequence[Term], constants: Constants) -> Term:
    """Memory that the allocator loses to fragmentation."""
    used = sum(term.value for term in moment)
    return Term("holes", (constants.heap_factor - 1) * used, "B", "(heap_factor - 1) · what comes and goes",
                (("heap_factor", constants.heap_factor), ("comes and goes", used)))  # fmt: skip


def logits(trainer: Trainer, length: float, backward: bool = True) -> Term:
    layout = trainer.layout
    # Log-probabilities are computed in chunks of at most this many tokens, in fp32, with their gradient.
    vocab = trainer.model.vocab
    most = OWN_LOGITS * layout.tp / vocab if layout.plain else 8192.0
    tokens = min(trainer.held_tokens(length), most)
    per = 2.0 + 4.0 + (4.0 if backward else 0.0)
    size = tokens * vocab * per / layout.tp if trainer.last else 0.0
    if trainer.last and layout.plain and backward and not trainer.adapted:
        # With several chunks the head's gradient is accumulated in fp32 and then rounded.
        size += vocab * trainer.model.hidden * (4.0 + weight_size(trainer)) / layout.tp
    return Term("logits", size, "B", "tokens · vocabulary · (2 bf16 + 4 fp32 + 4 gradient) / tp", (("tokens", tokens),))


def reserve(constants: Constants) -> Term:
    return Term(
        "reserve", constants.reserve_bytes, "B", "reserve_bytes: contexts, kernels, collectives, allocator slack"
    )


def graphs(constants: Constants) -> Term:
    return Term("graphs", constants.graph_bytes, "B", "graph_bytes: captured decode graphs")


def scoring(trainer: Trainer, length: float, resident: tuple[Term, ...] = ()) -> Term:
    """Memory of a forward-only pass: activations of one layer at a time."""
    tokens = trainer.held_tokens(length)
    moment = Term(
        "activations", 2 * tokens * activation_bytes_per_token(trainer, length), "B", "two layers' worth, per token"
    )
    return total(
        "scoring",
        [weights(trainer), moment, logits(trainer, length, False), reserve(trainer.constants), *resident],
        "B",
    )


def engine_weights(replica: Replica) -> Term:
    how = "bytes of the weights / tp, experts / width, and what all devices of a tp have: latents' and shared keys'"
    inputs = (("tp", replica.layout.tp), ("width", replica.layout.width))
    return Term("engine weights", replica.weight_bytes(), "B", how, inputs)


def sequence_bytes(replica: Replica, context: float) -> float:
    """KV cache bytes of one sequence on one of the devices that store it."""
    cuts = 1 if replica.model.latent else min(replica.layout.tp, replica.model.kv_heads)
    return replica.model.kv_numbers(context) * DTYPE_BYTES[replica.kv_dtype] / cuts / replica.layout.pp


def concurrency(replica: Replica, pool: float, context: float) -> float:
    """Sequences of `context` tokens whose KV cache fits on a replica; all devices of an attention group serve the same
    sequences."""
    return max(0.0, pool) / sequence_bytes(replica, context) * replica.layout.attention_groups
