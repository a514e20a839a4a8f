"""Distillation in the learner: gradients equal to plain transformers for any micro-batch size; local and served
teachers; failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from plaudit.config import to_toml
from plaudit.config.algorithm import TeacherTable
from plaudit.errors import ConfigError, RunError
from plaudit.events import read_events
from plaudit.models import load_policy, save
from plaudit.records import Batch, Sample
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.policy.experience import Experience, flat, own_tokens
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.policy.served_teacher import ServedTeacher, TeacherFailed
from plaudit.train.policy.teachers import LocalTeacher, Teachers
from plaudit.train.run.clock import Clock
from tests.command import plaudit_here
from tests.serve.process import ServerProcess, free_port
from tests.train.rl_world import VOCABULARY, gradients, made_up, policy, recipe, relative, tiny

TOKEN = {"one": {"path": "unread"}, "two": {"path": "unread", "weight": 0.5}}
TOP = {"one": {"path": "unread", "top_k": 3}, "two": {"path": "unread", "top_k": 5, "weight": 0.5}}
WHOLE = {"one": {"path": "unread", "top_k": VOCABULARY}}
BOTH = {"one": {"path": "unread", "top_k": 3}, "two": {"path": "unread"}}


def algorithm(teachers: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"name": "distill", "teachers": teachers, **keys}


def teachers_of(tables: dict[str, Any], temperature: float = 1.0) -> Teachers:
    local_teachers = {
        name: LocalTeacher(
            policy(tiny(seed=10 + i), {"name": "grpo"}, temperature=temperature, micro_batch_tokens=40), VOCABULARY
        )
        for i, name in enumerate(tables)
    }
    return Teachers(local_teachers, {name: table.get("top_k", 0) for name, table in tables.items()})


def experience(tables: dict[str, Any], temperature: float = 1.0) -> Experience:
    samples = tuple(made_up())
    mask, drawn = own_tokens(samples), flat(samples, "logprobs")
    unset = (None,) * 6
    teacher_outputs = teachers_of(tables, temperature).read(samples)
    return Experience(samples, mask, drawn, torch.zeros(len(mask)), *unset, *teacher_outputs.arrays)


@pytest.mark.parametrize("tables", [TOKEN, TOP, WHOLE, BOTH], ids=["token", "top-k", "whole", "both"])
@pytest.mark.parametrize("budget", [30, 1])
def test_gradient_does_not_depend_on_the_micro_batch_size(tables: dict[str, Any], budget: int) -> None:
    data, results = experience(tables), []
    for each in (4096, budget):
        module = tiny()
        policy(module, algorithm(tables), micro_batch_tokens=each).gradient(data, 0.0)
        results.append(gradients(module))
    assert relative(results[1], results[0]) < 5e-6


def plain_tables(module: Any, samples: Sequence[Sample], temperature: float) -> torch.Tensor:
    """(policy tokens, V): log-probs by plain transformers, one sample at a time."""
    module.set_attn_implementation("sdpa")
    rows = []
    for sample in samples:
        table = (module(torch.tensor([sample.prompt_ids + sample.token_ids])).logits[0] / temperature).log_softmax(-1)
        rows += [table[len(sample.prompt_ids) + t - 1] for t, own in enumerate(sample.mask) if own]
    return torch.stack(rows)


@pytest.mark.parametrize("tables", [TOKEN, TOP, WHOLE], ids=["token", "top-k", "whole"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_equals_that_of_plain_transformers(tables: dict[str, Any], temperature: float) -> None:
    samples, module, other = made_up(), tiny(), tiny()
    learner = policy(module, algorithm(tables), temperature=temperature, micro_batch_tokens=40)
    metrics = learner.gradient(experience(tables, temperature), 0.0).metrics()

    table = plain_tables(other, samples, temperature)
    tokens = torch.tensor([t for s in samples for t, own in zip(s.token_ids, s.mask, strict=True) if own])
    total = torch.zeros(len(tokens))
    for i, teacher in enumerate(tables.values()):
        teacher_table = plain_tables(tiny(seed=10 + i), samples, temperature).detach()
        if k := teacher.get("top_k", 0):
            ids = teacher_table.topk(k).indices
            student, target = table.gather(-1, ids), teacher_table.gather(-1, ids)
            if k < VOCABULARY:
                student, target = (
                    torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in (student, target)
                )
            kl = (student.exp() * (student - target)).sum(-1)
        else:
            drawn = table.gather(-1, tokens[:, None])[:, 0]
            kl = (drawn - teacher_table.gather(-1, tokens[:, None])[:, 0]).detach() * drawn
        total = total + teacher.get("weight", 1.0) * kl
    total.mean().backward()
    assert relative(gradients(module), gradients(other)) < 1e-5
    if "teacher/kl_top_k" in metrics:
        assert metrics["teacher/kl_top_k"] == pytest.approx(total.mean().item(), abs=1e-6)


def test_teacher_kl_is_added_and_reward_advantages_stay_the_same() -> None:
    """The reward's advantages are unchanged; the teacher's term is added to the loss."""
    mixed = algorithm({"one": {"path": "unread"}}, advantage={"estimator": "group"})
    results = {}
    for name, keys, tables in (("mixed", mixed, {"one": {}}), ("alone", {"name": "dr-grpo"}, {})):
        tree, module = recipe(algorithm=keys, train={"lr": 1e-3}), tiny()
        learner = policy(module, keys)
        step = RlLearner(
            tree, learner, Optimizer(module, tree.train), None, None, Clock(), teachers_of(tables) if tables else None
        )
        metrics, batch_experience = step.update(Batch(tuple(made_up()), version=0), step=0)
        assert batch_experience is not None
        results[name] = (metrics, batch_experience.advantages)
    assert torch.equal(results["mixed"][1], results["alone"][1])
    assert results["alone"][1].abs().max() > 0
    samples = made_up()
    teacher_logprobs = teachers_of({"one": {}}).teachers["one"].logprobs(samples)
    drawn = (flat(samples, "logprobs") - teacher_logprobs)[own_tokens(samples)].mean().item()
    assert results["mixed"][0]["teacher/one/kl"] == pytest.approx(drawn)
    assert not any("teacher" in name for name in results["alone"][0])


def test_steps_reduce_the_kl_to_the_teacher() -> None:
    tables = {"one": {"path": "unread", "top_k": 8}}
    module, teachers = tiny(), teachers_of(tables)
    tree = recipe(algorithm=algorithm(tables), train={"lr": 3e-3, "steps": 12})
    step = RlLearner(
        tree, policy(module, algorithm(tables)), Optimizer(module, tree.train), None, None, Clock(), teachers
    )
    kls = [step.update(Batch(tuple(made_up()), version=i), step=i)[0]["teacher/kl_top_k"] for i in range(12)]
    assert 0 < kls[-1] < kls[0] / 2


class Mute(LocalTeacher):
    def logprobs(self, samples: Sequence[Sample]) -> torch.Tensor:
        return super().logprobs(samples).fill_(float("nan"))


def test_non_finite_teacher_log_probs_are_an_error_and_never_zero() -> None:
    teacher = Mute(policy(tiny(), {"name": "grpo"}), VOCABULARY)
    with pytest.raises(RunError, match="the teacher big returned non-finite log-probs"):
        Teachers({"big": teacher}, {"big": 0}).read(made_up())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, r'learns from teachers only, and there are none: add one, such as \[algorithm.teachers.NAME\]'),
        ({"teachers": {"a": {}}}, "give a teacher either path"),
        ({"teachers": {"a": {"path": "x", "url": "http://y"}}}, "give a teacher either path"),
        ({"teachers": {"a": {"path": "x", "model": "y"}}}, "model = 'y' is for a teacher with url"),
        ({"teachers": {"a": {"url": "http://y", "top_k": 4}}}, "top_k = 4 needs the teacher's likeliest tokens"),
        ({"teachers": {"a": {"path": "x", "weight": 0.0}}}, "weight"),
    ],
)  # fmt: skip
def test_invalid_teacher_tables_are_rejected(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(algorithm={"name": "distill", **table})


def test_served_teacher_with_another_temperature_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"sampling.temperature = 0.7, and the server of algorithm.teachers.a returns"
    ):
        recipe(algorithm=algorithm({"a": {"url": "http://y"}}), sampling={"temperature": 0.7})


def small(directory: Path, teachers: dict[str, Any], steps: int = 2, **more: Any) -> Path:
    file = directory / "distill.toml"
    tree = {
        "task": "rl", "seed": 3, "model": {"path": "sums-policy"}, "data": {"world": "sums", "eval_items": 8},
        "algorithm": {"name": "distill", "teachers": teachers}, "sampling": {"max_tokens": 48},
        "train": {
            "steps": steps, "prompts_per_step": 6, "lr": 1e-3, "threads": 1, "eval_every": 50,
            "checkpoint": {"every": 2},
        },
        **more,
    }  # fmt: skip
    file.write_text(to_toml(tree))
    return file


def curve(run: Path, name: str) -> list[float]:
    return [e["values"][name] for e in read_events(run) if e["kind"] == "metric" and name in e["values"]]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy with noise added to its weights."""
    loaded = load_policy("sums-policy")
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in loaded.module.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=draw)
    return save(loaded.module, loaded.tokenizer, tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="module")
def other_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy with one token added to its vocabulary."""
    loaded = load_policy("sums-policy")
    loaded.tokenizer.add_tokens(["carry"])
    loaded.module.resize_token_embeddings(len(loaded.tokenizer))  # type: ignore[operator]
    return save(loaded.module, loaded.tokenizer, tmp_path_factory.mktemp("stranger") / "model")


def test_run_with_only_teachers_needs_no_reward(teacher: Path, tmp_path: Path) -> None:
    done = plaudit_here("train", str(small(tmp_path, {"t": {"path": str(teacher)}})), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert len(curve(tmp_path / "run", "teacher/t/kl")) == 2
    assert curve(tmp_path / "run", "reward/mean") == [0.0, 0.0]
    assert curve(tmp_path / "run", "policy/grad_norm")[0] > 0


@pytest.mark.slow
def test_resumed_run_is_equal_bit_for_bit_also_with_offloaded_teachers(teacher: Path, tmp_path: Path) -> None:
    tables = {"t": {"path": str(teacher)}, "k": {"path": "sums-policy", "top_k": 4}}
    for name, stages, place in (("whole", [4], "colocated"), ("halves", [2, 4], "swapped")):
        for i, steps in enumerate(stages):
            file = small(tmp_path, tables, steps, placement={"name": place})
            done = plaudit_here("train", str(file), "--out", str(tmp_path / name), *["--resume"] * i)
            assert done.returncode == 0, done.stderr
    curves = [curve(tmp_path / name, "teacher/t/kl") for name in ("whole", "halves")]
    assert len(curves[0]) == 4
    assert curves[0] == curves[1]


def test_teacher_with_another_vocabulary_is_rejected_in_one_line(other_vocabulary: Path, tmp_path: Path) -> None:
    done = plaudit_here(
        "train", str(small(tmp_path, {"big": {"path": str(other_vocabulary)}})), "--out", str(tmp_path / "run")
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"algorithm.teachers.big: {other_vocabulary} has a different vocabulary" in line
    assert ", of 19 tokens to the policy's 18: token 18 is " in line
    assert "'carry' there and None here" in line


def test_top_k_above_the_vocabulary_size_is_rejected(tmp_path: Path) -> None:
    file = small(tmp_path, {"t": {"path": "sums-policy", "top_k": 19}})
    done = plaudit_here("train", str(file), "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "algorithm.teachers.t.top_k = 19, and the vocabulary has 18 tokens: take fewer" in done.stderr


@pytest.fixture(scope="module")
def server(teacher: Path) -> Iterator[ServerProcess]:
    with ServerProcess({"models": {"near": {"kind": "logprobs", "path": str(teacher)}}}) as process:
        yield process


def own_samples() -> list[Sample]:
    rows = [((1, 7, 14, 7, 15), (7, 14, 7, 16)), ((1, 8, 14), (9, 15, 12, 2, 5, 6)), ((3,), (4,))]
    masks = [(1, 1, 1, 1), (1, 0, 0, 1, 1, 1), (1,)]
    return [
        Sample(p, t, "", (0.0,) * len(t), (0.0,) * len(t), (0,) * len(t), m, "stop")
        for (p, t), m in zip(rows, masks, strict=True)
    ]


@pytest.mark.slow
def test_served_teacher_returns_the_log_probs_of_a_local_one(server: ServerProcess, teacher: Path) -> None:
    expected = policy(load_policy(teacher).module, {"name": "grpo"}).logprobs(own_samples())
    served = ServedTeacher("t", TeacherTable(url=server.url), load_policy("sums-policy").tokenizer)
    assert torch.allclose(served.logprobs(own_samples()), expected, atol=1e-5)
    assert served.logprobs(own_samples())[5:7].tolist() == [0.0, 0.0]
    served.close()


@pytest.mark.slow
def test_served_teacher_with_another_vocabulary_is_rejected(server: ServerProcess) -> None:
    tokenizer = load_policy("sums-policy").tokenizer
    swapped = tokenizer.backend_tokenizer.to_str().replace('"7"', '"?"').replace('"8"', '"7"').replace('"?"', '"8"')
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(swapped))
    with pytest.raises(ConfigError, match=r"has a different vocabulary: token \d+ is '7' there and '8' here"):
        ServedTeacher("t", TeacherTable(url=server.url), other)
    tokenizer.add_tokens(["carry"])
    with pytest.raises(TeacherFailed, match=r"the teacher t at .* refuses /generate \(400\): .*18"):
        ServedTeacher("t", TeacherTable(url=server.url), tokenizer)


@pytest.mark.slow
def test_run_with_a_served_teacher_equals_the_run_with_a_local_one(
    server: ServerProcess, teacher: Path, tmp_path: Path
) -> None:
    curves = []
    for name, table in (("here", {"path": str(teacher)}), ("served", {"url": server.url, "model": "near"})):
        done = plaudit_here("train", str(small(tmp_path, {"t": table})), "--out", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        curves.append(curve(tmp_path / name, "teacher/t/kl"))
    assert len(curves[0]) == 2
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)


def test_unreachable_teacher_is_an_error_with_the_fix(tmp_path: Path) -> None:
    file = small(tmp_path, {"t": {"url": f"http://127.0.0.1:{free_port()}", "patience": 0.3}})
    done = plaudit_here("train", str(file), "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "did not respond within 0.3 s (algorithm.teachers.t.patience)" in line
    assert "start its server there, then --resume" in line
