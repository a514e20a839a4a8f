"""Attempts to escape the sandbox of a rule, each by code that runs inside it; the rule names its mechanism."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from plaudit.config.reward import RuleTable
from plaudit.errors import ConfigError
from plaudit.records import Item, Score
from plaudit.reward.rules.rule import RuleReward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")

RUNS = """
import ctypes, fcntl, os, socket, subprocess, sys, threading, time

def run(prompt, response, truth):
    return eval(response)

def is_open(fd):
    try:
        return os.fstat(fd) and True
    except OSError:
        return False
"""
SECRET = "what nobody may read"
LIBC = "ctypes.CDLL(None, use_errno=True)"
FAILED = f"(lambda result: result if result >= 0 else 1 // 0)({LIBC}.%s)"  # a libc call that must not succeed
ATTEMPTS = {
    "read a file": "len(open('{secret}').read())",
    "read the accounts": "len(open('/etc/passwd').read())",
    "list a directory": "len(os.listdir('{home}'))",
    "write a file": "os.open('{mark}', os.O_CREAT | os.O_WRONLY)",
    "write to a file that is there": "os.open('{secret}', os.O_WRONLY)",
    "cut a file": "os.truncate('{secret}', 0) or 1",
    "remove a file": "os.unlink('{secret}') or 1",
    "rename a file": "os.rename('{secret}', '{mark}') or 1",
    "link a file": "os.link('{secret}', '{mark}') or 1",
    "change a file's mode": "os.chmod('{secret}', 0o777) or 1",
    "make a directory": "os.mkdir('{mark}') or 1",
    "connect": "socket.create_connection(('127.0.0.1', {port})) and 1",
    "send a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "connect to a local socket": "socket.socket(socket.AF_UNIX) and 1",
    "a socket by its number": FAILED % "syscall({socket}, 2, 1, 0)",
    "fork bomb": "[os.fork() for _ in iter(int, 1)]",
    "threads without end": "[threading.Thread(target=time.sleep, args=(9,)).start() for _ in iter(int, 1)]",
    "run a program": "subprocess.run(['touch', '{mark}']).returncode + 1",
    "become a program": "os.execv('/bin/touch', ['touch', '{mark}'])",
    "kill the parent": "os.kill(os.getppid(), 9) or 1",
    "kill the one who asks": "os.kill({asker}, 9) or 1",
    "kill everything": "os.kill(-1, 9) or 1",
    "signals by a pipe": "[fcntl.fcntl(fd, fcntl.F_SETOWN, {asker}) for fd in (0, 1, 2)] and 1",
    "debug the one who asks": FAILED % "ptrace(16, {asker}, 0, 0)",
    "memory of the one who asks": FAILED % "process_vm_readv({asker}, 0, 0, 0, 0, 0)",
    "environment of the one who asks": "len(open('/proc/{asker}/environ').read())",
    "its own environment": "len(open('/proc/self/environ').read())",
    "environment of Python": "float(os.environ['PLAUDIT_TEST_SECRET'])",
    "limits of the one who asks": FAILED % "syscall({prlimit}, {asker}, 7, ctypes.byref(ctypes.c_uint64(0)), None)",
    "other name spaces": FAILED % "unshare(0x10000000)",
    "another user": "os.setuid(0) or 1",
    "a file in memory": "os.memfd_create('x')",
    "memory without end": "len([bytearray(1 << 28) for _ in iter(int, 1)])",
    "time without end": "[None for _ in iter(int, 1)]",
    "output flood": "[os.write(fd, b'x' * 4096) for _ in iter(int, 1) for fd in range(3, 9) if is_open(fd)]",
    "a message without end": "(_ for _ in ()).throw(ValueError('x' * (1 << 26)))",
}  # fmt: skip
NUMBERS = {"x86_64": {"socket": 41, "prlimit": 302}, "aarch64": {"socket": 198, "prlimit": 261}}


@dataclass
class Prison:
    rule: RuleReward
    secret: Path
    mark: Path
    listener: socket.socket

    def run(self, code: str) -> float | str:
        (result,) = self.rule.score([Item(prompt="", response=code)])
        assert isinstance(result, Score)
        if result.error is None:
            assert result.value is not None
            return result.value
        assert len(result.error.message) < 400
        return f"{result.error.type}: {result.error.message}"

    def fill(self, code: str) -> str:
        values = {
            **NUMBERS[platform.machine()], "secret": self.secret, "home": self.secret.parent, "mark": self.mark,
            "port": self.listener.getsockname()[1], "asker": os.getpid(),
        }  # fmt: skip
        for name, value in values.items():
            code = code.replace(f"{{{name}}}", str(value))
        return code


@pytest.fixture(scope="module")
def prison(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prison]:
    home = tmp_path_factory.mktemp("home")
    (home / "runs.py").write_text(RUNS)
    secret = home / "secret"
    secret.write_text(SECRET)
    os.environ["PLAUDIT_TEST_SECRET"] = "1"
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    rule = RuleReward(RuleTable(rule="function", function=f"{home / 'runs.py'}:run", timeout=2.0), exposed=True)
    try:
        yield Prison(rule, secret, home / "mark", listener)
    finally:
        rule.close()
        listener.close()
        del os.environ["PLAUDIT_TEST_SECRET"]


@pytest.mark.parametrize("name", ATTEMPTS)
def test_escape_attempt_fails_and_has_no_effect(prison: Prison, name: str) -> None:
    children = len(psutil.Process().children(recursive=True))
    before = prison.secret.stat()
    result = prison.run(prison.fill(ATTEMPTS[name]))
    assert isinstance(result, str), f"{name} came through {prison.rule.mechanism}: {result}"
    assert result.partition(":")[0] in ("rule_failed", "timeout"), result
    assert not prison.mark.exists()
    after = prison.secret.stat()
    assert (prison.secret.read_text(), after.st_mode, after.st_nlink) == (SECRET, before.st_mode, 1)
    with pytest.raises(BlockingIOError):
        prison.listener.accept()
    assert len(psutil.Process().children(recursive=True)) <= children + 1  # one child replaces the last one
    assert prison.run("1 + 1") == 2.0, f"{prison.rule.mechanism} does not let the rule go on"


def test_mechanism_is_named_and_late_imports_work(prison: Prison) -> None:
    assert prison.rule.mechanism in ("seccomp and Landlock", "seccomp, without file access")
    if "Landlock" in prison.rule.mechanism:
        assert prison.run("len(__import__('xml.dom.minidom').__name__)") == 3.0


def test_users_own_function_runs_without_the_sandbox(prison: Prison) -> None:
    rule = RuleReward(RuleTable(rule="function", function=f"{prison.secret.parent / 'runs.py'}:run"))
    try:
        (score,) = rule.score([Item(prompt="", response=prison.fill(ATTEMPTS["read a file"]))])
    finally:
        rule.close()
    assert rule.mechanism == ""
    assert isinstance(score, Score)
    assert score.value == len(SECRET)


# Simulates a kernel without a system call: a filter rejects it. argv: its number, its first argument or -1, the rule
WITHOUT = """
import ctypes, struct, sys
from plaudit.process import sandbox as s
number, first = map(int, sys.argv[1:3])
libc = ctypes.CDLL(None, use_errno=True)
program = [s._bpf(s.LOAD, s.NUMBER_AT), s._bpf(s.EQUAL, number, 0, 3)]
program += [s._bpf(s.LOAD, 16), s._bpf(s.EQUAL, first, 0, 1)] if first >= 0 else [s._bpf(s.RETURN, 0x50026)] * 2
program += [s._bpf(s.RETURN, 0x50016 if first >= 0 else 0x50026), s._bpf(s.RETURN, s.ALLOW)]
code = ctypes.create_string_buffer(b"".join(program))
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, struct.pack("@HP", len(program), ctypes.addressof(code)), 0, 0) == 0
from plaudit.config.reward import RuleTable
from plaudit.errors import ConfigError
from plaudit.records import Item
from plaudit.reward.rules.rule import RuleReward
own = sys.argv[3] == "exact"
table = RuleTable(rule="exact") if own else RuleTable(rule="function", function=sys.argv[3])
try:
    rule = RuleReward(table, exposed=not own)
except ConfigError as error:
    print(error)
else:
    texts = ("1 + 1", "open('/etc/passwd').read()", "os.listdir('/')")
    scores = rule.score([Item(prompt="", response=text, truth="1 + 1") for text in texts])
    print(rule.mechanism, [s.error.message if s.error else s.value for s in scores])
    rule.close()
"""


def without(number: int, first: int, rule: str) -> str:
    arguments = [sys.executable, "-c", WITHOUT, str(number), str(first), rule]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_without_landlock_no_file_is_opened(prison: Prison) -> None:
    output = without(444, -1, f"{prison.secret.parent / 'runs.py'}:run")
    assert output.startswith("seccomp, without file access [2.0, ")
    assert output.count("Permission denied") == 2


def test_without_seccomp_an_exposed_function_is_rejected(prison: Prison) -> None:
    prctl = {"x86_64": 157, "aarch64": 167}[platform.machine()]
    output = without(prctl, 22, f"{prison.secret.parent / 'runs.py'}:run")
    assert "cannot start: this machine has no sandbox (seccomp: Invalid argument); sandbox = false" in output
    assert without(prctl, 22, "exact") == "[1.0, 0.0, 0.0]", "what compares texts runs, where nobody else is served"


def test_gym_rule_on_a_server_needs_tasks() -> None:
    with pytest.raises(ConfigError, match=r'rule = "gym" on a server needs tasks = '):
        RuleReward(RuleTable(rule="gym"), exposed=True)


@pytest.mark.slow
def test_sandbox_processes_exit_when_the_parent_is_killed(prison: Prison) -> None:
    script = (
        "import sys, threading, time\nfrom plaudit.config.reward import RuleTable\nfrom plaudit.records import Item\n"
        "from plaudit.reward.rules.rule import RuleReward\n"
        "rule = RuleReward(RuleTable(rule='function', function=sys.argv[1], timeout=10.0), exposed=True)\n"
        "threading.Thread(target=rule.score, args=([Item(prompt='', response='time.sleep(1000)')],)).start()\n"
        "print('asked', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, f"{prison.secret.parent / 'runs.py'}:run"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    deadline = time.monotonic() + 60
    while len(family := psutil.Process(process.pid).children(recursive=True)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(family) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 60
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family):
        assert time.monotonic() < deadline
        time.sleep(0.05)
