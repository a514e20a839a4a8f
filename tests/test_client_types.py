"""The client's types, as mypy --strict reads them in code that is written like the guide's."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from plaudit import AsyncRewardClient, RewardClient
from plaudit.records import Item, Score, StepScores

with RewardClient("http://127.0.0.1:5555", model="sums") as client:
    total = sum(score.value or 0.0 for score in client.score([("1+2=", ["1+2=3;#3", "#4"])]))
    value: float | None = client.score(Item("1+2=", "#3")).value
    scores: list[Score] = client.score([Item("1+2=", "#3")], truncate="left")
    steps: list[StepScores] = client.score([{"prompt": "1+2=", "response": "#3"}], steps=True)
    last: float = client.score(Item("1+2=", "#3"), steps=True).values[-1]
    later: float | None = client.submit([("1+2=", "#3")]).result()[0].value

async def main(client: AsyncRewardClient, either: bool) -> None:
    first: float | None = (await client.score([("1+2=", "#3")]))[0].value
    value: float | None = (await client.score(Item("1+2=", "#3"))).value
    steps: list[StepScores] = await client.score([("1+2=", "#3")], steps=True)
    results: list[Score | StepScores] = await client.score([("1+2=", "#3")], steps=either)
"""


@pytest.mark.slow
def test_results_have_the_type_that_the_arguments_ask_for(tmp_path: Path) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(CODE)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout
