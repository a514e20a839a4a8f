"""The command line as a user runs it: real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import plaudit_here


def plaudit(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "plaudit", *arguments], capture_output=True, text=True, timeout=120, cwd=cwd
    )


def test_help_and_version() -> None:
    result = plaudit("--help")
    assert result.returncode == 0
    for verb in ("train", "report", "import"):
        assert verb in result.stdout
    assert plaudit("--version").stdout.startswith("plaudit 0.")
    assert plaudit().returncode != 0


def test_dry_run_prints_the_resolved_recipe_and_writes_nothing(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(Path("plaudit/recipes/sums-sft.toml").read_text())
    result = plaudit("train", str(recipe), "--set", "train.lr=0.125", "--dry-run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "lr = 0.125" in result.stdout
    assert 'schedule = "linear"' in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["r.toml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "plaudit/recipes/none.toml"], "no recipe at plaudit/recipes/none.toml"),
        (["train", "sums-sft", "--set", "train.stepz=1"], "did you mean 'steps'?"),
        (["train", "sums-sft", "--resume", "--fresh"], "exclude each other"),
        (["report", "{tmp}"], "is not a run directory"),
    ],
)
def test_user_error_is_one_line_with_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = plaudit(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.startswith("plaudit: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "sums-reward", "--set", "model.path=sums-polcy", "--out"], "no model 'sums-polcy'"),
        (["train", "sums-sft", "--set", "data.world=sum", "--out"], "did you mean 'sums'?"),
        (["import", "none.gguf"], "none.gguf"),
    ],
)
def test_missing_models_and_data_are_one_line_with_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    result = plaudit_here(*arguments, str(tmp_path / "out"))
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.startswith("plaudit: ")
    assert result.stderr.count("\n") == 1


HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "pyarrow", "ray", "triton", "uvicorn")


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["--help"], ["pydantic"]),
        (["recipes"], ["pydantic"]),
        (["train", "-h"], ["pydantic"]),
        (["plan", "--model", "llama-3.1-8b", "--hardware", "1x8xH100"], []),
    ],
    ids=lambda words: " ".join(words[:1]),
)
def test_informational_commands_import_no_heavy_module(words: list[str], more: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['plaudit', *{words!r}]\n"
        "from plaudit.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print('LOADED', *(name for name in {[*HEAVY, *more]!r} if name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "LOADED"
