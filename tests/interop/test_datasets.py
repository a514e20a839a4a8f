"""Data sets saved and read with Hugging Face's `datasets`, and the errors when loading fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.interop.environments import run_code

pytestmark = pytest.mark.interop

CODE = """
import json
from datasets import Dataset, DatasetDict
from plaudit.errors import DataError
from plaudit.train.data.hub_rows import dataset_rows

rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]
Dataset.from_list(rows).save_to_disk("ROOT/one")
DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:1])).save_to_disk("ROOT/two")
found = {}
for name in ("one?prompt=question", "two?split=test", "two?split=dev", "one?prompt=ask"):
    try:
        found[name] = list(dataset_rows(f"ROOT/{name}"))
    except DataError as error:
        found[name] = str(error)
try:
    found["hub"] = list(dataset_rows("hf:nobody/nothing@main?split=train"))
except DataError as error:
    found["hub"] = str(error)
print(json.dumps(found))
"""


def test_saved_data_sets_are_read_and_missing_ones_give_a_one_line_error(tmp_path: Path) -> None:
    results = json.loads(run_code(".venv-interop", CODE.replace("ROOT", str(tmp_path)), 400).splitlines()[-1])
    fields, origin = results["one?prompt=question"][2]
    assert fields == {"question": "2+1=", "answer": "3", "prompt": "2+1="}
    assert origin == f"{tmp_path}/one[3]"
    assert [row["answer"] for row, _ in results["two?split=test"]] == ["1"]
    assert "cannot load it" in results["two?split=dev"]
    assert "has no column 'ask'; there are question, answer" in results["one?prompt=ask"]
    assert results["hub"].startswith("hf:nobody/nothing@main?split=train: the package datasets cannot load it: ")
    assert "\n" not in results["hub"]
