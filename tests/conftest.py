"""What holds for all tests: how random they are, in which order their files begin, how Triton runs without a GPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.browser import MISSING

if not torch.cuda.is_available():  # set before anything imports Triton: its kernels are interpreted
    os.environ["TRITON_INTERPRET"] = "1"

# As commands and servers set them, who read them when they start: so all workers can be forked from one process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# The same examples on every machine, however slow it is.
settings.register_profile("plaudit", deadline=None, derandomize=True)
settings.load_profile("plaudit")

# Begun last, one of these would run on alone while the other processes have nothing left to do.
LONGEST = (
    "train/test_embedded.py", "serve/test_faults.py", "serve/test_critic.py", "serve/test_security.py",
    "train/test_rl.py", "train/test_ranks.py", "train/test_remote_critic.py", "train/test_supervised.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`--no-loadscope-reorder` keeps this order where several processes share the files."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if MISSING in str(report.longrepr)]
    if MISSING and skipped:
        terminalreporter.write_line(f"skipped: {MISSING}", yellow=True)


@pytest.fixture(autouse=True)
def _in_the_repository() -> Iterator[None]:
    """Paths of the repository lead somewhere, also after a test that was broken off elsewhere."""
    root = Path(__file__).parent.parent
    yield
    os.chdir(root)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)
