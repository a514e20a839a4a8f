"""What `plaudit verify` says of changed runs: every manipulation is told by name, first as it is, then with every hash
in the run made to fit again, which only recomputing all steps can tell."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plaudit.rl.verify import Certificate, verify
from tests.command import plaudit_here
from tests.train.forged import Event, drop, dump_of, forge, into_shards, log, nudge, replace, tensors, text, tree

SMALL = {
    "train.steps": 3, "train.prompts_per_step": 3, "train.samples_per_prompt": 2, "train.eval_every": 2,
    "train.checkpoint.every": 1, "train.checkpoint.keep": 2, "train.dump": "true", "data.eval_items": 4,
    "sampling.max_tokens": 24,
}  # fmt: skip
KINDS = {
    "grpo": {}, "lora": {"model.lora": "{rank=2}"}, "ppo": {"algorithm.name": "ppo", "critic": "{}"},
}  # fmt: skip
FINAL = "final/model.safetensors"
SAVED = "checkpoints/step-000003"
MODEL = f"{SAVED}/model/model.safetensors"


@dataclass(frozen=True)
class Case:
    """said     what is said of the change as it is
    forged   what is said when all hashes fit again; "" where they cannot, since something is missing
    kind     of run"""

    change: Callable[[Path], object]
    said: str
    forged: str = ""
    kind: str = "grpo"


def scaled(run: Path) -> None:
    drop(run, lambda event: event["kind"] == "proof")
    tensors(run / FINAL, lambda held: held.update({name: each * 1.5 for name, each in held.items()}))


def without_weights(run: Path) -> None:
    def less(event: Event) -> Event:
        if event["kind"] == "proof":
            event["hashes"].pop("weights", None)
        return event

    log(run, less)
    tensors(run / FINAL, nudge)


def ones(held: dict[str, Tensor]) -> None:
    held.update({name: torch.ones_like(each) for name, each in held.items()})


def swapped(held: dict[str, Tensor]) -> None:
    a, b = (f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1))
    held[a], held[b] = held[b], held[a]


def stray_shard(run: Path) -> None:
    shutil.copy(run / FINAL, run / "final" / "model-00001-of-00002.safetensors")


def of_step(step: int) -> Callable[[Event], bool]:
    return lambda event: event.get("step") == step and event["kind"] in ("metric", "proof")


def metric(step: int, name: str, change: Callable[[float], float | None]) -> Callable[[Path], None]:
    def edit(event: Event) -> Event:
        if event["kind"] == "metric" and event["step"] == step and name in event["values"]:
            event["values"][name] = change(event["values"][name])
        return event

    return lambda run: log(run, edit)


def shown(change: Callable[[Event], Event | None]) -> Callable[[Path], None]:
    return lambda run: log(run, lambda event: change(event) if event["kind"] == "sample" else event)


def without_gradient_norm(run: Path) -> None:
    def edit(event: Event) -> Event:
        if event["kind"] == "metric":
            event["values"].pop("policy/grad_norm", None)
        return event

    log(run, edit)


def dumped(step: int, **keys: object) -> Callable[[Path], None]:
    return lambda run: dump_of(run, step, lambda sample: {**sample, **keys})


def other_token(run: Path) -> None:
    dump_of(run, 3, lambda sample: {**sample, "token_ids": [sample["token_ids"][0] ^ 1, *sample["token_ids"][1:]]})


def other_logprob(run: Path) -> None:
    dump_of(run, 3, lambda sample: {**sample, "logprobs": [sample["logprobs"][0] - 1e-7, *sample["logprobs"][1:]]})


def other_reward(step: int) -> Callable[[Path], None]:
    return lambda run: dump_of(run, step, lambda sample: {**sample, "reward": 1 - sample["reward"]})


def other_order(run: Path) -> None:
    path = run / "rollouts" / "step-000003.jsonl"
    first, second, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([second, first, *others]))


def twice(run: Path) -> None:
    path = run / "rollouts" / "step-000003.jsonl"
    first = path.read_text().splitlines(keepends=True)[0]
    path.write_text(first + path.read_text())


def other_adapter(run: Path) -> None:
    tree(run / "final" / "adapter" / "adapter_config.json", lora_alpha=999)


def foreign_adapter(run: Path) -> None:
    (run / "final" / "adapter").mkdir()
    (run / "final" / "adapter" / "adapter_config.json").write_text("{}")


def hashes(step: int, **keys: str) -> Callable[[Path], None]:
    def edit(event: Event) -> Event:
        if event["kind"] == "proof" and event["step"] == step and "metrics" in event["hashes"]:
            event["hashes"] |= keys
        return event

    return lambda run: log(run, edit)


def proofs_swapped(run: Path) -> None:
    path = run / "events.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    a, b = [n for n, row in enumerate(rows) if '"logprobs":"' in row][:2]
    rows[a], rows[b] = rows[b], rows[a]
    path.write_text("".join(rows))


def voided(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write('{"t": 99, "kind": "note", "text": "resume", "step": 1}\n')


def copied_checkpoint(run: Path) -> None:
    shutil.copytree(run / SAVED, run / "checkpoints" / "step-000009")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


DELETED = "proofs deleted, final weights times 1.5"
CASES = {
    # Those of which `verify` once said that all is equal
    DELETED: Case(scaled, "events.jsonl has no hashes of steps 1 to 3"),
    "hashes of weights deleted": Case(without_weights, "the chain of hashes breaks at step 1", "step 1: the weights"),
    "adapter of ones": Case(
        lambda run: tensors(run / "final/adapter/adapter_model.safetensors", ones),
        r"final/adapter/adapter_model.safetensors was changed: its tensors have",
        r"final/adapter/adapter_model.safetensors: tensor '.*lora_A.*' differs from the recomputed one", "lora",
    ),
    "final deleted": Case(lambda run: shutil.rmtree(run / "final"), "cannot be verified: .*/final does not exist"),
    "shards with one weight changed": Case(
        lambda run: into_shards(run / "final", nudge), f"{FINAL} was changed: its tensors have",
        f"{FINAL}: tensor '.*' differs from the recomputed one, first in its element 0",
    ),
    "config": Case(
        lambda run: tree(run / "final/config.json", rms_norm_eps=1e-5), "final/config.json was changed",
        "final/config.json is not the recomputed file",
    ),
    "tokenizer": Case(
        lambda run: text(run / "final/tokenizer.json", '"#"', '"%"'), "final/tokenizer.json was changed",
        "final/tokenizer.json is not the recomputed file",
    ),
    "held-out reward": Case(
        metric(3, "heldout/reward", lambda value: value + 0.125), "step 3: heldout/reward was",
        "step 3: heldout/reward was",
    ),
    "first held-out reward": Case(
        metric(0, "heldout/reward", lambda value: value + 0.25), "step 0: the evaluation is not that of its hash",
        "step 0: heldout/reward was",
    ),
    "text in a dump": Case(
        dumped(3, text="42"), "step-000003.jsonl: texts or prompts are not those",
        "step-000003.jsonl:1: text is not the recomputed one",
    ),
    "text in an older dump": Case(
        dumped(1, text="42"), "step-000001.jsonl: texts or prompts are not those",
        "step-000001.jsonl:1: text is not the recomputed one",
    ),
    "reward in a dump": Case(
        other_reward(3), "step-000003.jsonl: the rewards are not those that the run learned from",
        "step 3: the rewards differ",
    ),
    "reward in an older dump": Case(
        other_reward(1), "step-000001.jsonl: the rewards are not those", "step 1: the rewards differ"
    ),
    "reward rule": Case(
        lambda run: text(run / "recipe.toml", r"#(\\d+)$", r"(\\d)$"), "recipe.toml is not the recipe that the run",
        "step 1: the rewards differ",
    ),
    "weight of a checkpoint": Case(
        lambda run: tensors(run / MODEL, nudge), f"{MODEL} is damaged", "step 3: the weights differ"
    ),
    "weight of an older checkpoint": Case(
        lambda run: tensors(run / MODEL.replace("3", "2"), nudge), "step-000002/model/model.safetensors is damaged",
        "step 2: the weights differ",
    ),
    "step removed": Case(lambda run: drop(run, of_step(2)), "the chain of hashes breaks at step 3"),
    "metrics of a step removed": Case(
        lambda run: drop(run, lambda event: event["kind"] == "metric" and event["step"] == 2),
        "cannot be verified: .*events.jsonl has no metrics of step 2",
    ),
    # The model that is delivered
    "one final weight": Case(
        lambda run: tensors(run / FINAL, nudge), f"{FINAL} was changed", f"{FINAL}: tensor '.*' differs"
    ),
    "final tensors swapped": Case(
        lambda run: tensors(run / FINAL, swapped), f"{FINAL} was changed",
        r"tensor 'model.layers.0.self_attn.q_proj.weight' differs from the recomputed one",
    ),
    "final tensor removed": Case(
        lambda run: tensors(run / FINAL, lambda held: held.pop("model.norm.weight")), f"{FINAL} was changed",
        f"{FINAL}: tensor 'model.norm.weight' is missing",
    ),
    "final tensor added": Case(
        lambda run: tensors(run / FINAL, lambda held: held.update(more=torch.ones(1))), f"{FINAL} was changed",
        f"{FINAL}: tensor 'more' is not among the recomputed ones",
    ),
    "final dtype": Case(
        lambda run: tensors(run / FINAL, lambda held: held.update({n: t.bfloat16() for n, t in held.items()})),
        f"{FINAL} was changed", f"{FINAL}: tensor '.*' is BF16 .*, recomputed F32",
    ),
    "final truncated": Case(lambda run: truncated(run / FINAL), f"{FINAL} is truncated"),
    "stray shard": Case(stray_shard, "model-00001-of-00002.safetensors is not among the files of model.safetensors"),
    "final of the step before": Case(
        lambda run: replace(run / "final", run / "checkpoints/step-000002/model"), f"{FINAL} was changed",
        f"{FINAL}: tensor '.*' differs",
    ),
    "final adapter config": Case(
        other_adapter, "adapter/adapter_config.json was changed", "adapter/adapter_config.json is not the recomputed",
        "lora",
    ),
    "final adapter deleted": Case(
        lambda run: shutil.rmtree(run / "final/adapter"), "final/adapter/adapter_model.safetensors is missing",
        "final/adapter/adapter_model.safetensors is missing", "lora",
    ),
    "merged weights of an adapter": Case(
        lambda run: tensors(run / FINAL, nudge), f"{FINAL} was changed", f"{FINAL}: tensor '.*' differs", "lora"
    ),
    "foreign adapter": Case(
        foreign_adapter, "adapter/adapter_config.json is not in the manifest",
        "adapter/adapter_config.json is not among the recomputed files",
    ),
    "generation config": Case(
        lambda run: tree(run / "final/generation_config.json", temperature=2.0), "generation_config.json was changed",
        "generation_config.json is not the recomputed file",
    ),
    "chat template": Case(
        lambda run: (run / "final/chat_template.jinja").write_text("{{ 'Say yes.' }}"),
        "chat_template.jinja was changed", "chat_template.jinja is not the recomputed file",
    ),
    "chat template deleted": Case(
        lambda run: (run / "final/chat_template.jinja").unlink(), "chat_template.jinja is missing",
        "chat_template.jinja is missing",
    ),
    "tokenizer config": Case(
        lambda run: tree(run / "final/tokenizer_config.json", add_bos_token=True), "tokenizer_config.json was changed",
        "tokenizer_config.json is not the recomputed file",
    ),
    "code added": Case(
        lambda run: (run / "final/modeling_llama.py").write_text("pass\n"), "modeling_llama.py is not in the manifest",
        "modeling_llama.py is not among the recomputed files",
    ),
    # Checkpoints
    "critic of a checkpoint": Case(
        lambda run: tensors(run / SAVED / "critic/model.safetensors", nudge), "critic/model.safetensors is damaged",
        "critic/model.safetensors: tensor '.*' differs", "ppo",
    ),
    "optimizer of the critic": Case(
        lambda run: tensors(run / SAVED / "critic-optimizer.safetensors", nudge), "critic-optimizer.*is damaged",
        "critic-optimizer.safetensors: tensor '.*' differs", "ppo",
    ),
    "optimizer of a checkpoint": Case(
        lambda run: tensors(run / SAVED / "optimizer.safetensors", nudge), "step-000003/optimizer.safetensors is dam",
        "step-000003/optimizer.safetensors: tensor '.*' differs",
    ),
    "adapter of a checkpoint": Case(
        lambda run: tensors(run / SAVED / "adapter.safetensors", nudge), "step-000003/adapter.safetensors is damaged",
        "step 3: the weights differ", "lora",
    ),
    "state of a checkpoint": Case(
        lambda run: tree(run / SAVED / "state.json", drawn=1), "step-000003/state.json is damaged",
        "step-000003/state.json: drawn is not the recomputed one",
    ),
    "tokenizer of a checkpoint": Case(
        lambda run: text(run / SAVED / "model/tokenizer.json", '"#"', '"%"'), "model/tokenizer.json is damaged",
        "model/tokenizer.json is not the recomputed file",
    ),
    "file of a checkpoint deleted": Case(
        lambda run: (run / SAVED / "optimizer.safetensors").unlink(), "step-000003/optimizer.safetensors cannot be",
        "step-000003/optimizer.safetensors is missing",
    ),
    "checkpoint truncated": Case(lambda run: truncated(run / MODEL), f"{MODEL} is damaged"),
    "manifest of a checkpoint deleted": Case(
        lambda run: (run / SAVED / "manifest.json").unlink(), "step-000003/manifest.json cannot be read"
    ),
    "checkpoint deleted": Case(
        lambda run: shutil.rmtree(run / "checkpoints/step-000002"), "cannot be verified: .*step-000002 does not exist"
    ),
    "checkpoint added": Case(
        copied_checkpoint, "step-000009 is no checkpoint of the run", "latest does not name step-000009"
    ),
    "pointer to the latest checkpoint": Case(
        lambda run: (run / "checkpoints/latest").write_text("step-000002"), "latest does not name step-000003",
        "latest does not name step-000003",
    ),
    # Dumps
    "token in a dump": Case(other_token, "step-000003.jsonl: the samples are not those", "step 3: the samples differ"),
    "log-prob in a dump": Case(
        other_logprob, "step-000003.jsonl: the log-probs are not those", "step 3: the log-probs differ"
    ),
    "why a sample ended": Case(
        dumped(3, finish_reason="abort"), "step-000003.jsonl: the samples are not", "step 3: the samples differ"
    ),
    "sample removed": Case(
        lambda run: dump_of(run, 3, lambda _: None), "step-000003.jsonl: the samples are", "step 3: the samples differ"
    ),
    "sample twice": Case(twice, "step-000003.jsonl: the samples are not those", "step 3: the samples differ"),
    "samples swapped": Case(other_order, "step-000003.jsonl: the samples are not those", "step 3: the samples differ"),
    "truth in a dump": Case(
        dumped(3, extra={"truth": "1"}), "step-000003.jsonl: texts or prompts", "step-000003.jsonl:1: extra is not"
    ),
    "version in a dump": Case(
        lambda run: dump_of(run, 3, lambda sample: {**sample, "versions": [9] * len(sample["versions"])}),
        "step-000003.jsonl: texts or prompts", "step-000003.jsonl:1: versions is not",
    ),
    "position in a dump": Case(dumped(3, drawn=1), "step-000003.jsonl: texts", "and besides them something else"),
    "dump is no JSON": Case(
        lambda run: (run / "rollouts/step-000002.jsonl").write_text("{\n"), "step-000002.jsonl:1 is not a dumped sample"
    ),
    "dump deleted": Case(
        lambda run: (run / "rollouts/step-000002.jsonl").unlink(), "cannot be verified: .*step-000002.jsonl does not",
    ),
    "dump added": Case(
        lambda run: shutil.copy(run / "rollouts/step-000003.jsonl", run / "rollouts/step-000004.jsonl"),
        "step-000004.jsonl is of no step of the run", "step-000004.jsonl is of no step of the run",
    ),
    # The log
    "metric": Case(
        metric(3, "policy/loss", lambda loss: loss + 1e-9), "step 3: policy/loss was", "step 3: policy/loss was"
    ),
    "metric of an older step": Case(
        metric(1, "reward/mean", lambda value: value + 0.1), "step 1: the metrics are not those of its hash",
        "step 1: reward/mean was",
    ),
    "metric removed": Case(
        without_gradient_norm, "step 1: the metrics are not those of its hash", "step 1: policy/grad_norm was None"
    ),
    "evaluation removed": Case(
        lambda run: drop(run, lambda e: e["kind"] == "metric" and "heldout/reward" in e["values"] and e["step"] == 2),
        "step 2: the evaluation or its hash is not there",
    ),
    "shown sample": Case(
        shown(lambda event: {**event, "response": "42"}), "step 1: the samples shown are not those",
        "step 1: the samples shown in events.jsonl are not the recomputed ones",
    ),
    "shown samples removed": Case(
        shown(lambda _: None), "step 1: the samples shown are not there",
        "step 1: the samples shown in events.jsonl are not the recomputed ones",
    ),
    "hash of a step": Case(hashes(2, samples="0" * 16), "the chain of hashes breaks at step 2"),
    "versions of a step": Case(hashes(1, by="another machine"), "the chain of hashes breaks at step 1"),
    "proof of a step removed": Case(
        lambda run: drop(run, lambda event: event["kind"] == "proof" and event["step"] == 2),
        "the chain of hashes breaks at step 3",
    ),
    "proofs swapped": Case(proofs_swapped, "the chain of hashes breaks at step"),
    "last step removed": Case(
        lambda run: drop(run, of_step(3)), "events.jsonl ends within step 3: its metrics are not there",
        "events.jsonl ends within step 3: its metrics are not there",
    ),
    "log voided by a resume": Case(voided, "is of no step of the run"),
    "log deleted": Case(lambda run: (run / "events.jsonl").unlink(), "cannot be verified: .*events.jsonl does not"),
    "log is no JSON": Case(lambda run: (run / "events.jsonl").write_text("{\n"), "events.jsonl is damaged"),
    # The recipe and what sums the run up
    "seed": Case(
        lambda run: text(run / "recipe.toml", "seed = 1", "seed = 2"), "recipe.toml is not", "step 1: the samples"
    ),
    "learning rate": Case(
        lambda run: text(run / "recipe.toml", "lr = 0.0005", "lr = 0.0006"), "recipe.toml is not", "step 1: the weights"
    ),
    "temperature": Case(
        lambda run: text(run / "recipe.toml", "temperature = 1.0", "temperature = 0.9"), "recipe.toml is not",
        "step 1: the samples differ|step 1: the log-probs differ|step 0: heldout",
    ),
    "fewer steps": Case(
        lambda run: text(run / "recipe.toml", "steps = 3", "steps = 2"), "recipe.toml is not", "step 1: |step 2: "
    ),
    "recipe deleted": Case(
        lambda run: (run / "recipe.toml").unlink(), "cannot be verified: .*recipe.toml does not exist"
    ),
    "recipe is no TOML": Case(lambda run: (run / "recipe.toml").write_text("= 1"), "recipe.toml is not valid TOML"),
    "summary": Case(
        lambda run: tree(run / "summary.json", reward_after=1.5), "summary.json is not the file of manifest.json",
        "summary.json: reward_after is 1.5, recomputed",
    ),
    "summary deleted": Case(lambda run: (run / "summary.json").unlink(), "summary.json does not exist"),
    "manifest deleted": Case(lambda run: (run / "manifest.json").unlink(), "manifest.json does not exist"),
    "manifest is no JSON": Case(lambda run: (run / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    "manifest of another log": Case(
        lambda run: tree(run / "manifest.json", chain="0" * 32), "manifest.json is not of this log"
    ),
}  # fmt: skip
FAST = ("hashes of weights deleted", "shards with one weight changed", "text in a dump", "critic of a checkpoint")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    home = tmp_path_factory.mktemp("forgeries")

    def trained(kind: str) -> Path:
        if not (home / kind).exists():
            sets = [word for key, value in {**SMALL, **KINDS[kind]}.items() for word in ("--set", f"{key}={value}")]
            done = plaudit_here("train", "sums-grpo", "--out", str(home / kind), *sets)
            assert done.returncode == 0, done.stderr
        return home / kind

    return trained


def verdict(run: Path, scratch: Path, from_start: bool = False) -> Certificate:
    shutil.rmtree(scratch, ignore_errors=True)
    return verify(run, scratch, from_start=from_start)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in CASES])
def test_each_change_is_told_by_name(name: str, originals: Callable[[str], Path], tmp_path: Path) -> None:
    case = CASES[name]
    run = shutil.copytree(originals(case.kind), tmp_path / "run")
    case.change(run)
    found = verdict(run, tmp_path / "scratch")
    assert found.code == 1, found.text
    assert re.search(case.said, found.text), found.text
    assert "\n" not in found.text
    if case.forged:
        forge(run)
        found = verdict(run, tmp_path / "scratch", from_start=True)
        assert found.code == 1, found.text
        assert re.search(case.forged, found.text), found.text
        assert "\n" not in found.text
    shutil.rmtree(run)  # tests/conftest.py reads all logs that are left


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_a_forger_without_a_change_changes_nothing(kind: str, originals: Callable[[str], Path], tmp_path: Path) -> None:
    """The forger is right: what he is caught at is the change."""
    run = shutil.copytree(originals(kind), tmp_path / "run")
    forge(run)
    assert verdict(run, tmp_path / "scratch").code == 0
    found = verdict(run, tmp_path / "scratch", from_start=True)
    assert found.code == 0, found.text
    assert found.text.startswith("these weights come from this recipe: ")


@pytest.mark.slow
def test_steps_before_the_checkpoint_are_named_as_compared_only(
    originals: Callable[[str], Path], tmp_path: Path
) -> None:
    """A forged older step passes where it is not recomputed; the verdict says so."""
    run = shutil.copytree(originals("grpo"), tmp_path / "run")
    dumped(1, text="42")(run)
    forge(run)
    found = verdict(run, tmp_path / "scratch")
    assert found.code == 0, found.text
    assert "recomputed from step-000002" in found.text
    assert "only compared with their hashes: steps 1 to 2" in found.text


def test_there_are_more_than_forty_manipulations() -> None:
    assert len(CASES) >= 18 + 40
