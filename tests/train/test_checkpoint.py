"""A checkpoint is complete or absent, wherever the process dies and whatever the disk does."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plaudit.errors import BadCheckpoint
from plaudit.train.run.checkpoint import Checkpoints
from tests.forked import run_forked

# Saves step 1 normally, then step 2 in a forked child in which a system call kills it or the disk is full.
SAVER = """
import os, resource, signal, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from plaudit.errors import StorageError
from plaudit.models import new_llama, save
from plaudit.train.run.checkpoint import Checkpoints
from tests.forked import run_forked
from plaudit.worlds.tokenizer import sums_tokenizer

root, fault = Path(sys.argv[1]), sys.argv[2]
tokenizer = sums_tokenizer()
model = new_llama("policy", vocab_size=len(tokenizer), hidden_size=32, layers=1, heads=2, intermediate_size=32,
                  max_positions=32, seed=1)

def write(directory, step):
    optimizer = {"exp_avg/x": torch.full((4,), float(step))}
    Checkpoints(directory, keep=3).save(step, lambda path: save(model, tokenizer, path),
                                        lambda path: save_file(optimizer, path), {"mark": step})

def break_at(at):
    if fault == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, resource.RLIM_INFINITY))
        return
    calls = 0
    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for name in ("fsync", "replace", "rename", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))

for at in map(int, sys.argv[3:]):
    directory = root / str(at)
    write(directory, 1)
    child = os.fork()
    if child == 0:
        try:
            break_at(at)
            write(directory, 2)
            os._exit(0)
        except StorageError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # to say it
            print(at, error, flush=True)
            os._exit(3)
    print(at, "ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def saver(tensors: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    return lambda path: save_file(tensors, path)


def break_saves(root: Path, fault: str, *points: int) -> tuple[dict[int, int], list[str]]:
    """Exit code of the save at each fault point, and the error messages of those that failed."""
    done = run_forked("-c", SAVER, str(root), fault, *map(str, points))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    codes = {int(line.split()[0]): int(line.split()[2]) for line in lines if line.split()[1] == "ended"}
    return codes, [line for line in lines if line.split()[1] != "ended"]


def newest(directory: Path) -> tuple[int, list[str]]:
    warnings: list[str] = []
    checkpoint = Checkpoints(directory, keep=3).load(warnings.append)
    assert checkpoint is not None
    assert checkpoint.state["mark"] == checkpoint.step
    assert torch.equal(checkpoint.optimizer()["exp_avg/x"], torch.full((4,), float(checkpoint.step)))
    assert (checkpoint.model / "config.json").is_file()
    return checkpoint.step, warnings


@pytest.mark.slow
def test_last_complete_checkpoint_is_loaded_after_a_kill_at_any_fault_point(tmp_path: Path) -> None:
    codes, _ = break_saves(tmp_path, "kill", *range(1, 41))
    loaded = {at: newest(tmp_path / str(at)) for at in codes}
    for at, code in codes.items():
        step, warnings = loaded[at]
        assert not warnings
        assert code in (0, -9)
        assert step == 2 if code == 0 else step in (1, 2)
        assert (tmp_path / str(at) / "latest").read_text() in ("step-000001", "step-000002")
    # Some saves are killed before the rename, some after it, and some points lie beyond the last call.
    assert {(codes[at], loaded[at][0]) for at in codes} == {(-9, 1), (-9, 2), (0, 2)}


def test_save_after_a_killed_save_removes_its_leftovers(three: Path) -> None:
    (three / "step-000004.tmp" / "model").mkdir(parents=True)
    Checkpoints(three, keep=2).save(5, lambda path: path.mkdir(), saver({"exp_avg/x": torch.zeros(1)}), {"mark": 5})
    assert sorted(path.name for path in three.iterdir()) == ["latest", "step-000003", "step-000005"]


def test_full_disk_keeps_the_earlier_checkpoint_and_gives_a_one_line_error(tmp_path: Path) -> None:
    codes, errors = break_saves(tmp_path, "full", 100, 3000)
    assert codes == {100: 3, 3000: 3}
    assert len(errors) == 2
    for at, line in zip(codes, errors, strict=True):
        assert "earlier checkpoints are intact" in line
        assert newest(tmp_path / str(at)) == (1, [])
        assert sorted(path.name for path in (tmp_path / str(at)).iterdir()) == ["latest", "step-000001"]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        optimizer = saver({"exp_avg/x": torch.full((4,), float(step))})
        checkpoints.save(step, lambda p: (p.mkdir(), (p / "config.json").write_text("{}")), optimizer, {"mark": step})
    return tmp_path


def test_only_the_newest_checkpoints_are_kept(three: Path) -> None:
    assert sorted(path.name for path in three.iterdir()) == ["latest", "step-000002", "step-000003"]


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest"])
def test_damaged_file_is_named_and_the_previous_checkpoint_is_used(three: Path, damage: str) -> None:
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


def test_error_names_the_fix_when_all_checkpoints_are_damaged(three: Path) -> None:
    for name in ("step-000002", "step-000003"):
        (three / name / "state.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="start over with --fresh"):
        Checkpoints(three, keep=2).load(lambda message: None)


def test_load_returns_none_without_a_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, keep=2).load(print) is None


def test_the_manifest_covers_every_file(three: Path) -> None:
    directory = three / "step-000003"
    files = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(json.loads((directory / "manifest.json").read_text())) == files


def test_all_files_are_synced_before_the_checkpoint_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a power cut could show a missing fsync, a kill cannot: so this checks the order of the system calls."""
    calls: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(handle: int) -> None:
        calls.append(("fsync", Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    def recording_rename(source: Path, target: Path) -> None:
        calls.append(("rename", Path(source)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)

    def save_model(path: Path) -> None:
        path.mkdir()
        (path / "weights").write_bytes(b"1234")

    directory = tmp_path / "checkpoints"
    final = Checkpoints(directory, keep=3).save(7, save_model, saver({"x": torch.ones(2)}), {"mark": 7})
    temporary = final.with_name(f"{final.name}.tmp")
    rename_index = calls.index(("rename", temporary))
    synced = {path for kind, path in calls[:rename_index] if kind == "fsync"}
    assert {temporary / path.relative_to(final) for path in (*final.rglob("*"), final)} <= synced
    assert ("fsync", directory) in calls[rename_index:]
