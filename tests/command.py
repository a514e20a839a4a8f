"""Runs `plaudit` in this process: the same parsing and output, without the seconds a new process needs to import torch.

Behaviour that depends on signals, kernel limits or the shell needs a separate process; a command's output does not.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess

from plaudit.cli import main


def plaudit_here(*arguments: str, cwd: Path | None = None) -> CompletedProcess[str]:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    before, environment = sys.argv, dict(os.environ)
    sys.argv = ["plaudit", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd or Path.cwd()):
            code = _exit_code()
    finally:
        sys.argv = before
        os.environ.clear()
        os.environ.update(environment)
    stdout, stderr = (each.buffer.getvalue().decode() for each in (out, err))  # type: ignore[attr-defined]
    return CompletedProcess(arguments, code, stdout, stderr)


def _exit_code() -> int:
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0
