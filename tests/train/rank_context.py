"""Compares rows sharded over ranks with transformers' own forward pass, one sequence at a time. A test runs this on
each rank: python -m tests.train.rank_context RANKS"""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from plaudit.config.placement import ResourcesTable
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import hidden_rows, use_packed_attention
from plaudit.models.heads.value_head import ValueModel
from plaudit.records import Sample
from plaudit.train.optim.sharding import Shards
from plaudit.train.policy.forward import (
    column_logprobs_of,
    hidden_of,
    likeliest_of,
    logprobs_and_entropy,
    pack_responses,
    values_of,
)
from plaudit.train.run.ranks import ONE, Ranks, join
from tests.core.tiny import VOCAB, model
from tests.train.rl_world import made_up, tiny

IDS = ("prompt_ids", "token_ids")


def samples(longest: int) -> list[Sample]:
    """Samples of different lengths: two share their prompt, and one is longer than all others together."""
    ragged = [
        replace(sample, **{name: tuple((t * 11 + 5) % VOCAB for t in getattr(sample, name)) for name in IDS})
        for sample in made_up()
    ]
    ragged[1] = replace(ragged[1], prompt_ids=ragged[0].prompt_ids)
    ids = tuple((7 * t * t + 3) % VOCAB for t in range(longest))
    return [*ragged, with_response(ragged[0], ids)]


def with_response(sample: Sample, ids: tuple[int, ...]) -> Sample:
    count = len(ids)
    return replace(
        sample, token_ids=ids, mask=(1,) * count, logprobs=(0.0,) * count, raw_logprobs=(0.0,) * count,
        versions=(0,) * count,
    )  # fmt: skip


def by_itself(module: Any, batch: list[Sample]) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens and entropies before them, 0 where a token is not the policy's."""
    logps, entropies = [], []
    for sample in batch:
        ids = torch.tensor([sample.prompt_ids + sample.token_ids])
        table = module(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        before = table[len(sample.prompt_ids) - 1 : -1]
        mask = torch.tensor(sample.mask)
        logps.append(before.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0] * mask)
        entropies.append(-(before.exp() * before).sum(-1) * mask)
    return torch.cat(logps), torch.cat(entropies)


def loss_of(logp: Tensor, entropy: Tensor) -> Tensor:
    return (logp * torch.linspace(-1, 1, len(logp)) + 0.1 * entropy).sum()


def alike(sharded: nn.Module, expected: nn.Module, name: str) -> None:
    for parameter, reference in expected.named_parameters():
        gradient = sharded.get_parameter(parameter).grad
        if reference.grad is None:
            assert gradient is None or not gradient.full_tensor().any(), (name, parameter)  # type: ignore[union-attr]
            continue
        assert isinstance(gradient, DTensor), (name, parameter)
        assert (gradient.full_tensor() - reference.grad).norm() < 1e-5 * reference.grad.norm().clamp_min(1e-3), (
            name,
            parameter,
        )


def check_family(family: str, batch: list[Sample], ranks: Ranks, recompute: bool = False) -> None:
    plain, sharded = model(family), model(family)
    use_packed_attention(sharded)
    if recompute:
        sharded.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        sharded.train()
    Shards(sharded, ranks)
    expected = by_itself(plain, batch)
    loss_of(*expected).backward()  # type: ignore[no-untyped-call]
    responses = pack_responses(batch, torch.device("cpu"), context=ranks.context)
    rows = hidden_of(sharded, responses)
    assert len(rows) == max(1, len(ranks.context.share(sum(responses.packed.lengths))))
    outputs = logprobs_and_entropy(Decoder(sharded, "causal"), responses, rows, 1.0, entropy_grad=True)
    for value, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=2e-5, msg=family)
    loss_of(*outputs).backward()  # type: ignore[no-untyped-call]
    alike(sharded, plain, family)


def check_columns(batch: list[Sample], ranks: Ranks) -> None:
    """Log-probs of chosen tokens, and the most likely tokens."""
    module = model("llama")
    use_packed_attention(module)
    decoder, outputs = Decoder(module, "causal"), []
    columns = torch.arange(3 * sum(len(sample.token_ids) for sample in batch)).view(-1, 3) % VOCAB
    unsharded = pack_responses(batch, torch.device("cpu"))
    with torch.no_grad():
        outputs.append(read(decoder, unsharded, hidden_of(module, unsharded), columns))
        sharded = pack_responses(batch, torch.device("cpu"), context=ranks.context)
        outputs.append(read(decoder, sharded, hidden_of(module, sharded), columns))
    for value, reference in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=2e-5)


def read(decoder: Decoder, responses: Any, hidden: Tensor, columns: Tensor) -> list[Tensor]:
    return [
        column_logprobs_of(decoder, responses, hidden, 0.7, columns),
        *likeliest_of(decoder, responses, hidden, 0.7, 4, VOCAB - 2),
    ]


def check_values(ranks: Ranks) -> None:
    batch = made_up()
    plain, sharded = tiny("value"), tiny("value")
    assert isinstance(plain, ValueModel)
    assert isinstance(sharded, ValueModel)
    Shards(sharded, ranks)
    outputs = []
    for module, context in ((plain, ONE), (sharded, ranks.context)):
        use_packed_attention(module)
        responses = pack_responses(batch, torch.device("cpu"), context=context)
        before, after = values_of(module.score, responses, hidden_of(module, responses))
        (loss_of(before, before) + after.square().sum()).backward()  # type: ignore[no-untyped-call]
        outputs.append((before, after))
    for value, reference in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=2e-5)
    alike(sharded, plain, "value")


def check_saved_bytes(ranks: Ranks) -> None:
    """A pass over one long sequence saves for its backward pass 1/N of the bytes on each of N ranks, and with more than
    two ranks also copies of the two key-value heads."""
    batch = [with_response(made_up()[0], tuple(3 + t % 50 for t in range(200)))]
    saved = []
    for context in (ONE, ranks.context):
        module = model("llama")
        use_packed_attention(module)
        if context.size > 1:
            Shards(module, ranks)
        responses = pack_responses(batch, torch.device("cpu"), context=context)
        hooks = Kept(module)
        with hooks:
            hidden = hidden_of(module, responses) if context.size > 1 else hidden_rows(module, responses.packed)
        saved.append(sum(hooks.sizes.values()))
        hidden.sum().backward()  # type: ignore[no-untyped-call]
    assert 1 / ranks.context.size < saved[1] / saved[0] * 1.05 < 1.2 / ranks.context.size, saved


class Kept(saved_tensors_hooks):
    """Counts the bytes saved for the backward pass, by storage, without the weights."""

    def __init__(self, module: nn.Module) -> None:
        self.sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            parts = (p.to_local() if isinstance(p, DTensor) else p for p in module.parameters())
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in {part.untyped_storage().data_ptr() for part in parts}:
                self.sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(note, lambda tensor: tensor)


def main() -> None:
    torch.set_num_threads(1)
    with join(ResourcesTable(context_parallel=int(sys.argv[1]), timeout=60.0), "cpu") as ranks:
        for family in ("llama", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "gpt_oss", "deepseek_v3"):
            check_family(family, samples(60), ranks)
        check_family("gemma3", samples(60), ranks, recompute=True)
        few = [with_response(made_up()[4], (3, 5))]  # fewer rows than ranks
        check_family("llama", few, ranks)
        check_columns(samples(60), ranks)
        check_columns(few, ranks)
        check_values(ranks)
        check_saved_bytes(ranks)


if __name__ == "__main__":
    main()
