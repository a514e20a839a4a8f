"""A reward model in this process: the same score alone, in a batch, in a group and from the cache."""

from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from plaudit.records import Item, Score, StepScores
from plaudit.reward import ModelReward, complete, load_reward, load_worker, version
from plaudit.worlds import Sums, get_world
from plaudit.worlds.sums import judge

from ..models.builders import byte_tokenizer
from . import tiny

RESULT = Score | StepScores


def numbers(results: Sequence[RESULT]) -> list[list[float]]:
    assert all(result.error is None for result in results), results
    return [list(r.values) if isinstance(r, StepScores) else [r.value or 0.0] for r in results]


def close(left: Sequence[RESULT], right: Sequence[RESULT]) -> None:
    for a, b in zip(numbers(left), numbers(right), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.fixture(scope="module", params=["outcome", "steps", "causal"])
def path_and_keys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    tokenizer = tiny.sentence_piece() if request.param == "causal" else tiny.chatml()
    labels = {"outcome": ("reward",), "steps": ("wrong", "right"), "causal": ()}[request.param]
    path = tiny.write(directory, tiny.model(request.param, tokenizer, labels), tokenizer)
    return {"path": path, **({"format": "math-shepherd"} if request.param == "causal" else {})}


def test_score_is_the_same_alone_batched_cached_and_in_a_group(path_and_keys: dict[str, Any]) -> None:
    table = complete(path_and_keys, "test")
    reward = load_reward(table)
    assert isinstance(reward, ModelReward)
    cached = ModelReward(reward.engine, reward.reading, reward.version, cache=True)
    split = "\n" if "format" in path_and_keys else "\n\n"
    group = [Item(prompt="hello? " * 8, response=split.join(f"hell {i} {j}" for j in range(1 + i))) for i in range(6)]
    mixed = [Item(prompt=f"h{i} " * (3 * i + 1), response=f"one {i}{split}two") for i in range(6)]
    items = [item for pair in zip(group, mixed, strict=True) for item in pair]
    alone = [reward.score([item])[0] for item in items]
    before = reward.engine.stats().tokens_shared
    close(reward.score(items), alone)
    close(reward.score(group), alone[::2])
    assert reward.engine.stats().tokens_shared > before
    close(cached.score(items), alone)
    close(cached.score(items), alone)


def test_bad_items_do_not_change_the_scores_of_others(path_and_keys: dict[str, Any]) -> None:
    reward = load_reward(complete(path_and_keys, "test"))
    good = [Item(prompt="hello?", response=f"one\n\ntwo {i}") for i in range(5)]
    clean = reward.score(good)
    bad = [Item(tokens=(5, 10**9)), Item(prompt="x", response="\ud800"), Item(prompt="x" * 9999, response="y")]
    mixed = reward.score([bad[0], *good[:2], bad[1], *good[2:], bad[2]])
    errors = [r.error.type for r in mixed if r.error is not None]
    assert errors == ["bad_tokens", "bad_text", "too_long"]
    close([r for r in mixed if r.error is None], clean)
    assert reward.score([]) == []
    assert reward.score(bad[:1])[0].error is not None


def test_version_covers_everything_that_can_change_a_score(tmp_path: Path) -> None:
    """It covers weights, config, tokenizer, template, reward table and dtype, but not devices and batch sizes."""
    tokenizer = tiny.chatml()
    module = tiny.model("outcome", tokenizer, ("reward",))
    path = Path(tiny.write(tmp_path / "a", module, tokenizer))

    def digest(directory: Path = path, **keys: Any) -> str:
        return load_worker(complete({"path": str(directory), **keys}, "test"))[3]

    def changed(name: str, edit: Callable[[Path], object]) -> str:
        edit(copytree(path, tmp_path / name))
        return digest(tmp_path / name)

    def change_weights(copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        save_file(
            {**weights, "score.weight": weights["score.weight"] + 1}, copy / "model.safetensors", {"format": "pt"}
        )

    first = digest()
    assert len(first) == 12
    assert int(first, 16) >= 0
    assert changed("same", lambda copy: None) == first
    assert digest(budget=64, threads=1, max_replicas=2, device="cpu") == first
    others = [
        changed("weights", change_weights),
        changed("config", lambda copy: tiny.rotate(copy, 77.0)),
        changed("tokenizer", byte_tokenizer(eos="<|im_start|>").save_pretrained),
        changed("template", byte_tokenizer(chat_template="{{ messages[0]['content'] }}").save_pretrained),
        changed("table", lambda copy: (copy / "reward.toml").write_text('kind = "outcome"\nend = false\n')),
        digest(standardise={"mean": 1.0}),
        digest(dtype="bfloat16"),
    ]
    assert len({first, *others}) == 8
    (score,) = load_reward(path).score([Item(prompt="hello", response="x")])
    assert score.version == f"0-{first}"


def test_code_is_part_of_the_version(tmp_path: Path) -> None:
    for package in version.COMPUTING:
        copytree(version.PACKAGE / package, tmp_path / package, ignore=ignore_patterns("*.pyc"))
    assert version.code(tmp_path) == version.code() == version.CODE
    with (tmp_path / "core" / "engine.py").open("a") as source:
        source.write("# newer\n")
    assert version.code(tmp_path) != version.code()
    table = complete({"path": "sums"}, "test")
    assert version.digest(table, libraries=["torch"]) != version.digest(table, libraries=["tokenizers"])


def test_nonfinite_score_is_an_error_of_its_item_only(tmp_path: Path) -> None:
    """One token's embedding is NaN: items with that token get an error, the others keep their scores."""
    tokenizer = tiny.chatml()
    for kind, labels in (("outcome", ("reward",)), ("steps", ("wrong", "right"))):
        module = tiny.model(kind, tokenizer, labels)
        reward = load_reward(tiny.write(tmp_path / f"{kind}-clean", module, tokenizer))
        clean = reward.score([Item(prompt="hello?", response=text) for text in ("ab", "cd")])
        with torch.no_grad():
            module.model.embed_tokens.weight[tokenizer.encode("Z")[0]] = torch.nan
        broken = load_reward(tiny.write(tmp_path / f"{kind}-broken", module, tokenizer))
        results = broken.score([Item(prompt="hello?", response=text) for text in ("ab", "Z", "cd")])
        assert results[1].error is not None
        assert results[1].error.type == "nonfinite_score"
        close([results[0], results[2]], clean)


@pytest.fixture(scope="module")
def world() -> Sums:
    return get_world("sums")


def test_the_embedded_reward_model_ranks_right_over_wrong(world: Sums) -> None:
    reward = load_reward("sums")
    pairs = [pair for pair in (world.pair("heldout", i) for i in range(400)) if pair.margin == 1.0][:200]
    chosen = numbers(reward.score([Item(prompt=pair.prompt, response=pair.chosen) for pair in pairs]))
    rejected = numbers(reward.score([Item(prompt=pair.prompt, response=pair.rejected) for pair in pairs]))
    right = sum(a > b for a, b in zip(chosen, rejected, strict=True))
    assert right >= 0.9 * len(pairs)


def test_embedded_process_model_detects_the_first_wrong_step(world: Sums) -> None:
    reward = load_reward("sums-steps")
    cases = [world.judged("heldout", i) for i in range(200)]
    results = reward.score([Item(prompt=problem.prompt, response=response) for problem, response, _ in cases])
    hits = 0
    for (problem, response, verdict), values in zip(cases, numbers(results), strict=True):
        assert len(values) == len(verdict.sound)
        assert judge(problem, response) == verdict
        first = next((i for i, value in enumerate(values) if value < 0.5), -1)
        hits += first == verdict.first_wrong
    assert hits >= 0.8 * len(cases)


def test_the_same_tokens_score_the_same_in_every_form() -> None:
    chat = ({"role": "user", "content": "7+8+4="}, {"role": "assistant", "content": "7+8=15;15+4=19;#19"})
    items = [
        Item(prompt="7+8+4=", response="7+8=15;15+4=19;#19"),
        Item(prompt="7+8+4=", response=("7+8=15;", "15+4=19;", "#19")),
        Item(prompt=chat[:1], response="7+8=15;15+4=19;#19"),
        Item(messages=chat),
        Item(text="7+8+4=7+8=15;15+4=19;#19<eos>"),
    ]
    for name in ("sums", "sums-steps"):
        scores = numbers(load_reward(name).score(items))
        for other in scores[1:]:
            np.testing.assert_allclose(other, scores[0], atol=1e-5)
