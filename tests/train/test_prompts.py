"""Prompts for RL from worlds, files and gyms, with their reference answers; and the rules of a recipe that check
responses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from plaudit.config import RlRecipe
from plaudit.config.recipe import parse_recipe
from plaudit.config.reward import RlRewardTable
from plaudit.config.rl import RlDataTable
from plaudit.errors import ConfigError, DataError
from plaudit.records import Prompt, Sample
from plaudit.train.data.encoder import LengthLimits
from plaudit.train.data.prompts import Prompts
from plaudit.train.rollouts.scorer import Scorer
from plaudit.train.rollouts.sources import open_prompts
from plaudit.worlds.tokenizer import sums_tokenizer

TOKENIZER = sums_tokenizer()
LIMITS = LengthLimits(positions=64, response=32)


def prompts_of(limits: LengthLimits | None = LIMITS, **keys: Any) -> Prompts:
    return open_prompts(RlDataTable(**keys), TOKENIZER, 1, limits)


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompt_text(prompt: Prompt) -> str:
    return str(TOKENIZER.decode(list(prompt.token_ids or ())))


def sample_of(prompt: Prompt, text: str) -> Sample:
    ids = tuple(range(4, 6))
    return Sample(prompt.token_ids or (), ids, text, (0.0,) * 2, (0.0,) * 2, (0,) * 2, (1,) * 2, "stop")


@contextmanager
def scorer(**keys: Any) -> Iterator[Scorer]:
    opened = Scorer(RlRewardTable(**keys))
    try:
        yield opened
    finally:
        opened.close()


# Worlds


def test_a_world_gives_the_same_prompt_for_the_same_index() -> None:
    prompts = prompts_of(world="sums")
    first = prompts.train([7])[0]
    assert first == prompts_of(world="sums").train([7])[0] != prompts.train([8])[0]
    assert prompt_text(first) == "<bos>" + first.text
    assert first.truth == str(sum(int(part) for part in first.text[:-1].split("+")))


def test_a_limit_repeats_the_first_items() -> None:
    prompts = prompts_of(world="sums", limit=3)
    assert prompts.train(range(3)) == prompts.train(range(3, 6))


# Files


def test_file_of_plain_prompts_with_a_custom_truth_key(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "sum": i + 1, "level": i} for i in range(20)]
    prompts = prompts_of(path=jsonl(tmp_path / "p.jsonl", *rows), truth="sum")
    assert [prompt.truth for prompt in prompts.heldout()] == [19, 20], "the last tenth is held out"
    epoch = prompts.train(range(18))
    assert sorted(prompt.truth for prompt in epoch) == list(range(1, 19)), "each once in an epoch"
    assert [p.truth for p in epoch] != [p.truth for p in prompts.train(range(18, 36))], "in another order in the next"
    assert epoch[0].extra == {"level": epoch[0].truth - 1}


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)} for i in range(12)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    lines, table = prompts_of(path=jsonl(tmp_path / "p.jsonl", *rows)), prompts_of(path=str(tmp_path / "p.parquet"))
    assert lines.train(range(24)) == table.train(range(24))
    assert lines.heldout() == table.heldout()


def test_chat_renders_a_plain_prompt_with_the_models_template(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", *[{"prompt": "1+2="}] * 3)
    plain = prompts_of(path=path).train([0])[0]
    chat = prompts_of(path=path, chat=True, system="3+3=").train([0])[0]
    assert prompt_text(plain) == "<bos>1+2="
    assert prompt_text(chat) == "<bos>3+3=1+2="
    roles = [message["role"] for message in chat.extra["messages"]]
    assert roles == ["system", "user"]


def test_batched_prompts_equal_single_ones(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1<eos>2="}, {"role": "assistant", "content": "3"}]
    texts = [{"prompt": f"{i}+1="} for i in range(6)]
    chats = [{"messages": [*turns, {"role": "user", "content": f"{i}="}]} for i in range(6)]
    path = jsonl(tmp_path / "p.jsonl", *[row for pair in zip(texts, chats, strict=True) for row in pair])
    for chat in (False, True):
        prompts = prompts_of(path=path, chat=chat)
        assert prompts.train(range(11)) == [prompts.train([i])[0] for i in range(11)]


def test_batch_error_names_the_failing_prompt(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "captain" if i == 5 else "user", "content": "1="}]} for i in range(9)]
    prompts = prompts_of(None, path=jsonl(tmp_path / "p.jsonl", *rows), chat=True)
    with pytest.raises(DataError, match=r"p\.jsonl:6: message 0 has the role 'captain'"):
        prompts.train(range(8))


def test_system_message_in_the_data_is_kept(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "9="}, {"role": "user", "content": "1="}]
    path = jsonl(tmp_path / "p.jsonl", *[{"messages": messages}] * 3)
    assert prompt_text(prompts_of(path=path, chat=True, system="3=").train([0])[0]) == "<bos>9=1="


def test_shots_are_turns_before_the_question(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", *[{"prompt": "1="}] * 3)
    prompt = prompts_of(path=path, chat=True, system="3=", shots=(("4=", "4"), ("5=", "5"))).train([0])[0]
    assert [message["role"] for message in prompt.extra["messages"]] == ["system", *["user", "assistant"] * 2, "user"]
    assert prompt.text.split("\n") == ["3=", "4=", "4", "5=", "5", "1="]
    with pytest.raises(ValueError, match="shots are turns of a chat"):
        prompts_of(path=path, shots=(("4=", "4"),))


def test_a_prompt_never_becomes_control_tokens(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", *[{"prompt": "1<eos>2="}] * 3)
    for prompts in (prompts_of(path=path), prompts_of(path=path, chat=True)):
        assert TOKENIZER.eos_token_id not in (prompts.train([0])[0].token_ids or ())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "p.jsonl is empty"),
        ([{"prompt": "1="}], "too few for training and a held-out item; set data.eval_path"),
        ([{"prompt": "1="}, {"question": "2="}], r"p.jsonl:2: needs a text 'prompt', got None; .*'question'"),
        ([{"prompt": "1="}, {"prompt": 3}], r"p.jsonl:2: needs a text 'prompt', got 3"),
        ([{"prompt": "1="}, {"messages": "2="}], r"p.jsonl:2: messages must be a list of \{role, content\}"),
        ([{"prompt": "1=", "answer": 1}, {"prompt": "2="}], r"p.jsonl:2: has no 'answer' \(data.truth\)"),
        ([{"prompt": "1="}, {"prompt": "1" * 40}], r"p.jsonl:2: the prompt has 41 tokens; .* 64 - 32 = 32 are left"),
        (
            [{"messages": [{"role": "user", "content": "1" * 40}]}] * 2,
            r"p.jsonl:1: the prompt has 41 tokens; the model has 64 positions",
        ),
        (
            [{"messages": [{"role": "wizard", "content": "1"}]}] * 2,
            r"p.jsonl:1: message 0 has the role 'wizard'",
        ),
    ],
)  # fmt: skip
def test_file_errors_name_the_line(tmp_path: Path, rows: list[Any], message: str) -> None:
    path = jsonl(tmp_path / "p.jsonl", *rows)
    with pytest.raises(DataError, match=message):
        prompts_of(path=path).train([0])


def test_all_rows_are_checked_when_the_file_is_opened(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", *[{"prompt": "1="}] * 200, {"prompt": "2" * 50}, *[{"prompt": "1="}] * 30)
    with pytest.raises(DataError, match=r"p.jsonl:201: the prompt has 51 tokens"):
        prompts_of(path=path)


def test_eval_path_leaves_the_training_file_complete(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "a.jsonl", {"prompt": "1="})
    evaluation = jsonl(tmp_path / "b.jsonl", {"prompt": "2="}, {"prompt": "3="})
    prompts = prompts_of(path=train, eval_path=evaluation)
    assert [prompt.text for prompt in prompts.train([0, 1])] == ["1=", "1="]
    assert [prompt.text for prompt in prompts.heldout()] == ["2=", "3="]


# Rules, from the keys of a recipe's [reward]


def test_exact_compares_with_the_truth_of_the_file(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", *[{"prompt": "1+2=", "answer": 3}] * 3)
    prompt = prompts_of(path=path).train([0])[0]
    with scorer(rule="exact", answer=r"#(\d+)$") as judge:
        scored = judge.score([prompt] * 2, [sample_of(prompt, "1+2=3;#3"), sample_of(prompt, "#4")])
    assert [sample.reward for sample in scored] == [1.0, 0.0]


def test_math_rule_compares_mathematical_values(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", *[{"prompt": "1+2=", "answer": "1/2"}] * 3)
    prompt = prompts_of(path=path).train([0])[0]
    with scorer(rule="math", answer=r"\\boxed\{(.*)\}") as judge:
        texts = [r"so \boxed{0.5}", r"so \boxed{\frac{2}{4}}", r"\boxed{0.6}", "0.5"]
        scored = judge.score([prompt] * 4, [sample_of(prompt, text) for text in texts])
    assert [sample.reward for sample in scored] == [1.0, 1.0, 0.0, 0.0]


# Gyms


def recipe(data: dict[str, Any], reward: dict[str, Any]) -> RlRecipe:
    tree = {
        "task": "rl", "model": {"path": "sums-policy"}, "data": data, "reward": reward,
        "algorithm": {"name": "grpo"},
        "train": {"steps": 1, "lr": 1e-3, "prompts_per_step": 2, "samples_per_prompt": 2},
    }  # fmt: skip
    parsed = parse_recipe(tree, "test")
    assert isinstance(parsed, RlRecipe)
    return parsed


def test_gym_data_and_the_gym_rule_require_each_other() -> None:
    recipe({"gym": "chain_sum"}, {"rule": "gym"})
    with pytest.raises(ConfigError, match='a gym task checks its own answers: set rule = "gym"'):
        recipe({"gym": "chain_sum"}, {"rule": "exact"})
    with pytest.raises(ConfigError, match=r"set data.gym, or use another rule"):
        recipe({"world": "sums"}, {"rule": "gym"})


@pytest.fixture
def gym() -> Any:
    return pytest.importorskip(
        "reasoning_gym", reason="reasoning-gym is not installed: pip install -c constraints.txt '.[verify]'"
    )


@pytest.mark.slow
def test_gym_prompts_are_pure_functions_of_seed_and_index(gym: Any) -> None:
    options = {"min_digits": 1, "max_digits": 1, "max_terms": 3}
    keys = {"gym": "chain_sum", "gym_options": options, "eval_items": 5}
    prompts, again = prompts_of(None, **keys), prompts_of(None, **keys)
    assert prompts.train(range(5)) == again.train(range(5))
    heldout_texts = [prompt.text for prompt in prompts.heldout()]
    assert len(heldout_texts) == 5
    assert heldout_texts != [prompt.text for prompt in prompts.train(range(5))]


@pytest.mark.slow
def test_gym_rule_uses_the_tasks_own_scorer(gym: Any) -> None:
    prompts = prompts_of(None, gym="chain_sum", gym_options={"max_digits": 1})
    prompt = prompts.train([0])[0]
    correct = prompt.truth["item"]["answer"]
    assert int(correct) == eval(prompt.truth["item"]["metadata"]["expression"])
    texts = [f"<answer>{correct}</answer>", f"<answer>+0{correct}.0</answer>", "<answer>x</answer>", correct]
    with scorer(rule="gym", answer="<answer>(.*?)</answer>") as judge:
        scored = judge.score([prompt] * 4, [sample_of(prompt, text) for text in texts])
    assert scored[0].reward == 1.0
    assert scored[2].reward == 0.0
    assert scored[3].reward == 0.0, "without the tags there is no answer"
    if not correct.startswith("-"):
        assert scored[1].reward == 1.0, "the scorer reads numbers, not text"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["arc_1d", "rearc", "rush_hour", "gcd", "graph_color", "mini_sudoku"])
def test_gym_item_is_scored_the_same_in_the_rule_process(gym: Any, task: str) -> None:
    """Some tasks have tuples, which JSON lacks: the score must equal the task's own score in this process."""
    prompts = prompts_of(None, gym=task, eval_items=2)
    prompt = prompts.train([1])[0]
    items = gym.create_dataset(task, seed=1, size=100_000)
    expected = float(items.score_answer(str(items[1]["answer"]), entry=items[1]))
    with scorer(rule="gym", timeout=20.0) as judge:
        (scored,) = judge.score([prompt], [sample_of(prompt, str(items[1]["answer"]))])
    assert scored.error is None
    assert scored.reward == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sums", {}, "'chain_sums' is not a reasoning-gym task; did you mean 'chain_sum'"),
        (
            "chain_sum", {"max_digit": 1}, "max_digit is not an option of the task 'chain_sum'; did you mean "
            "'max_digits'"
        ),
        ("chain_sum", {"max_digits": -1}, "'chain_sum' refuses {'max_digits': -1} .* max_digits must be"),
        ("chain_sum", {"size": 3}, "set data.limit"),
        ("chain_sum", {"seed": 3}, "set the recipe's seed"),
    ],
)  # fmt: skip
def test_unsupported_gym_options_are_rejected_with_the_reason(
    gym: Any, task: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prompts_of(gym=task, gym_options=options)
