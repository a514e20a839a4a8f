"""`plaudit doctor`: findings with their fixes, a timeout on every check, no torch before it is needed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from plaudit.doctor import doctor, machine
from plaudit.doctor.doctor import CHECKS, Probe, finish
from plaudit.doctor.finding import Finding
from tests.command import plaudit_here


def test_findings_are_printed_as_lines_or_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = plaudit_here("doctor", "disk", "clock", "--timeout", "240", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") >= 3
    assert all(
        line.split()[:2] in (["ok", "disk"], ["ok", "clock"], ["warning", "disk"]) for line in done.stdout.splitlines()
    )
    findings = json.loads(plaudit_here("doctor", "versions", "--json", "--timeout", "240").stdout)["findings"]
    assert f"Python {sys.version.split()[0]}" in findings[0]["detail"]
    assert [each for each in findings if each["check"] == "versions" and "torch 2" in each["detail"]]
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


def test_unknown_check_is_rejected_with_a_suggestion() -> None:
    done = plaudit_here("doctor", "dsik")
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "plaudit: unknown check 'dsik'; did you mean 'disk'?",
    )


def test_a_check_that_hangs_fails_at_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that waits forever stands in for one on a dead file server."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(doctor.__file__).parents[2]}")
    (tmp_path / "hangs.py").write_text("import threading; threading.Event().wait()")
    probe = Probe.start("hangs")
    finish([probe], 1.0)
    (finding,) = doctor._results("disk", probe, 1.0)
    assert (finding.check, finding.status) == ("disk", "failed")
    assert finding.detail == "no answer within 1 s"
    assert "--timeout" in finding.cure
    assert probe.process.returncode is not None, "it was ended"


def test_a_check_that_crashes_fails_with_its_exception() -> None:
    probe = Probe.start("plaudit.doctor.probe", "none")
    finish([probe], 240)
    (finding,) = doctor._results("none", probe, 240)
    assert (finding.status, finding.detail) == ("failed", "the check itself failed: KeyError: 'none'")


def test_a_port_in_use_is_reported_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(machine, "SERVE_PORT", server.getsockname()[1])
        (finding,) = [each for each in machine.ports() if str(server.getsockname()[1]) in each.detail]
    assert (finding.status, finding.cure) == ("warning", "set another with plaudit serve --port")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    monkeypatch.chdir(tmp_path / "closed")
    _assert_not_writable()


def test_a_missing_temporary_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path / "gone"))
    (finding,) = [each for each in machine.disk() if each.status == "failed"]
    assert "No such file or directory" in finding.detail
    assert finding.cure == "set TMPDIR to a writable directory"


def _assert_not_writable() -> None:
    (finding,) = [each for each in machine.disk() if each.status == "failed"]
    assert "Permission denied" in finding.detail
    assert "--out" in finding.cure


def test_missing_and_outdated_packages_are_reported() -> None:
    requirements = ["none-of-this-name>=1", "msgspec>=999", "httpx>=0.1"]
    findings = list(machine._packages(requirements))
    assert [each.cure for each in findings if each.status == "failed"] == [
        "pip install 'none-of-this-name>=1'", "pip install 'msgspec>=999'",
    ]  # fmt: skip


def test_a_check_that_does_not_need_torch_does_not_import_it() -> None:
    code = (
        "import sys; sys.argv = ['plaudit', 'doctor', 'memory']\n"
        "from plaudit.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=240).returncode == 0


def test_it_runs_without_third_party_packages(tmp_path: Path) -> None:
    """Its purpose is to report them: the checks run in a Python with only the standard library."""
    code = f"import sys; sys.path.append({str(Path(doctor.__file__).parents[2])!r}); sys.argv = ['probe', 'versions']\n"
    code += "from plaudit.doctor.probe import main; main()"
    completed = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    findings = [Finding.of(line) for line in completed.stdout.splitlines()]
    assert {each.status for each in findings} & {"warning", "failed"}
    assert all(each.cure for each in findings if each.status != "ok")


def test_slow_and_broken_links_are_reported() -> None:
    from plaudit.doctor.rank import judged

    hosts = ["a", "a", "b", "b"]
    rates = [(0, 1, 9e9), (2, 3, 9e9), (0, 2, 1e9), (0, 3, 1e9), (1, 2, 0.2e9), (1, 3, 1e9)]
    findings = list(judged("gloo", rates, hosts, 4))
    assert [(each.status, each.detail) for each in findings] == [
        ("warning", "between rank 1 on a and rank 2 on b 0.20 GB/s, under half of 1.00 GB/s of others"),
        ("ok", "4 rank(s) on 2 machine(s): 6 pair(s), the slowest 1-2 at 0.20 GB/s"),
    ]
    broken = list(judged("nccl", [(0, 1, 0.0)], hosts[:2], 2))
    assert broken[0].detail == "between rank 0 on a and rank 1 on a corrupts data"
    assert "NCCL_SOCKET_IFNAME" in next(judged("nccl", rates, hosts, 4)).cure


def test_findings_of_other_machines_name_the_machine() -> None:
    line = Finding("disk", "failed", "full", "free some", host="b").line()
    assert line == "failed   disk      on b: full; free some"


@pytest.mark.slow
def test_devices_and_ranks_pass() -> None:
    """A matrix product is compared with double precision, and two real ranks are started."""
    completed = plaudit_here("doctor", "devices", "ranks", "--timeout", "280")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "products on the CPU are correct" in completed.stdout
    assert "gloo      2 rank(s) on 1 machine(s): 1 pair(s)" in completed.stdout
    assert set(CHECKS) > {"devices", "ranks"}
