"""Compares a vocabulary sharded over ranks with the unsharded one. A test runs this on each rank:
python -m tests.train.rank_vocabulary RANKS"""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from plaudit.algo.tokens import logprobs
from plaudit.algo.tokens.columns import column_logprobs, likeliest
from plaudit.algo.tokens.logprobs import Finish, token_logprobs_and_entropy
from plaudit.algo.tokens.vocabulary import SplitVocabulary
from plaudit.config.placement import ResourcesTable
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import use_packed_attention
from plaudit.errors import ModelError
from plaudit.models import new_llama
from plaudit.train.optim.sharding import Shards
from plaudit.train.policy.forward import hidden_of, logprobs_and_entropy, pack_responses
from plaudit.train.run.ranks import TENSOR, Ranks, join
from tests.core.tiny import VOCAB, model
from tests.train.rl_world import made_up

ROWS, HIDDEN, TOKENS = 11, 6, 23  # 23 is prime: the last rank has fewer tokens
DTYPE = torch.float64


class Watch(TorchDispatchMode):
    """Records the shapes of plain tensors that are created within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if type(out) is Tensor:
            self.shapes.add(tuple(out.shape))
        return out


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, HIDDEN), (TOKENS, HIDDEN), (TOKENS,))
    hidden, head, bias = (torch.randn(shape, generator=generator, dtype=DTYPE) for shape in shapes)
    return hidden.requires_grad_(), head.requires_grad_(), bias.requires_grad_()


def numbers(
    hidden: Tensor, head: Tensor, bias: Tensor, finish: Finish | None, split: SplitVocabulary | None
) -> list[Tensor]:
    """Log-probs, entropies, log-probs of some columns, and the gradients of a loss over all of them."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, TOKENS, (ROWS,), generator=generator)
    columns = torch.randint(0, TOKENS, (ROWS, 4), generator=generator)
    weights = torch.randn(ROWS, 6, generator=generator, dtype=DTYPE)
    logp, entropy = token_logprobs_and_entropy(hidden, head, targets, bias, 0.7, finish, True, split)
    several = column_logprobs(hidden, head, columns, bias, 0.7, finish, split)
    loss = (weights * torch.cat([logp[:, None], entropy[:, None], several], -1)).sum()
    return [logp, entropy, several, *torch.autograd.grad(loss, (hidden, head, bias))]


def check_numbers(ranks: Ranks, finish: Finish | None) -> None:
    assert ranks.mesh is not None
    mesh = ranks.mesh[TENSOR]
    shard_size = -(-TOKENS // mesh.size())
    start = mesh.get_local_rank() * shard_size
    split = SplitVocabulary(start, min(start + shard_size, TOKENS), shard_size, mesh)
    own = slice(split.start, split.end)
    hidden, head, bias = inputs()
    *expected, to_head, to_bias = numbers(hidden, head, bias, finish, None)
    parts = [each.detach()[own].clone().requires_grad_() for each in (head, bias)]
    with Watch() as watch:
        actual = numbers(hidden, *parts, finish, split)
    assert not any(TOKENS in shape for shape in watch.shapes), watch.shapes
    for value, reference in zip(actual, [*expected, to_head[own], to_bias[own]], strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)
    for count, limit in ((3, TOKENS), (9, TOKENS - 2), (5, 5)):  # also more than a rank has, and none from some ranks
        tokens, values = likeliest(hidden, parts[0], count, limit, parts[1], 0.7, finish, split)
        expected_likeliest = likeliest(hidden, head, count, limit, bias, 0.7, finish)
        assert torch.equal(tokens, expected_likeliest[0])
        torch.testing.assert_close(values, expected_likeliest[1], rtol=1e-12, atol=1e-12)
    rows = split.look_up(torch.arange(TOKENS)[None], parts[0])
    assert torch.equal(rows[0], head)
    (to_rows,) = torch.autograd.grad((rows * inputs()[1].detach().square()).sum(), parts[0])
    torch.testing.assert_close(to_rows, head.detach().square()[own])


def check_family(family: str, tied: bool, ranks: Ranks) -> None:
    """A sharded module: its log-probs, and the gradients of all sharded parameters."""
    samples = [
        replace(sample, **{name: tuple((t * 11 + 5) % VOCAB for t in getattr(sample, name)) for name in IDS})
        for sample in made_up()
    ]
    responses = pack_responses(samples, torch.device("cpu"))
    outputs, watches = [], [Watch(), Watch()]
    modules: list[nn.Module] = [model(family), model(family)]
    for module in modules:
        head: Any = module.get_output_embeddings()  # type: ignore[operator]
        head.weight = module.get_input_embeddings().weight if tied else head.weight  # type: ignore[operator]
        use_packed_attention(module)
    shards = Shards(modules[1], ranks)
    for module, watch in zip(modules, watches, strict=True):
        with watch:
            rows = hidden_of(module, responses)
            logp, entropy = logprobs_and_entropy(Decoder(module, "causal"), responses, rows, 0.9, True)
            (logp * torch.arange(len(logp)) + entropy).sum().backward()  # type: ignore[no-untyped-call]
        outputs.append((logp, entropy))
    assert [any(VOCAB in shape for shape in watch.shapes) for watch in watches] == [True, False], watches[1].shapes
    for value, reference in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)
    split = [name for name in shards.parameters if shards.on_both(name)]
    assert ("lm_head.weight" in split) == (not tied)
    assert "model.embed_tokens.weight" in split
    for name in split:
        reference = modules[0].get_parameter(name).grad
        value = modules[1].get_parameter(name).grad
        assert isinstance(value, DTensor)
        assert reference is not None
        assert (value.full_tensor() - reference).norm() < 1e-5 * reference.norm(), name


IDS = ("prompt_ids", "token_ids")


def check_refusal(ranks: Ranks) -> None:
    small = new_llama(
        "policy", vocab_size=5, hidden_size=32, layers=1, heads=4, intermediate_size=64, max_positions=8, seed=0
    )
    with pytest.raises(ModelError, match=r"5 tokens leaves a rank of tensor_parallel = 4 none, at ⌈5 / 4⌉ = 2 tokens"):
        Shards(small, ranks)


def main() -> None:
    size = int(sys.argv[1])
    torch.set_num_threads(1)
    with join(ResourcesTable(tensor_parallel=size, timeout=60.0), "cpu") as ranks:
        for finish in (None, lambda logits: 3 * torch.tanh(logits / 3)):
            for elements in (1 << 24, 3 * TOKENS):  # in one chunk and in several
                logprobs.LOGIT_ELEMENTS = elements
                check_numbers(ranks, finish)
        if size == 4:
            check_refusal(ranks)
        else:
            for family, tied in (
                ("llama", False),
                ("llama", True),
                ("qwen3", False),
                ("qwen2", True),
                ("gemma3", True),
            ):
                check_family(family, tied, ranks)


if __name__ == "__main__":
    main()
