"""A checkpoint is whole or absent, wherever the process dies and whatever the disk does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plaudit.errors import BadCheckpoint
from plaudit.train.checkpoint import Checkpoints

# Saves step 1 in peace, then step 2 with one system call that kills, fails or runs out of space.
SAVER = """
import os, resource, signal, sys
from pathlib import Path
import torch
from plaudit.errors import StorageError
from plaudit.models import new_llama, save
from plaudit.train.checkpoint import Checkpoints
from plaudit.worlds.tokenizer import sums_tokenizer

directory, fault, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
tokenizer = sums_tokenizer()
model = new_llama("policy", vocab_size=len(tokenizer), hidden_size=32, layers=1, heads=2, intermediate_size=32,
                  max_positions=32, seed=1)
checkpoints = Checkpoints(directory, keep=3)

def write(step):
    optimizer = {"exp_avg/x": torch.full((4,), float(step))}
    checkpoints.save(step, lambda path: save(model, tokenizer, path), optimizer, {"mark": step})

write(1)
if fault == "kill":
    calls = 0
    def counted(function):
        def call(*args, **kwargs):
            global calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for name in ("fsync", "replace", "rename", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
elif fault == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, at))
try:
    write(2)
except StorageError as error:
    print(error)
    sys.exit(3)
"""


def run_saver(directory: Path, fault: str, at: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SAVER, str(directory), fault, str(at)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def newest(directory: Path) -> tuple[int, list[str]]:
    warnings: list[str] = []
    checkpoint = Checkpoints(directory, keep=3).load(warnings.append)
    assert checkpoint is not None
    assert checkpoint.state["mark"] == checkpoint.step
    assert torch.equal(checkpoint.optimizer()["exp_avg/x"], torch.full((4,), float(checkpoint.step)))
    assert (checkpoint.model / "config.json").is_file()
    return checkpoint.step, warnings


def test_killed_at_every_fault_point_the_last_whole_checkpoint_is_found(tmp_path: Path) -> None:
    seen = set()
    for at in (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 60):
        directory = tmp_path / str(at)
        done = run_saver(directory, "kill", at)
        step, warnings = newest(directory)
        assert not warnings
        seen.add((done.returncode, step))
        assert (directory / "latest").read_text() in ("step-000001", "step-000002")
        if done.returncode == 0:
            assert step == 2
            break
        # and the next attempt goes through, leaving nothing behind
        assert run_saver(directory, "none", 0).returncode == 0
        assert newest(directory)[0] == 2
        assert not list(directory.glob("*.tmp"))
    assert (-9, 1) in seen
    assert (0, 2) in seen


@pytest.mark.parametrize("limit", [100, 3000])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_says_so_in_one_line(tmp_path: Path, limit: int) -> None:
    done = run_saver(tmp_path, "full", limit)
    assert done.returncode == 3, done.stderr
    assert done.stdout.count("\n") == 1
    assert "earlier checkpoints are intact" in done.stdout
    assert newest(tmp_path) == (1, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        optimizer = {"exp_avg/x": torch.full((4,), float(step))}
        checkpoints.save(step, lambda p: (p.mkdir(), (p / "config.json").write_text("{}")), optimizer, {"mark": step})
    return tmp_path


def test_only_the_newest_are_kept(three: Path) -> None:
    assert sorted(path.name for path in three.iterdir()) == ["latest", "step-000002", "step-000003"]


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(three: Path, damage: str) -> None:
    path = three / "step-000003" / ("manifest.json" if damage == "manifest" else "optimizer.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-3] ^= 1
        path.write_bytes(data)
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2])
    step, warnings = newest(three)
    assert step == 2
    assert len(warnings) == 1
    assert path.name in warnings[0]


def test_when_all_are_damaged_the_cure_is_named(three: Path) -> None:
    for name in ("step-000002", "step-000003"):
        (three / name / "state.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="start over with --fresh"):
        Checkpoints(three, keep=2).load(lambda message: None)


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, keep=2).load(print) is None


def test_the_manifest_covers_every_file(three: Path) -> None:
    directory = three / "step-000003"
    files = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(json.loads((directory / "manifest.json").read_text())) == files
