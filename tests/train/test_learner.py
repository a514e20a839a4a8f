"""Supervised gradients do not depend on how a batch is split, and equal those of plain transformers."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, PreTrainedConfig

from plaudit.config import BradleyTerry, SupervisedTrain, load_recipe
from plaudit.core.model.packing import use_packed_attention
from plaudit.errors import RunError
from plaudit.models import new_llama
from plaudit.train.optim.optimizer import Optimizer, learning_rate
from plaudit.train.policy.forward import by_tokens
from plaudit.train.supervised.examples import (
    Comparison,
    Demonstration,
    Example,
    Rating,
    StepTargets,
    shares,
    token_count,
)
from plaudit.train.supervised.learner import Learner
from plaudit.train.supervised.objectives import Imitate, JudgeSteps, Objective, Prefer, Rate
from tests.core import tiny

TABLE = SupervisedTrain(steps=100, batch=8, lr=1e-3, warmup=10)
RAGGED = (5, 17, 9, 30, 2, 11, 23, 8)


def tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(4, 20, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def case(name: str) -> tuple[str, Objective, list[Example], int | None]:
    ids = [tokens(n, i) for i, n in enumerate(RAGGED)]
    others = [tokens(n, 100 + i) for i, n in enumerate(reversed(RAGGED))]
    if name == "sft":
        return "policy", Imitate(), [Demonstration(t, max(1, len(t) // 3)) for t in ids], None
    if name == "pairs":
        pairs: list[Example] = [Comparison(a, b, 0.1 * i) for i, (a, b) in enumerate(zip(ids, others, strict=True))]
        return "reward", Prefer(BradleyTerry(use_margins=True, centring=0.02)), pairs, None
    if name == "ratings":
        rated: list[Example] = [Rating(t, (0.5 * i, math.nan if i % 3 else 1.0)) for i, t in enumerate(ids)]
        return "reward", Rate(), rated, 2
    return "steps", JudgeSteps(), [StepTargets(t, (len(t) // 2, len(t) - 1), (1.0, 0.3)) for t in ids], None


def learner(name: str, micro_batch_tokens: int, lanes: int = 1) -> tuple[Learner, list[Example]]:
    kind, objective, examples, labels = case(name)
    model = new_llama(
        kind, vocab_size=20, hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=64, max_positions=64,
        seed=3, labels=labels,
    )  # fmt: skip
    use_packed_attention(model)
    return Learner(model, objective, Optimizer(model, TABLE), micro_batch_tokens, lanes=lanes), examples


def gradients(name: str, micro_batch_tokens: int, lanes: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    trainer, examples = learner(name, micro_batch_tokens, lanes)
    loss = trainer.gradient(examples)
    return loss, {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["sft", "pairs", "ratings", "steps"])
@pytest.mark.parametrize("splits", [2, 4, 8])
def test_gradient_does_not_depend_on_the_micro_batch_split(name: str, splits: int) -> None:
    examples = case(name)[2]
    total = sum(map(token_count, examples))
    sizes = [token_count(e) for e in examples]
    budget = next(b for b in range(total, 0, -1) if len(by_tokens(sizes, b)) >= splits)
    loss, expected = gradients(name, total)
    split_loss, actual = gradients(name, budget)
    assert split_loss == pytest.approx(loss, rel=5e-6)
    for parameter, gradient in expected.items():
        difference = (actual[parameter] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert difference < 5e-6, parameter


@pytest.mark.parametrize("name", ["sft", "pairs", "ratings", "steps"])
@pytest.mark.parametrize(("lanes", "budget"), [(2, 10_000), (3, 40), (9, 10_000)])
def test_threaded_gradient_is_equal_and_reproducible(name: str, lanes: int, budget: int) -> None:
    loss, expected = gradients(name, 10_000)
    in_threads, actual = gradients(name, budget, lanes)
    assert in_threads == pytest.approx(loss, rel=5e-6)
    for parameter, gradient in expected.items():
        difference = (actual[parameter] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert difference < 5e-6, parameter
    again, repeated = gradients(name, budget, lanes)
    assert again == in_threads
    assert all(torch.equal(actual[parameter], repeated[parameter]) for parameter in expected)


def test_shares_have_similar_token_counts() -> None:
    examples = [Demonstration(tokens(count, 0), 1) for count in (10, 10, 20, 40, 5, 5, 30)]
    assert [[len(e.tokens) for e in part] for part in shares(examples, 2)] == [[10, 10, 20], [40, 5, 5, 30]]
    assert [len(part) for part in shares(examples[:1], 3)] == [1], "no part is empty"


@pytest.mark.parametrize("name", ["sft", "pairs", "steps"])
def test_loss_and_gradient_equal_plain_transformers_one_by_one(name: str) -> None:
    loss, actual = gradients(name, 10_000)
    trainer, examples = learner(name, 10_000)
    model = trainer.model
    model.set_attn_implementation("eager")  # type: ignore[operator]
    total = torch.zeros(())
    for example in examples:
        if isinstance(example, Demonstration):
            logits = model(torch.tensor([example.tokens])).logits[0].log_softmax(-1)
            picked = logits[:-1].gather(1, torch.tensor(example.tokens)[1:, None])[:, 0]
            total = total - picked[example.answer_at - 1 :].sum()
        elif isinstance(example, Comparison):
            a, b = (
                model.score(model.model(torch.tensor([t])).last_hidden_state[0, -1])[0]  # type: ignore[operator]
                for t in (example.chosen, example.rejected)
            )
            total = total - torch.nn.functional.logsigmoid(a - b - example.margin) + 0.02 * (a + b) ** 2
        elif isinstance(example, StepTargets):
            logits = model(torch.tensor([example.tokens])).logits[0, list(example.ends)].log_softmax(-1)
            targets = torch.tensor(example.targets)
            total = total - (targets * logits[:, 1] + (1 - targets) * logits[:, 0]).sum()
    mean = total / trainer.objective.count(examples)
    assert loss == pytest.approx(mean.item(), rel=1e-5)
    trainer.optimizer.zero()
    mean.backward()  # type: ignore[no-untyped-call]
    for parameter, value in model.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(actual[parameter], value.grad, rtol=1e-4, atol=1e-6)


def test_example_above_the_budget_is_its_own_micro_batch() -> None:
    assert by_tokens([3, 50, 4, 4], 10) == [[0], [1], [2, 3]]


def test_non_finite_loss_changes_nothing() -> None:
    trainer, examples = learner("sft", 10_000)
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = math.nan  # type: ignore[union-attr, index, operator]
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    with pytest.raises(RunError, match=r"the loss is nan at step 7.*lower train\.lr"):
        trainer.update(examples, 7)
    for name, value in trainer.model.named_parameters():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num())


def test_batch_without_targets_is_rejected() -> None:
    trainer, _ = learner("ratings", 10_000)
    with pytest.raises(RunError, match="nothing to learn from"):
        trainer.gradient([Rating((5, 6), (math.nan, math.nan))])


@pytest.mark.parametrize(
    ("schedule", "step", "share"),
    [
        ("constant", 0, 0.1), ("constant", 9, 1.0), ("constant", 99, 1.0),
        ("linear", 10, 1.0), ("linear", 55, 0.05 + 0.95 / 2), ("linear", 100, 0.05),
        ("cosine", 10, 1.0), ("cosine", 55, 0.05 + 0.95 / 2), ("cosine", 100, 0.05),
    ],
)  # fmt: skip
def test_learning_rate_by_hand(schedule: str, step: int, share: float) -> None:
    table = TABLE.model_copy(update={"schedule": schedule})
    assert learning_rate(table, step) == pytest.approx(1e-3 * share)


def test_optimizer_state_is_restored_from_plain_tensors() -> None:
    a, examples = learner("sft", 10_000)
    for step in range(3):
        a.update(examples, step)
    b, _ = learner("sft", 10_000)
    b.model.load_state_dict(a.model.state_dict())
    b.optimizer.load({name: value.clone() for name, value in a.optimizer.state().items()})
    for trainer in (a, b):
        trainer.update(examples, 3)
    for (name, x), (_, y) in zip(a.model.named_parameters(), b.model.named_parameters(), strict=True):
        assert torch.equal(x, y), name


def test_shipped_recipes_parse() -> None:
    from pathlib import Path

    assert {load_recipe(path).task for path in Path("plaudit/recipes").glob("sums-*.toml")} >= {"sft", "reward", "prm"}


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**tiny.GROUPED, head_dim=16, final_logit_softcapping=2.0, query_pre_attn_scalar=16),
        GraniteConfig(**tiny.GROUPED, logits_scaling=4.0),
        CohereConfig(**tiny.GROUPED, logit_scale=0.25),
    ],
    ids=lambda config: config.model_type,
)
def test_sft_loss_includes_logit_caps_and_scales(config: PreTrainedConfig) -> None:
    """The loss equals transformers' own for models with soft caps and scales."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = tokens(20, 1)
    labels = torch.tensor([ids])
    labels[:, :6] = -100
    expected = model(torch.tensor([ids]), labels=labels).loss.item()
    use_packed_attention(model)
    learner = Learner(model, Imitate(), Optimizer(model, TABLE), 1000)
    assert learner.gradient([Demonstration(ids, 6)]) == pytest.approx(expected, rel=1e-5)
