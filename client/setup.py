"""Makes the package `plaudit_client` of Plaudit's own files, so that there is one source of both.

In a clone the files are in ../plaudit. In a source distribution they have been made already.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
SOURCE, MADE = HERE.parent / "plaudit", HERE / "plaudit_client"
FOLDERS = ("client", "integrations")
LEFT_OUT = ("in_process.py",)  # runs a reward in the same process, which needs all of Plaudit
NAMES = re.compile(r"\bplaudit([./])(?=(?:client|integrations|errors|records)\b)")
FIRST = '''"""The client of Plaudit's reward server."""

from plaudit_client.client.client import AsyncRewardClient, RewardClient
from plaudit_client.records import Item, ItemError, Score, StepScores

__version__ = "{version}"
__all__ = ["AsyncRewardClient", "Item", "ItemError", "RewardClient", "Score", "StepScores", "__version__"]
'''


def make() -> None:
    shutil.rmtree(MADE, ignore_errors=True)
    files = [SOURCE / "errors.py", SOURCE / "records.py"]
    files += [
        file for folder in FOLDERS for file in sorted((SOURCE / folder).glob("*.py")) if file.name not in LEFT_OUT
    ]
    for file in files:
        target = MADE / file.relative_to(SOURCE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(NAMES.sub(r"plaudit_client\1", file.read_text(encoding="utf-8")), encoding="utf-8")
    version = re.search(r'^version = "(.+)"$', (HERE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    (MADE / "__init__.py").write_text(FIRST.format(version=version[1]), encoding="utf-8")
    (MADE / "py.typed").touch()


if SOURCE.is_dir():
    make()
setup()
