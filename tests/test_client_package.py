"""plaudit-client: built from this tree, and used without Plaudit or torch installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.serve.scripted import Scripted

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
# Simulates an environment with httpx and msgspec but none of Plaudit's other dependencies.
ALONE = """
import importlib.abc, sys
sys.path[:0] = [{package!r}]
sys.path.append({site!r})
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
"""
BLOCKED = ("plaudit", "torch", "transformers", "tokenizers", "numpy", "pydantic", "uvicorn", "safetensors", "pyarrow")


def built(kind: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return out / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as by a package index."""
    root = tmp_path_factory.mktemp("client")
    ignored = shutil.ignore_patterns("__pycache__", "plaudit_client", "*.egg-info", "build")
    shutil.copytree(ROOT / "client", root / "tree" / "client", ignore=ignored)
    for name in ("client", "integrations"):
        shutil.copytree(ROOT / "plaudit" / name, root / "tree" / "plaudit" / name, ignore=ignored)
    for name in ("errors.py", "records.py"):
        shutil.copy(ROOT / "plaudit" / name, root / "tree" / "plaudit" / name)
    with tarfile.open(built("build_sdist", root / "tree" / "client", root)) as archive:
        archive.extractall(root / "sdist", filter="data")
    (unpacked,) = (root / "sdist").iterdir()
    return built("build_wheel", unpacked, root)


def run_isolated(wheel: Path, code: str) -> str:
    package = wheel.parent / "package"
    if not package.exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(package)
    preamble = ALONE.format(package=str(package), site=sysconfig.get_path("purelib"), blocked=BLOCKED)
    command = [sys.executable, "-I", "-S", "-c", preamble + code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


def test_wheel_has_every_module_and_they_load_without_plaudit(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("plaudit_client/")}
    expected = {
        f"plaudit_client/{file.relative_to(ROOT / 'plaudit')}"
        for folder in ("client", "integrations") for file in (ROOT / "plaudit" / folder).glob("*.py")
        if file.name != "in_process.py"
    }  # fmt: skip
    extra = {f"plaudit_client/{name}" for name in ("__init__.py", "errors.py", "records.py", "py.typed")}
    assert names == expected | extra
    python = {name for name in names if name.endswith(".py")} - {"plaudit_client/integrations/nemo_rl.py"}
    modules = sorted(
        name.removesuffix(".py").replace("/", ".") for name in python
    )  # nemo_rl.py is excluded: it imports NeMo RL
    run_isolated(
        wheel, f"import importlib\nfor name in {modules!r}: importlib.import_module(name.removesuffix('.__init__'))"
    )


def test_client_depends_only_on_httpx_and_msgspec_and_what_httpx_looks_for() -> None:
    project = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["httpx>=0.24", "msgspec>=0.18", "sniffio>=1.3"]
    assert project["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_client_and_its_reward_functions_score_over_http(wheel: Path) -> None:
    with Scripted() as server:
        code = f"""
from plaudit_client import RewardClient
with RewardClient({server.url!r}, model="sums") as client:
    print([score.value for score in client.score([{{"prompt": "x", "responses": ["2.5", "-1"]}}])])
from plaudit_client.integrations.verl import compute_score_sync
print(compute_score_sync("d", "7", "t", {{"prompt": "x"}}, url={server.url!r}, model="sums"))
from plaudit_client.integrations.trl import RemoteReward
print(RemoteReward({server.url!r}, model="sums")(["x"], ["3"]))
"""
        assert run_isolated(wheel, code).splitlines() == ["[2.5, -1.0]", "7.0", "[3.0]"]
    assert [request.body["model"] for request in server.asked] == ["sums"] * 3
