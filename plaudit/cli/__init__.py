"""The command line. Heavy imports are delayed until a command needs them, so that --help is quick.

A command is a function in the file of its group, registered with `app`.
"""

import os
import sys
from typing import Annotated

import typer

from plaudit.cli import judging, keys, models, planning, recipes, reporting, searching, serving, starting, training  # noqa: F401 (they register their commands)
from plaudit.cli.app import app
from plaudit.errors import PlauditError


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        from plaudit import __version__

        typer.echo(f"plaudit {__version__}")
        raise typer.Exit


def _refuse_windows() -> None:
    """Exit before importing anything that needs Unix, which would end in a traceback."""
    print(
        "plaudit: Windows lacks the processes, locks and limits that Plaudit needs: run it in WSL 2, or use "
        "plaudit-client with a server on another machine (docs/platforms.md)", file=sys.stderr,
    )  # fmt: skip
    sys.exit(PlauditError.exit_code)


def main() -> None:
    """Run a command. An error that a user can fix is one line and exit code 2, never a traceback."""
    if sys.platform == "win32":
        _refuse_windows()
    # Hide progress bars and hints of other libraries.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Torch's threads spin while they wait for each other. Beside other work on the same cores that made a small model
    # train thirty times slower; sleeping instead costs little when the cores are free.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app(standalone_mode=True)
    except PlauditError as error:
        print(f"plaudit: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except RuntimeError as error:
        from plaudit.models.gpu import memory_ran_out

        if (message := memory_ran_out(error)) is None:
            raise
        print(f"plaudit: {message}", file=sys.stderr)
        sys.exit(PlauditError.exit_code)
