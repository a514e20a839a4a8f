"""The output file of a command is complete, or the previous one is unchanged."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plaudit.errors import StorageError
from plaudit.output import check_writable, written


def test_unwritable_outputs_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        check_writable(tmp_path / "none" / "out.jsonl")
    with pytest.raises(StorageError, match="it is a directory"):
        check_writable(tmp_path)


def test_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    def set_file_size_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))

    out = tmp_path / "samples.jsonl"
    out.write_text("old\n")
    code = (
        "from pathlib import Path; from plaudit.output import written\n"
        f"with written(Path({str(out)!r})) as file: file.write('x' * 100)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, preexec_fn=set_file_size_limit
    )
    assert "StorageError: cannot write" in result.stderr
    assert out.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [out]


def test_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    out.write_text("old\n")
    with pytest.raises(ZeroDivisionError), written(out) as file:
        file.write(f"new{1 // 0}")
    assert out.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [out]
    with written(out) as file:
        file.write("new\n")
        assert out.read_text() == "old\n"
    assert out.read_text() == "new\n"


def test_links_and_devices_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    with written(link) as file:
        file.write("a\n")
    assert link.is_symlink()
    assert real.read_text() == "a\n"
    with pytest.raises(StorageError, match="No space left on device"), written(Path("/dev/full")) as file:
        file.write("a\n")
    assert Path("/dev/full").is_char_device()
