"""The Python of the pages under docs/protocols runs as it stands there."""

from __future__ import annotations

import re

import pytest

from tests.interop.environments import ROOT, run_code
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.interop
PAGES = {
    "nemo-aligner": (".venv-pytriton", r"\[\[2\.06958\d*\s*\]\s+\[0\.05121\d*\s*\]\]"),
    "trl": (".venv-interop", r"train_runtime"),
    "verl": (".venv-interop", r"2\.0695\d*"),
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page(server: ServerProcess, page: str) -> None:
    environment, expected = PAGES[page]
    text = (ROOT / "docs" / "protocols" / f"{page}.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert "http://127.0.0.1:5555" in code
    assert re.search(expected, run_code(environment, code.replace("http://127.0.0.1:5555", server.url)))
