"""Settings for all tests: random seeds, the order of test files, and running Triton without a GPU."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Many processes import the same files: share compiled bytecode regardless of the environment.
KEEPS_BYTECODE = not sys.dont_write_bytecode
sys.dont_write_bytecode = False

from plaudit.events import read_lines  # noqa: E402
from plaudit.metrics import undescribed  # noqa: E402
from tests.browser import MISSING  # noqa: E402
from tests.rotation import DAY, SHARES, in_turn  # noqa: E402

if not torch.cuda.is_available():  # set before anything imports Triton, so that its kernels are interpreted
    os.environ["TRITON_INTERPRET"] = "1"

# Commands and servers set these; they are read at start-up, so all workers can be forked from one process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# The same examples on every machine, regardless of its speed.
settings.register_profile("plaudit", deadline=None, derandomize=True)
settings.load_profile("plaudit")

# A much slower machine skips the tests that do not fit into its stage's time, and lists them.
BEGIN = time.monotonic()
MINUTES = float(os.environ.get("PLAUDIT_MINUTES") or 0)
OUT_OF_TIME = "the stage has used its minutes (PLAUDIT_MINUTES)"

SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())

# Longest first, those of the slow stage before those of the fast one. Started last, one of these would run alone while
# the other processes are idle.
LONGEST = (
    "train/test_ranks.py", "models/test_gguf_import.py", "place/test_placements.py", "tests/test_docs_slow.py",
    "tests/test_chains.py", "place/test_rollout_faults.py", "serve/test_ranks.py", "train/test_embedded.py",
    "place/test_served.py", "serve/test_faults.py", "serve/test_critic.py", "train/test_rl.py",
    "serve/test_security.py", "train/test_remote_critic.py", "serve/test_overload.py", "train/test_supervised.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before `-m` evaluates markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--no-loadscope-reorder` keeps this order when several processes share the files."""
    for item in items:
        if not SLOW.isdisjoint({item.nodeid, item.nodeid.partition("[")[0]}):
            item.add_marker("slow")
    slow = [item for item in items if item.get_closest_marker("slow")] if SHARES > 1 else []
    left_out = {item for number, item in enumerate(slow) if not in_turn(number, SHARES)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: next((n for n, file in enumerate(LONGEST) if _is(item, file)), len(LONGEST)))


def _is(item: pytest.Item, file: str) -> bool:
    return item.path.as_posix().endswith(file)


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = not KEEPS_BYTECODE


def pytest_runtest_setup() -> None:
    if MINUTES and time.monotonic() > BEGIN + 60 * MINUTES:
        pytest.skip(OUT_OF_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SHARES > 1:
        terminalreporter.write_line(f"one of {SHARES} shares of the slow tests: PLAUDIT_DAY={DAY % SHARES}")
    reports = terminalreporter.stats.get("skipped", [])
    if late := [report.nodeid for report in reports if OUT_OF_TIME in str(report.longrepr)]:
        names = "\n  ".join(late)
        terminalreporter.write_line(f"NOT RUN, for the stage had used its {MINUTES} minutes:\n  {names}", red=True)
    skipped = [report for report in reports if MISSING in str(report.longrepr)]
    if MISSING and skipped:
        terminalreporter.write_line(f"skipped: {MISSING}", yellow=True)


@pytest.fixture(autouse=True)
def _in_the_repository() -> Iterator[None]:
    """Makes paths relative to the repository work, also after a test that was interrupted elsewhere."""
    root = Path(__file__).parent.parent
    yield
    os.chdir(root)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The random draws of a test do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _metrics_are_described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every metric in the training runs of a test file is in plaudit/metrics.py, from which the reference page is
    generated. A real run has its recipe beside its log and begins with a plan; synthetic logs do not."""
    before = {*tmp_path_factory.getbasetemp().iterdir()}
    yield
    new = [path for path in tmp_path_factory.getbasetemp().iterdir() if path.is_dir() and path not in before]
    for log in (log for path in new for log in path.rglob("events*.jsonl") if (log.parent / "recipe.toml").exists()):
        events = list(read_lines(log))
        if any(event["kind"] == "plan" for event in events):
            names = {name for event in events if event["kind"] == "metric" for name in event["values"]}
            assert not undescribed(names), f"{log}: add a line to plaudit/metrics.py and run python docs/metrics.py"
