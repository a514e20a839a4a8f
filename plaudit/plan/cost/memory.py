"""Bytes per device and per host, phase by phase.

Training: Korthikanti et al., arXiv 2205.05198, with gated MLPs, grouped queries and experts counted for themselves;
weights 2 B, gradients 4 or 2, Adam and master weights 12 per parameter, cut by tp, pp, ep and ZeRO.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.plan.cost.decode import Replica
from plaudit.plan.cost.term import Term, total
from plaudit.plan.cost.training import OWN_LOGITS, Trainer
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import DTYPE_BYTES, activation_bytes

GROUP_RATIO, GROUP_SLACK = 0.25, 4.0
"""How much longer than its shortest a sequence of a group may be, where attention goes by groups."""
LEAST_KEYS, SCORES = 64, 32 * 2**20
"""Of `core/model/attention.py`, on a CPU: keys of the shortest product, bytes of scores that are computed at once."""
HOST_SLACK = 1.5
"""Pinned copies and buffers of what is offloaded (the factor of DeepSpeed's own estimator)."""


def weight_size(trainer: Trainer) -> float:
    """Bytes of one weight in training: fp8 is cast from bf16 as it is used."""
    return activation_bytes(trainer.dtype)


def weights(trainer: Trainer, name: str = "weights") -> Term:
    here, layout, size = trainer.parameters_here(), trainer.layout, weight_size(trainer)
    inputs = (("bytes", size), ("parameters", here), ("dp", layout.dp))
    if layout.zero < 3:
        return Term(name, size * here, "B", "bytes of a weight · parameters of a device", inputs)
    ranks = layout.dp * layout.cp
    # Two layers are whole at any time: the one at work and the next.
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
    """Kept for backward by the first stage, which holds the most micro-batches."""
    model, layout = trainer.model, trainer.layout
    tokens = trainer.held_tokens(length)
    per_layer = activation_bytes_per_token(trainer, length, fused, sequence_parallel)
    layers = trainer.layers_here
    # 1F1B: the first stage has pp micro-batches in flight; interleaving adds (pp - 1) / (pp · vpp) of that.
    flight = layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.vpp) if layout.vpp > 1 else 1.0)
    if trainer.stage is not None:  # and each of the others one less, if an update has as many
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
    """Of one layer on one device. `fused` attention keeps no scores; sequence parallelism cuts norms' inputs too."""
    model, layout = trainer.model, trainer.layout
    scores = 0.0 if fused or layout.recompute != "none" else 5.0 * model.heads * length
    inside = 2.0 * attention_numbers(trainer, length) + scores
    kept = 6.0 if _fused(trainer) else 8.0  # alone, silu(gate) is kept beside gate, up and their product
    dense = (kept if model.gated else 4.0) * model.ffn
    share = model.moe_layers / model.layers
    routed = model.top_k * (2.0 * model.hidden + kept * model.expert_ffn) + kept * model.shared_ffn
    inside += routed * share + dense * (1 - share)
    wide = weight_size(trainer) / 2  # the sums above are of two-byte numbers
    outside = _norm_bytes_per_token(trainer) if layout.plain else 10.0 * model.hidden
    return wide * (inside / layout.tp + outside / (layout.tp if sequence_parallel else 1))


def attention_numbers(trainer: Trainer, length: float) -> float:
    """Of a token in one layer: queries, keys, values and what comes out."""
    model = trainer.model
    queries = model.heads * (model.head_dim + model.rope_dim)
    keys = max(model.kv_heads, trainer.layout.tp) * model.head_dim  # tensor ranks have one each, or share it
    out = float(model.heads * (model.v_dim or model.head_dim))
    # A shared prompt is computed once, and its keys and values are laid out again for every response.
    laid_out = 2 * keys * trainer.keys_per_token * trainer.key_copies
    if not (trainer.layout.plain and trainer.dtype == "fp32"):
        # Where heads are exchanged for tokens, what comes out is kept on both sides.
        return queries + laid_out + out * (2 if trainer.layout.plain and trainer.layout.cp > 1 else 1)
    # fp32 goes in groups of like length, up to a quarter and four tokens apart: padded by half of that, and put back
    # into one row afterwards.
    padding = 1 + (GROUP_RATIO * length + GROUP_SLACK) / 2 / length
    return padding * (queries + laid_out + out + _kept_scores(model.heads, length)) + out


def _kept_scores(heads: int, length: float) -> float:
    """Of a token in float32 on a CPU, where short sequences keep theirs and those of long ones are computed again."""
    scores = heads * max(LEAST_KEYS, length)
    return scores if 4 * length * scores <= SCORES else 0.0


def _norm_bytes_per_token(trainer: Trainer) -> float:
    """Of a layer's two norms. Fused, each keeps what it was given, or that scaled, and what follows keeps its result.
    So on a CPU too, where fp32 is trained, one process to a model. Plain modules work in fp32: beside two-byte
    activations they keep a copy of their input of four bytes."""
    layout, wide = trainer.layout, trainer.dtype == "fp32"
    if _fused(trainer) or (wide and layout.devices == 1):
        return 8.0 * trainer.model.hidden
    return (12.0 if wide else 16.0) * trainer.model.hidden


def _fused(trainer: Trainer) -> bool:
    """Whether norms and gates are single kernels. In Plaudit's trainer those of a GPU are, on weights of two bytes, one
    device to a model, and not where layers compute themselves again."""
    layout = trainer.layout
    alone = layout.devices == 1
    return not layout.plain or (trainer.dtype != "fp32" and alone and layout.recompute == "none")


def _end_bytes_per_token(trainer: Trainer) -> float:
    """The norm after the last layer, and the rows that the head reads."""
    return weight_size(trainer) / 2 * (_norm_bytes_per_token(trainer) / 2 + 2.0 * trainer.model.hidden)


def workspace(trainer: Trainer, length: float) -> Term:
    model, layout = trainer.model, trainer.layout
    tokens = trainer.held_tokens(length)
    per = activation_bytes_per_token(trainer, length)
    how = "gradients of one layer's activations, as backward passes it"
    if layout.plain:
        # What a layer kept is dropped as its gradients are made: at once there are those of the MLP's two branches.
        widest = max(float(model.ffn), model.top_k * model.expert_ffn + model.shared_ffn)
        per = weight_size(trainer) * (2 * widest / layout.tp + 2 * model.hidden)
        how = "gradients of an MLP's two branches, its input and its output, as backward passes it"
    return Term("workspace", tokens * per, "B", how, (("tokens", tokens),))


def holes(moment: Sequence[Term], constants: Constants) -> Term:
    """What the allocator keeps in pieces of what came and went."""
    used = sum(term.value for term in moment)
    return Term("holes", (constants.heap_factor - 1) * used, "B", "(heap_factor - 1) · what comes and goes",
                (("heap_factor", constants.heap_factor), ("comes and goes", used)))  # fmt: skip


def logits(trainer: Trainer, length: float, backward: bool = True) -> Term:
    layout = trainer.layout
    # Log-probabilities are taken in stretches of at most this many tokens, in fp32, with their gradient.
    vocab = trainer.model.vocab
    most = OWN_LOGITS * layout.tp / vocab if layout.plain else 8192.0
    tokens = min(trainer.held_tokens(length), most)
    per = 2.0 + 4.0 + (4.0 if backward else 0.0)
    size = tokens * vocab * per / layout.tp if trainer.last else 0.0
    if trainer.last and layout.plain and backward and not trainer.adapted:
        # Over several stretches the head's gradient is summed in fp32 and then rounded.
        size += vocab * trainer.model.hidden * (4.0 + weight_size(trainer)) / layout.tp
    return Term("logits", size, "B", "tokens · vocabulary · (2 bf16 + 4 fp32 + 4 gradient) / tp", (("tokens", tokens),))


def reserve(constants: Constants) -> Term:
    return Term(
        "reserve", constants.reserve_bytes, "B", "reserve_bytes: contexts, kernels, collectives, allocator slack"
    )


def graphs(constants: Constants) -> Term:
    return Term("graphs", constants.graph_bytes, "B", "graph_bytes: captured decode graphs")


def scoring(trainer: Trainer, length: float, resident: tuple[Term, ...] = ()) -> Term:
    """Forward only: one layer's activations at a time."""
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
    """Cache of one sequence on one device of those that hold it."""
    cuts = 1 if replica.model.latent else min(replica.layout.tp, replica.model.kv_heads)
    return replica.model.kv_numbers(context) * DTYPE_BYTES[replica.kv_dtype] / cuts / replica.layout.pp


def concurrency(replica: Replica, pool: float, context: float) -> float:
    """Sequences of a replica whose caches fit, each grown to `context`: devices of an attention group hold the same."""
    return max(0.0, pool) / sequence_bytes(replica, context) * replica.layout.attention_groups
