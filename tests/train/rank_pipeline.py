"""Compares layers split over pipeline stages with transformers' own forward pass, one sequence at a time. A test runs
this on each rank: python -m tests.train.rank_pipeline STAGES EXPERT. A stage has as many ranks as share its experts."""

import sys
from contextlib import nullcontext

import torch
from torch import Tensor

from plaudit.config.placement import ResourcesTable
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import use_packed_attention
from plaudit.records import Sample
from plaudit.train.optim.pipeline import Made, Stage, stage_of
from plaudit.train.optim.sharding import Shards
from plaudit.train.policy.forward import hidden_of, logprobs_and_entropy, pack_responses
from plaudit.train.run.ranks import Ranks, join
from tests.core.tiny import model
from tests.train.rank_context import by_itself, loss_of, samples

LAYERS = {"llama": 5, "qwen3": 5, "gemma3": 4, "mixtral": 4, "deepseek_v3": 2}
MIXTURES = ("mixtral", "deepseek_v3")


def check(family: str, batches: list[list[Sample]], ranks: Ranks, recompute: bool = False) -> None:
    """Checks the loss of every micro-batch on the last stage, and each gradient on the stage that has the weight. Ranks
    of a stage take the batches in turn."""
    plain, sharded = model(family, layers=LAYERS[family]), model(family, layers=LAYERS[family])
    use_packed_attention(sharded)
    if recompute:
        sharded.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        sharded.train()
    shards = Shards(sharded, ranks)
    stage, losses = stage_of(sharded), []
    most = 0

    def forward(batch: list[Sample]) -> Made:
        nonlocal most
        responses = pack_responses(batch, torch.device("cpu"))
        output = hidden_of(sharded, responses)
        most = max(most, len(stage._received))
        if stage.last:
            values = logprobs_and_entropy(Decoder(sharded, "causal"), responses, output, 1.0, entropy_grad=True)
            output = loss_of(*values)
            losses.append(output.item())
        return output, nullcontext

    own = slice(ranks.data.index, None, ranks.data.size)
    stage.learn(batches[own], forward)
    assert most <= stage.size - stage.index, "rows of more micro-batches were kept than 1F1B keeps"
    expected = [loss_of(*by_itself(plain, batch)) for batch in batches]
    torch.stack(expected).sum().backward()  # type: ignore[no-untyped-call]
    if stage.last:
        torch.testing.assert_close(torch.tensor(losses), torch.stack(expected[own]), rtol=1e-5, atol=2e-5, msg=family)
    check_gradients(shards, dict(plain.named_parameters()), stage, family)


def check_gradients(shards: Shards, plain: dict[str, Tensor], stage: Stage, family: str) -> None:
    for name, parameter in shards.parameters.items():
        assert parameter.grad is not None, (family, name)
        gradient, expected = parameter.grad.full_tensor(), plain[name].grad  # type: ignore[attr-defined]
        if name in shards.on_both_ends:
            torch.distributed.all_reduce(gradient, group=stage.ends.channel)
        assert expected is not None
        assert (gradient - expected).norm() < 1e-5 * expected.norm().clamp_min(1e-3), (family, name)
    count = sum(stage.rows.gather_values(len(shards.parameters), int))
    assert count == len(plain) + len(shards.on_both_ends), (family, count)


def main() -> None:
    torch.set_num_threads(1)
    stages, expert = map(int, sys.argv[1:3])
    resources = ResourcesTable(pipeline_parallel=stages, data_parallel=expert, expert_parallel=expert, timeout=60.0)
    with join(resources, "cpu") as ranks:
        ragged = samples(60)
        batches = [ragged[:2], ragged[2:3], ragged[3:5], ragged[6:], ragged[5:6]]
        if expert > 1:
            for family in MIXTURES:
                check(family, batches[:4], ranks)
            check("mixtral", batches[:4], ranks, recompute=True)
            return
        for family in (family for family, layers in LAYERS.items() if layers >= stages):
            check(family, batches, ranks)
        check("llama", batches[:1], ranks)  # fewer batches than stages
        check("qwen3", batches, ranks, recompute=True)


if __name__ == "__main__":
    main()
