"""Training on preferences: gradients equal those of plain transformers, and runs resume bit for bit."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from plaudit.config import PreferenceAlgorithm, SupervisedTrain
from plaudit.core.model.packing import use_packed_attention
from plaudit.events import read_events
from plaudit.models import load_policy, new_llama
from plaudit.report.headline import headline
from plaudit.report.history import read_history
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.optim.sharding import packed_rows
from plaudit.train.supervised.examples import Example, Labelled, Preferred, token_count
from plaudit.train.supervised.learner import Learner
from plaudit.train.supervised.preferences import LearnPreferences, reference_logprobs
from plaudit.train.supervised.reader import Reader
from plaudit.worlds.sums import Problem, judge
from tests.command import plaudit_here
from tests.forked import ForkedCommand

METHODS = {
    "dpo": {"beta": 0.3}, "ipo": {"beta": 0.2}, "kto": {"beta": 0.3, "desirable": 1.5, "undesirable": 0.5},
    "orpo": {"beta": 0.4}, "simpo": {"beta": 2.0, "gamma": 0.5},
}  # fmt: skip
TABLE = SupervisedTrain(steps=100, batch=8, lr=1e-3, warmup=10)
Ids = tuple[int, ...]


def algorithm(name: str, **keys: Any) -> PreferenceAlgorithm:
    return PreferenceAlgorithm.model_validate({"name": name, **METHODS[name], **keys})


def model(seed: int) -> nn.Module:
    module = new_llama(
        "policy", vocab_size=20, hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=64, max_positions=64,
        seed=seed,
    ).double()  # fmt: skip
    with torch.no_grad():
        for parameter in module.parameters():  # fresh weights are so small that all tokens are about equally likely
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return module


def ids(count: int, seed: int) -> Ids:
    return tuple(torch.randint(4, 20, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def examples(name: str) -> list[Example]:
    """Examples of different lengths; the last two have the same prompt, and responses with common prefixes."""
    prompts = [ids(n, n) for n in (3, 7, 1, 9, 5)] + [ids(5, 5)]
    first = [ids(n, 20 + n) for n in (4, 2, 9, 1, 6)] + [(*ids(6, 26)[:3], 2)]
    second = [ids(n, 40 + n) for n in (8, 3, 1, 5, 2)] + [(*ids(6, 26)[:2], 7, 7)]
    if name == "kto":
        return [Labelled(p, a, i % 3 != 1, b) for i, (p, a, b) in enumerate(zip(prompts, first, second, strict=True))]
    return [Preferred(p, a, b) for p, a, b in zip(prompts, first, second, strict=True)]


def plain_logp(module: nn.Module, prompt: Ids, response: Ids, start: int) -> Tensor:
    """The log-prob of the tokens from `start` on, by the model's own forward pass on this one sequence."""
    tokens = torch.tensor([prompt + response])
    logits = module(tokens).logits[0, :-1].log_softmax(-1)
    picked: Tensor = logits.gather(1, tokens[0, 1:, None])[start - 1 :, 0]
    return picked.sum()


def loss_from_the_papers(name: str, policy: nn.Module, reference: nn.Module, items: list[Any], keys: Any) -> Tensor:
    """The mean loss, one sequence at a time, written from the papers without any code of this package."""

    def ratio(item: Any, response: Ids) -> Tensor:
        at = len(item.prompt)
        with torch.no_grad():
            base = plain_logp(reference, item.prompt, response, at)
        return plain_logp(policy, item.prompt, response, at) - base

    def mean(item: Any, response: Ids) -> Tensor:
        return plain_logp(policy, item.prompt, response, len(item.prompt)) / len(response)

    beta = keys["beta"]
    if name == "dpo":
        losses = [-F.logsigmoid(beta * (ratio(i, i.chosen) - ratio(i, i.rejected))) for i in items]
    elif name == "ipo":
        leads = [ratio(i, i.chosen) / len(i.chosen) - ratio(i, i.rejected) / len(i.rejected) for i in items]
        losses = [(lead - 1 / (2 * beta)) ** 2 for lead in leads]
    elif name == "kto":
        drift = torch.stack([ratio(i, i.other) for i in items]).mean().detach().clamp(min=0)
        losses = [
            keys["desirable"] * (1 - torch.sigmoid(beta * (ratio(i, i.response) - drift)))
            if i.desirable
            else keys["undesirable"] * (1 - torch.sigmoid(beta * (drift - ratio(i, i.response))))
            for i in items
        ]
    elif name == "orpo":
        p, q = (torch.stack([mean(i, getattr(i, side)) for i in items]).exp() for side in ("chosen", "rejected"))
        odds = (p / (1 - p) / (q / (1 - q))).log()
        nll = torch.stack([-plain_logp(policy, i.prompt, i.chosen, 1) for i in items]).sum()
        return nll / sum(len(i.prompt + i.chosen) - 1 for i in items) - beta * F.logsigmoid(odds).mean()
    else:
        losses = [-F.logsigmoid(beta * (mean(i, i.chosen) - mean(i, i.rejected)) - keys["gamma"]) for i in items]
    return torch.stack(losses).mean()


def with_reference(reference: nn.Module, items: list[Example]) -> list[Example]:
    use_packed_attention(reference)
    logprobs = reference_logprobs(Reader(reference, 40), [i for i in items if isinstance(i, Preferred | Labelled)])
    ready: list[Example] = []
    for item, logp in zip(items, logprobs, strict=True):
        assert isinstance(item, Preferred | Labelled)
        ready.append(replace(item, reference=logp))
    return ready


def loss_and_gradient(name: str, budget: int, **keys: Any) -> tuple[float, dict[str, Tensor]]:
    policy, items = model(3), examples(name)
    chosen = algorithm(name, **keys)
    if chosen.method.reference:
        items = with_reference(model(4), items)
    use_packed_attention(policy)
    learner = Learner(policy, LearnPreferences(chosen), Optimizer(policy, TABLE), budget)
    loss = learner.gradient(items)
    return loss, {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("budget", [10_000, 25], ids=["whole", "split"])
@pytest.mark.parametrize("name", METHODS)
def test_loss_and_gradient_equal_plain_transformers_one_by_one(name: str, budget: int) -> None:
    loss, actual = loss_and_gradient(name, budget)
    policy, reference = model(3), model(4)
    expected = loss_from_the_papers(name, policy, reference, examples(name), METHODS[name])
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(expected.item(), abs=1e-6, rel=1e-6)
    scale = max(p.grad.abs().max().item() for p in policy.parameters() if p.grad is not None)
    for parameter, value in policy.named_parameters():
        assert value.grad is not None
        assert (actual[parameter] - value.grad).abs().max().item() <= 1e-6 * scale, parameter


def test_kto_drift_is_the_batch_mean_and_never_negative() -> None:
    """For any micro-batch size. The test above has no drift: it would also pass if the drift were always 0."""
    policy = model(3)
    items = [item for item in with_reference(policy, examples("kto")) if isinstance(item, Labelled)]
    objective, baselines = LearnPreferences(algorithm("kto")), []
    for shift in (-1.5, 0.0, 2.5):
        moved: list[Example] = [replace(i, reference=(i.reference[0], i.reference[1] - shift)) for i in items]
        for budget in (10_000, 25):
            objective.begin(Reader(policy, budget), moved)
            baselines.append(objective.baseline)
    assert baselines == pytest.approx([0.0, 0.0, 0.0, 0.0, 2.5, 2.5], abs=1e-6)


def test_orpo_can_exclude_the_prompt_from_its_sft_term() -> None:
    loss, _ = loss_and_gradient("orpo", 10_000, prompt_loss=False)
    policy, items = model(3), examples("orpo")
    full_loss = loss_from_the_papers("orpo", policy, policy, items, METHODS["orpo"]).item()
    pairs = [item for item in items if isinstance(item, Preferred)]
    prompted, unprompted = (
        sum(-plain_logp(policy, p.prompt, p.chosen, start(p)).item() for p in pairs)
        / sum(len(p.prompt + p.chosen) - start(p) for p in pairs)
        for start in STARTS
    )
    assert loss == pytest.approx(full_loss - prompted + unprompted, rel=1e-6)


STARTS: tuple[Callable[[Preferred], int], ...] = (lambda _: 1, lambda pair: len(pair.prompt))


def test_a_pair_computes_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from plaudit.train.supervised import reader

    row_counts: list[int] = []
    packing = packed_rows

    def counted(module: nn.Module, packed: Any) -> Tensor:
        row_counts.append(packed.input_ids.shape[1])
        return packing(module, packed)

    monkeypatch.setattr(reader, "packed_rows", counted)
    policy = model(3)
    use_packed_attention(policy)
    pair = Preferred(ids(9, 1), ids(4, 2), ids(3, 3))
    Learner(policy, LearnPreferences(algorithm("dpo")), Optimizer(policy, TABLE), 10_000).mean_loss([pair])
    assert row_counts == [9 + 4 + 3] == [token_count(pair)]


# Runs.


def train(*words: str, sets: list[str]) -> Any:
    return plaudit_here("train", *words, *(word for each in sets for word in ("--set", each)))


def losses(run: Path) -> list[float]:
    return [e["values"]["loss"] for e in read_events(run) if e["kind"] == "metric" and "loss" in e["values"]]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    items = [{"prompt": f"{i}+7=", "chosen": f"{i}+7={i + 7};#{i + 7}", "rejected": f"#{i + 6}"} for i in range(1, 9)]
    return write(tmp_path / "rows.jsonl", items * 2)


def recipe(path: Path, data: Path, name: str = "dpo") -> str:
    path.write_text(
        f'task = "preference"\n[model]\npath = "sums-policy"\n[data]\npath = "{data}"\n[algorithm]\nname = "{name}"\n'
        "[train]\nsteps = 6\nbatch = 4\nlr = 1e-4\nthreads = 1\ncheckpoint.every = 2\n"
    )
    return str(path)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_from_a_file(name: str, tmp_path: Path, rows: Path) -> None:
    if name == "kto":
        pairs = [json.loads(line) for line in rows.read_text().splitlines()]
        sides = ("chosen", True), ("rejected", False)
        labelled = [
            {"prompt": p["prompt"], "response": p[side], "label": label} for p in pairs for side, label in sides
        ]
        write(rows, labelled)
    run = tmp_path / "run"
    done = train(recipe(tmp_path / "r.toml", rows, name), "--out", str(run), sets=["train.lr=1e-3", "train.warmup=1"])
    assert done.returncode == 0, done.stderr
    curve = losses(run)
    assert len(curve) == 6
    assert curve[-1] < curve[0]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["label_auc" if name == "kto" else "pair_accuracy"] == 1.0
    assert (run / "preferences" / "reference.json").exists() == (name not in ("orpo", "simpo"))
    history = read_history(run)
    assert (history.task, history.algorithm, history.finished) == ("preference", name, True)
    assert headline(history) is not None
    load_policy(run / "final", "float32", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_killed_run_resumes_bit_for_bit(tmp_path: Path, rows: Path, lora: bool) -> None:
    """The run is killed at an arbitrary step; an uninterrupted run then makes as many steps as the resumed one."""
    if lora:
        pytest.importorskip("peft")
    straight, broken, file = tmp_path / "straight", tmp_path / "broken", recipe(tmp_path / "r.toml", rows)
    sets = ['train.schedule="constant"', *(["model.lora.rank=4"] if lora else [])]
    endless = [*sets, "train.steps=1000000"]
    words = ["train", file, "--out", str(broken), *(w for each in endless for w in ("--set", each))]
    child = ForkedCommand(words, tmp_path / "output")
    latest = broken / "checkpoints" / "latest"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and child.poll() is None and not latest.exists():
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    assert latest.exists(), (tmp_path / "output").read_text()
    sets.append(f"train.steps={int(latest.read_text().removeprefix('step-')) + 2}")
    for run, more in ((straight, ()), (broken, ("--resume",))):
        done = train(file, "--out", str(run), *more, sets=sets)
        assert done.returncode == 0, done.stderr
    assert losses(broken) == losses(straight)
    expected, actual = (load_file(path / "final" / "model.safetensors") for path in (straight, broken))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    one, other = (json.loads((path / "summary.json").read_text()) for path in (straight, broken))
    assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert (straight / "final" / "adapter").exists() == lora


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_run_in_two_parts_equals_an_uninterrupted_one(tmp_path: Path, rows: Path, lora: bool) -> None:
    if lora:
        pytest.importorskip("peft")
    file = recipe(tmp_path / "r.toml", rows)
    sets = ['train.schedule="constant"', *(["model.lora.rank=4"] if lora else [])]
    for run, more in (("whole", ("6",)), ("parts", ("4", "6"))):
        for steps in more:
            done = train(file, "--out", str(tmp_path / run), "--resume", sets=[*sets, f"train.steps={steps}"])
            assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    expected, actual = (load_file(tmp_path / run / "final" / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_world_preferences_come_from_the_policys_own_responses(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    sets = ["train.batch=4", "train.steps=2", "train.checkpoint.every=1", "data.eval_items=8", "data.problems=24"]
    sets += ["data.samples=4", f"algorithm.name={name}"]
    done = train("sums-dpo", "--out", str(run), sets=sets)
    assert done.returncode == 0, done.stderr
    stored = run / "preferences" / "rows.jsonl"
    for row in map(json.loads, stored.read_text().splitlines()):
        problem = Problem.parse(row["prompt"])
        if name == "dpo":
            assert judge(problem, row["chosen"]).right
            assert not judge(problem, row["rejected"]).right
        else:
            assert judge(problem, row["response"]).right == row["label"]
    summary = json.loads((run / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "heldout_loss"} <= set(summary)
    stored.unlink()
    again = train("sums-dpo", "--out", str(run), "--resume", sets=[*sets, "train.steps=3"])
    assert again.returncode == 2
    assert "rows.jsonl is missing and the run trains on it: restore it, or start over with --fresh" in again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_resumed_run_keeps_the_initial_policy_as_its_reference(tmp_path: Path, rows: Path, lora: bool) -> None:
    """The stored reference is deleted: it is computed again, from the model's path or with the adapter disabled."""
    if lora:
        pytest.importorskip("peft")
    sets = ["train.lr=1e-2", *(["model.lora.rank=4"] if lora else [])]
    run, file = tmp_path / "run", recipe(tmp_path / "r.toml", rows)
    assert train(file, "--out", str(run), sets=sets).returncode == 0
    stored = run / "preferences" / "reference.json"
    before = json.loads(stored.read_text())
    stored.unlink()
    done = train(file, "--out", str(run), "--resume", sets=[*sets, "train.steps=8"])
    assert done.returncode == 0, done.stderr
    after = json.loads(stored.read_text())
    assert after.keys() == before.keys()
    for key, logps in before.items():
        assert after[key] == pytest.approx(logps, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("dpo", {"chosen": "#8", "rejected": "#8"}, "chosen and rejected are both '#8': remove the row"),
        ("dpo", {"chosen": "#8", "rejected": ""}, "needs a text 'rejected', got ''"),
        ("dpo", {"chosen": None, "rejected": "#8"}, "needs a text 'chosen', got None"),
        ("simpo", {"response": "#8", "label": True}, "needs a text 'chosen', got None"),
        ("dpo", {"chosen": "1" * 400, "rejected": "#8"}, "tokens exceed the model's 256; shorten or remove it"),
        ("kto", {"chosen": "#8", "rejected": "#9"}, "needs a 'label', true or false, got None"),
        ("kto", {"response": "#8", "label": 1}, "needs a 'label', true or false, got 1"),
        ("kto", {"response": "", "label": True}, "needs a text 'response', got ''"),
    ],
)
def test_invalid_row_is_reported_before_the_first_step(
    tmp_path: Path, name: str, row: dict[str, Any], message: str
) -> None:
    good = {"chosen": "#8", "rejected": "#9", "response": "#8", "label": True}
    data = write(tmp_path / "rows.jsonl", [{"prompt": "1+7=", **good}] * 6 + [{"prompt": "2+6=", **row}])
    done = train(recipe(tmp_path / "r.toml", data, name), "--out", str(tmp_path / "run"), sets=[])
    assert done.returncode == 2
    line = next(line for line in done.stderr.splitlines() if "rows.jsonl:7: " in line)
    assert message in line
    assert "Traceback" not in done.stderr
    assert not losses(tmp_path / "run")


def test_new_model_is_rejected(tmp_path: Path, rows: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(Path(recipe(file, rows)).read_text().replace('path = "sums-policy"', "new.hidden = 32"))
    done = train(str(file), "--out", str(tmp_path / "run"), sets=[])
    assert done.returncode == 2
    assert "preference training needs a policy that can generate: set model.path" in done.stderr
