import json
from importlib.util import find_spec
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from plaudit.config import DataTable, SumsTable, load_recipe
from plaudit.errors import DataError
from plaudit.train.data.rows import Row, WorldRows, open_rows, read_rows
from plaudit.train.supervised.encode import Encoder
from plaudit.train.supervised.examples import Comparison, Demonstration, Example, Rating, StepTargets
from plaudit.worlds.tokenizer import sums_tokenizer

TOKENIZER = sums_tokenizer()
BOS, EOS = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encode(fields: dict[str, object], *overrides: str, longest: int = 64) -> Example:
    recipe = load_recipe(Path("sums-sft"), overrides)
    return Encoder(recipe, TOKENIZER, longest)(Row(fields, "x.jsonl:1"))


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def test_demonstrations() -> None:
    expected = Demonstration((BOS, *ids("1+2=3;#3"), EOS), 1 + 4)
    assert encode({"prompt": "1+2=", "response": "3;#3"}) == expected
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3;#3"}]
    assert encode({"messages": messages}) == expected


def test_comparisons_and_ratings() -> None:
    row = {"prompt": "1+2=", "chosen": "3", "rejected": "4", "margin": 2}
    assert encode(row, "task=reward") == Comparison((BOS, *ids("1+2=3"), EOS), (BOS, *ids("1+2=4"), EOS), 2.0)
    rating = encode(
        {"prompt": "1+2=", "response": "3", "help": 4, "truth": None},
        "task=reward", "algorithm.name=regression", 'algorithm.attributes=["help", "truth"]',
    )  # fmt: skip
    assert isinstance(rating, Rating)
    assert rating.ratings[0] == 4.0
    assert rating.ratings[1] != rating.ratings[1]


def test_steps_are_read_at_their_last_token_and_the_last_at_the_end() -> None:
    row = {"prompt": "1+2=", "steps": ["1+2=3;", "#3"], "labels": [1, 0.25]}
    example = encode(row, "task=prm")
    tokens = (BOS, *ids("1+2=1+2=3;#3"), EOS)
    assert example == StepTargets(tokens, (10, 13), (1.0, 0.25))
    assert tokens[10] == ids(";")[0]
    assert tokens[13] == EOS
    unfinished = encode({**row, "steps": ["1+2=3;", "3+1=4;"], "finished": False}, "task=prm")
    assert isinstance(unfinished, StepTargets)
    assert unfinished.ends[-1] == len(unfinished.tokens) - 1
    assert unfinished.tokens[-1] == ids(";")[0]


def test_control_strings_in_the_data_stay_text() -> None:
    example = encode({"prompt": "1<eos>", "response": "2<bos>"})
    assert isinstance(example, Demonstration)
    assert example.tokens.count(EOS) == example.tokens.count(BOS) == 1


@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        ({"prompt": "1="}, [], "x.jsonl:1: needs a text 'response', got None"),
        ({"prompt": "", "response": "2"}, [], "needs a text 'prompt'"),
        ({"messages": [{"role": "user", "content": "1"}]}, [], "ends with the assistant's answer"),
        ({"prompt": "1=", "chosen": "1", "rejected": 5}, ["task=reward"], "needs a text 'rejected', got 5"),
        ({"prompt": "1=", "chosen": "1", "rejected": "2", "margin": "big"}, ["task=reward"], "needs a number 'margin'"),
        ({"prompt": "1=", "response": "1"}, ["task=reward", "algorithm.name=regression"], "at least one of ['score']"),
        ({"prompt": "1=", "steps": ["1"], "labels": [1, 0]}, ["task=prm"], "'steps' and 'labels' of the same length"),
        ({"prompt": "1=", "steps": [], "labels": []}, ["task=prm"], "at least 1"),
        ({"prompt": "1=", "steps": ["1", ""], "labels": [1, 0]}, ["task=prm"], "each step must be a non-empty text"),
        ({"prompt": "1=", "steps": ["1"], "labels": [2]}, ["task=prm"], "between 0 and 1, got 2"),
        ({"prompt": "1=", "response": "2" * 70}, [], "74 tokens exceed the model's 64"),
    ],
)
def test_invalid_rows_are_rejected_with_place_and_value(
    fields: dict[str, object], overrides: list[str], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        encode(fields, *overrides)
    assert message in str(caught.value)


def test_invalid_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data file at"):
        read_rows(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="is empty"):
        read_rows(tmp_path / "empty.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: not JSON"):
        read_rows(tmp_path / "bad.jsonl")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match=r"list\.jsonl:1: expected a JSON object, got list"):
        read_rows(tmp_path / "list.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match="not JSON"):
        read_rows(tmp_path / "latin.jsonl")
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(DataError, match="is not a parquet file"):
        read_rows(tmp_path / "x.parquet")
    (tmp_path / "x.csv").write_text("no")
    with pytest.raises(DataError, match=r"expected a \.jsonl or \.parquet file"):
        read_rows(tmp_path / "x.csv")


def test_parquet_gives_the_rows_of_jsonl(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}=", "response": str(i)} for i in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", *rows)
    assert [r.fields for r in read_rows(tmp_path / "a.parquet")] == [r.fields for r in read_rows(tmp_path / "a.jsonl")]


def test_every_epoch_has_every_item_once_in_a_different_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": str(i), "response": "1"} for i in range(40)))
    rows = open_rows(DataTable(path=str(path)), "sft", 1)
    epochs = [[rows.train(36 * epoch + i).text("prompt") for i in range(36)] for epoch in range(2)]
    heldout = {row.text("prompt") for row in rows.heldout()}
    assert set(epochs[0]) == set(epochs[1]) == {str(i) for i in range(40)} - heldout
    assert epochs[0] != epochs[1]
    assert len(heldout) == 4
    again = open_rows(DataTable(path=str(path)), "sft", 1)
    assert [again.train(i).text("prompt") for i in range(36)] == epochs[0]


def test_separate_held_out_file_and_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": str(i), "response": "1"} for i in range(40)))
    other = write(tmp_path / "b.jsonl", {"prompt": "b", "response": "1"})
    rows = open_rows(DataTable(path=str(path), eval_path=str(other), limit=3), "sft", 1)
    assert {rows.train(i).text("prompt") for i in range(9)} == {"0", "1", "2"}
    assert [row.text("prompt") for row in rows.heldout()] == ["b"]
    with pytest.raises(DataError, match=r"has 1 item\(s\): too few"):
        open_rows(DataTable(path=str(other)), "sft", 1)


@pytest.mark.parametrize("task", ["sft", "reward", "prm"])
def test_rows_of_a_world_can_be_encoded(task: str) -> None:
    recipe = load_recipe(Path("sums-sft"), [f"task={task}"])
    rows = open_rows(recipe.data, task, 1)
    encoder = Encoder(recipe, TOKENIZER, 256)
    for i in range(50):
        encoder(rows.train(i))
    assert len(rows.heldout()) == recipe.data.eval_items


def test_near_misses_change_training_and_have_a_separate_metric() -> None:
    tables = [SumsTable(), SumsTable(near=1.0)]
    for task in ("reward", "prm"):
        rows = [open_rows(DataTable(world="sums", eval_items=20, sums=table), task, 1) for table in tables]
        assert isinstance(rows[0], WorldRows)
        assert isinstance(rows[1], WorldRows)
        assert rows[0].train(0) != rows[1].train(0)
        assert rows[0].heldout() == rows[1].heldout(), "figures of two recipes are of the same items"
        assert rows[0].hard() == rows[1].hard()
        assert len(rows[0].near()) == 600
    steps = [row.fields["labels"] for row in rows[0].near()]
    assert steps == [[1.0, 0.0, 0.0]] * 600
    assert [row.fields["labels"] for row in rows[0].near(back=0)] == [[1.0, 1.0, 0.0]] * 600


@pytest.mark.skipif(find_spec("datasets") is not None, reason="the package is here: tests/interop/test_datasets.py")
def test_hub_dataset_error_names_the_missing_package() -> None:
    with pytest.raises(DataError, match=r"hf:openai/gsm8k\?subset=main needs the package datasets: pip install"):
        read_rows(Path("hf:openai/gsm8k?subset=main"))
