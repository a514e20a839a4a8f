"""A child that runs the commands it reads from its socket, for tests of how children start and end."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.process.spawn import spawn


def main(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    for line in sock.makefile():
        match json.loads(line):
            case ["facts"]:
                reply(sock, facts(fd))
            case ["exit", code]:
                sys.exit(code)
            case ["raise"]:
                raise ValueError("a bug")
            case ["child"]:
                child, theirs = spawn("tests.process.child")
                theirs.sendall(b'["facts"]\n')
                theirs.makefile().readline()
                reply(sock, child.pid)
            case ["sleep"]:
                time.sleep(600)


def reply(sock: socket.socket, value: Any) -> None:
    sock.sendall(json.dumps(value).encode() + b"\n")


def facts(fd: int) -> dict[str, Any]:
    open_sockets = [
        int(each.name)
        for each in Path("/proc/self/fd").iterdir()
        if each.is_symlink() and "socket" in str(each.readlink())
    ]
    return {
        "pid": os.getpid(), "group": os.getpgrp(), "directory": str(Path.cwd()), "own": os.environ.get("OWN"),
        "draws": [random.random(), float(np.random.random())], "sockets": len(open_sockets),
        "argv": sys.argv[1:3], "name": Path("/proc/self/comm").read_text().strip(),
    }  # fmt: skip
