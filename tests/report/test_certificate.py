"""A run's proof in its report: hashes, agreement of engine and learner, and the latest result of `plaudit verify`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from plaudit.events import VERIFIED, EventLog
from plaudit.report.history import read_history
from plaudit.report.page import render_page
from plaudit.report.terminal import print_report
from plaudit.rl.verify import Certificate, keep


def write_run(directory: Path, *, apart: float, hashed: bool = True) -> Path:
    directory.mkdir()
    events = EventLog(directory)
    for step in (1, 2):
        events.metric({"reward/mean": 0.5, "mismatch/abs_max": apart * step}, step=step)
        if hashed:
            events.write("proof", step=step, hashes={"weights": f"abc{step}", "by": "x86_64"})
    events.close()
    return directory


def test_the_report_shows_hashes_agreement_and_the_verify_result(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", apart=0.0)
    line = "Proof: 2 steps hashed; weights abc2 at step 2; log-probs of engine and learner bit-identical in every step"
    assert read_history(run).proof == [line]
    keep(Certificate(0, "equal to the bit: step 2, recomputed from the start"), run)
    history = read_history(run)
    assert history.proof[1].startswith("verified 20")
    assert history.proof[1].endswith(": equal to the bit: step 2, recomputed from the start")
    console = Console(record=True, width=200, file=io.StringIO())
    print_report([history], console)
    output = console.export_text()
    page = render_page([history])
    assert all(sentence in output and sentence in page for sentence in history.proof)


def test_differences_are_quantified_and_missing_proofs_are_left_out(tmp_path: Path) -> None:
    (line,) = read_history(write_run(tmp_path / "cpu", apart=1e-7)).proof
    assert line.endswith("log-probs of engine and learner differ by at most 2.0e-07 per token")
    bare = write_run(tmp_path / "bare", apart=0.0, hashed=False)
    assert not read_history(bare).proof
    (bare / VERIFIED).write_text("{")
    assert read_history(bare).proof == [f"{VERIFIED} cannot be read; run `plaudit verify {bare}` to write it again"]
