"""Supervised training by the command line: bit-identical resumption, rejection of invalid input, no lost data."""

import fcntl
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plaudit.config import load_recipe
from plaudit.errors import RunBusy, RunError
from plaudit.events import read_events
from plaudit.report.history import read_history
from plaudit.train.run.run import Run
from tests.command import plaudit_here
from tests.forked import ForkedCommand, run_forked

TINY = [
    "model.new.hidden=32", "model.new.heads=2", "model.new.ffn=32", "train.batch=8", "train.warmup=2",
    "data.eval_items=12", "train.eval_every=4", "train.checkpoint.every=4",
]  # fmt: skip


def command(*arguments: str, sets: list[str]) -> list[str]:
    overrides = [part for each in sets for part in ("--set", each)]
    return [sys.executable, "-m", "plaudit", "train", *arguments, *overrides]


def plaudit(*arguments: str, sets: list[str]) -> subprocess.CompletedProcess[str]:
    return plaudit_here(*command(*arguments, sets=sets)[3:])


def losses(run: Path) -> list[float]:
    return [e["values"]["loss"] for e in read_events(run) if e["kind"] == "metric" and "loss" in e["values"]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy trained for 12 steps without interruption."""
    run = tmp_path_factory.mktemp("runs") / "straight"
    done = plaudit("sums-sft", "--out", str(run), sets=[*TINY, "train.steps=12"])
    assert done.returncode == 0, done.stderr
    assert str(run / "final") in done.stdout
    return run


def test_log_records_the_settings_and_the_end_of_the_run(straight: Path) -> None:
    run = read_history(straight)
    assert (run.task, run.planned_steps, run.clip_norm, run.finished) == ("sft", 12, 1.0, True)


def killed_at(run: Path, step: int, *arguments: str, sets: list[str]) -> None:
    """Starts a run and kills it with SIGKILL once it has logged more than `step` steps."""
    child = ForkedCommand(command(*arguments, "--out", str(run), sets=sets)[3:], run.with_suffix(".output"))
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and child.poll() is None:
        if (run / "events.jsonl").exists() and len(losses(run)) > step and (run / "checkpoints" / "latest").exists():
            break
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait(30)


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_stopped_run_resumes_bit_for_bit(straight: Path, tmp_path: Path, how: str) -> None:
    run = tmp_path / "broken"
    sets = [*TINY, "train.steps=12"]
    if how == "kill":
        killed_at(run, 5, "sums-sft", sets=sets)
    else:
        child = ForkedCommand(command("sums-sft", "--out", str(run), sets=sets)[3:], tmp_path / "output")
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and not ((run / "events.jsonl").exists() and losses(run)):
            time.sleep(0.002)
        child.terminate()
        assert child.wait(60) == 2
        assert "state saved: --resume continues" in (tmp_path / "output").read_text()
    assert not (run / "summary.json").exists(), "the run ended before it could be stopped"
    done = plaudit("sums-sft", "--out", str(run), "--resume", sets=sets)
    assert done.returncode == 0, done.stderr
    assert losses(run) == losses(straight)
    expected, actual = (load_file(path / "final" / "model.safetensors") for path in (straight, run))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    one, other = (json.loads((path / "summary.json").read_text()) for path in (straight, run))
    assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize(
    ("recipe", "figures"), [("reward", ["pair_accuracy"]), ("prm", ["step_auc", "first_wrong_f1"])]
)
def test_reward_models_and_prms_start_from_the_run_of_a_policy(
    straight: Path, tmp_path: Path, recipe: str, figures: list[str]
) -> None:
    sets = [f"model.path={straight}", "train.batch=8", "train.steps=3", "data.eval_items=12", "train.warmup=1"]
    done = plaudit(f"sums-{recipe}", "--out", str(tmp_path / "run"), sets=sets)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {*figures, "heldout_loss", "seconds", "parameters"} <= set(summary)
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    kind = AutoModelForSequenceClassification if recipe == "reward" else AutoModelForTokenClassification
    kind.from_pretrained(tmp_path / "run" / "final")


def test_regression_with_attributes_from_a_file(straight: Path, tmp_path: Path) -> None:
    data = tmp_path / "rated.jsonl"
    rows = ({"prompt": "1+2=", "response": f"#{i}", "help": float(i), "truth": i % 2 or None} for i in range(40))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "rated.toml"
    recipe.write_text(
        f'task = "reward"\n[model]\npath = "{straight}"\n[data]\npath = "{data}"\n'
        '[algorithm]\nname = "regression"\nattributes = ["help", "truth"]\n[train]\nsteps = 3\nbatch = 4\nlr = 1e-3\n'
    )
    done = plaudit(str(recipe), "--out", str(tmp_path / "run"), sets=[])
    assert done.returncode == 0, done.stderr
    assert {"help/mse", "truth/mse"} <= set(json.loads((tmp_path / "run" / "summary.json").read_text()))
    assert json.loads((tmp_path / "run" / "final" / "config.json").read_text())["id2label"] == {
        "0": "help",
        "1": "truth",
    }


def test_the_directory_of_a_run_is_used_by_one_process_and_never_overwritten(straight: Path) -> None:
    def enter(*overrides: str, resume: bool) -> None:
        recipe = load_recipe(Path("sums-sft"), [*TINY, "train.steps=12", *overrides])
        with Run(straight, recipe, resume=resume):
            pass

    before = (straight / "events.jsonl").read_bytes()
    with pytest.raises(RunError, match="already contains a run: --resume continues it, --fresh starts over"):
        enter(resume=False)
    with pytest.raises(RunError, match=r"it was started with train\.lr = 0\.003, and the recipe has 0\.5"):
        enter("train.lr=0.5", resume=True)
    with (straight / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunBusy, match="is in use by process"):
            enter(resume=True)
    assert (straight / "events.jsonl").read_bytes() == before


def test_run_that_failed_before_its_first_step_can_be_started_again(tmp_path: Path) -> None:
    first, second = (load_recipe(Path("sums-sft"), [f"train.lr={lr}"]) for lr in (0.1, 0.2))
    for recipe in (first, second):
        with Run(tmp_path / "run", recipe) as run:
            assert load_recipe(tmp_path / "run" / "recipe.toml") == recipe
    with Run(tmp_path / "run", second) as run:
        run.events.metric({"loss": 1.0}, step=1)
    with pytest.raises(RunError, match="already contains a run"), Run(tmp_path / "run", second):
        pass


def test_finished_run_can_be_extended(straight: Path, tmp_path: Path) -> None:
    import shutil

    run = tmp_path / "longer"
    shutil.copytree(straight, run)
    sets = [*TINY, "train.steps=14"]
    done = plaudit("sums-sft", "--out", str(run), "--resume", sets=sets)
    assert done.returncode == 0, done.stderr
    assert losses(run)[:12] == losses(straight)
    assert len(losses(run)) == 14


LIMITED = """
import resource, signal
from plaudit.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
main()
"""


def test_full_disk_ends_the_run_with_a_one_line_error(tmp_path: Path) -> None:
    words = command("sums-sft", "--out", str(tmp_path / "run"), sets=[*TINY, "train.steps=12"])[3:]
    done = run_forked("-c", LIMITED, *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("plaudit: cannot write the checkpoint")
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    done = plaudit("sums-sft", "--out", str(tmp_path / "run"), "--resume", sets=[*TINY, "train.steps=12"])
    assert done.returncode == 0, done.stderr
