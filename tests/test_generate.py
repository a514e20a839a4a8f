"""`plaudit generate` as a user meets it, on the embedded policy; tests/test_readme.py runs it from the shell."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from plaudit.errors import DataError
from plaudit.generate import given_prompts
from tests.command import plaudit_here


def generate(*arguments: str, model: str = "sums-policy") -> CompletedProcess[str]:
    return plaudit_here("generate", "--model", model, *arguments)


def test_one_prompt_prints_its_text() -> None:
    done = generate("7+8+4=", "--temperature", "0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "7+8=15;15+4=19;#19\n", "")


def test_several_samples_are_json_lines_and_the_seed_decides_them(tmp_path: Path) -> None:
    rows = [{"prompt": "7+8+4="}, {"messages": [{"role": "user", "content": "1+2+3="}]}]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "samples.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--input", str(prompts), "--n", "3", "--seed", "5", "--top-p", "0.9", "--stop", "#"]
    printed, written = generate(*options), generate(*options, "--out", str(out))
    assert printed.returncode == 0, printed.stderr
    assert (written.returncode, written.stdout) == (0, "")
    assert out.read_text() == printed.stdout
    samples = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [sample["index"] for sample in samples] == [0, 1, 2, 0, 1, 2]
    assert [{key: s[key] for key in ("prompt", "messages") if key in s} for s in samples] == [rows[0]] * 3 + [
        rows[1]
    ] * 3
    assert all(sample["finish_reason"] == "stop" and "#" not in sample["text"] for sample in samples)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1+2=", "--temperature", "-1"], "temperature is -1.0, and must be from 0 to 100"),
        (["1+2=", "--model", "sums"], "holds a reward model, expected a policy model"),
        (["--input", "{tmp}/bad.jsonl"], "bad.jsonl:1: not JSON"),
    ],
)
def test_what_a_user_can_mend_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{prompt}\n")
    done = generate(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("plaudit: ")
    assert done.stderr.count("\n") == 1


def test_refusals_come_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give either prompts or --input FILE"):
        given_prompts([], None)
    with pytest.raises(DataError, match="and not both"):
        given_prompts(["1+2="], tmp_path / "x.jsonl")
    with pytest.raises(DataError, match="no data file at"):
        given_prompts([], tmp_path / "none.jsonl")
