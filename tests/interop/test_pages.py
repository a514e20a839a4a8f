"""The Python code of the pages under docs/protocols runs unchanged."""

from __future__ import annotations

import re

import pytest

from tests.interop.environments import ROOT, run_code
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.interop
NUMBER = re.compile(r"-?\d+\.\d+")


def run_page(server: ServerProcess, page: str, environment: str) -> tuple[str, str]:
    """The page's code and its output."""
    text = (ROOT / "docs" / "protocols" / f"{page}.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert "http://127.0.0.1:5555" in code
    return code, run_code(environment, code.replace("http://127.0.0.1:5555", server.url))


@pytest.mark.parametrize(("page", "environment"), [("nemo-aligner", ".venv-pytriton"), ("verl", ".venv-interop")])
def test_page_code_prints_the_documented_output(server: ServerProcess, page: str, environment: str) -> None:
    code, printed = run_page(server, page, environment)
    expected = [float(number) for number in NUMBER.findall(code.rpartition("#")[2])]
    assert expected
    assert [float(number) for number in NUMBER.findall(printed)] == pytest.approx(expected, rel=1e-3)


def test_code_of_the_trl_page_trains(server: ServerProcess) -> None:
    assert "train_runtime" in run_page(server, "trl", ".venv-interop")[1]
