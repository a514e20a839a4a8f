"""Recipes by name, their list, and recipes for a user's own data."""

import tomllib
from pathlib import Path

import pytest

from plaudit.config import load_recipe
from plaudit.config.search import load_search
from plaudit.config.shipped.catalog import find_recipe, listings, recipe_names
from plaudit.config.shipped.template import template_tasks
from plaudit.errors import ConfigError
from tests.command import plaudit_here


def test_recipes_lists_names_tasks_and_descriptions() -> None:
    lines = plaudit_here("recipes").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(recipe_names())
    (line,) = [line for line in lines if line.startswith("sums-grpo ")]
    assert line.split(maxsplit=2) == [
        "sums-grpo", "rl", "GRPO on the sums world with a rule: 1 for the right answer, 0 for any other."
    ]  # fmt: skip


@pytest.mark.parametrize("listing", listings(), ids=lambda listing: listing.name)
def test_first_line_of_a_recipe_is_a_short_sentence(listing: object) -> None:
    description = listing.description  # type: ignore[attr-defined]
    assert not description.startswith("#")
    assert description.endswith((".", "?"))
    assert len(description) <= 100, description


@pytest.mark.parametrize("verb", ["train", "search"])
def test_recipe_name_resolves_like_its_file_in_any_directory(verb: str, tmp_path: Path) -> None:
    name = {"train": "sums-grpo", "search": "search-rebase"}[verb]
    by_name = plaudit_here(verb, name, "--dry-run", cwd=tmp_path)
    assert by_name.returncode == 0, by_name.stderr
    copied = plaudit_here("recipes", name, "--copy", "mine.toml", cwd=tmp_path)
    assert (copied.returncode, copied.stdout) == (0, f"copied {name} to mine.toml\n")
    assert plaudit_here(verb, "mine.toml", "--dry-run", cwd=tmp_path).stdout == by_name.stdout
    assert (tmp_path / "mine.toml").read_text() == plaudit_here("recipes", name).stdout


def test_file_takes_precedence_over_a_name_and_a_directory_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums-grpo").mkdir()
    assert load_recipe(Path("sums-grpo")).task == "rl"
    Path("sums-sft").write_text(find_recipe(Path("sums-prm")).read_text())
    assert load_recipe(Path("sums-sft")).task == "prm"


def test_named_recipe_writes_to_a_run_directory_of_its_name(tmp_path: Path) -> None:
    small = {
        "train.steps": 1, "train.prompts_per_step": 2, "train.samples_per_prompt": 2, "data.eval_items": 2,
        "model.device": "cpu",
    }  # fmt: skip
    sets = [argument for key, value in small.items() for argument in ("--set", f"{key}={value}")]
    result = plaudit_here("train", "sums-grpo", *sets, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs" / "sums-grpo" / "final" / "config.json").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "sums-gpo"], "no recipe at sums-gpo, and none of that name; did you mean 'sums-grpo', 'sums-"),
        (["train", "recipes/sums-grpo.toml"], "did you mean 'sums-grpo'"),
        (["train", "zzz"], "`plaudit recipes` lists those that come with Plaudit"),
        (["train", "own.tom"], "did you mean 'own.toml'?"),
        (["train", "."], ". is a directory, not a recipe file"),
        (["train", "search-ets"], "run it with `plaudit search search-ets`"),
        (["search", "search-et"], "did you mean 'search-ets'"),
        (["serve", "--config", "smollm2-serv"], "did you mean 'smollm2-serve'"),
        (["recipes", "sums-gpo"], "no recipe 'sums-gpo'; did you mean 'sums-grpo', "),
        (["recipes", "sums-grpo", "--copy", "own.toml"], "own.toml already exists"),
        (["recipes", "sums-grpo", "--copy", "no/where.toml"], "the directory no does not exist"),
        (["recipes", "--copy", "other.toml"], "name the recipe"),
        (["init", "own.toml"], "own.toml already exists"),
        (["init", "--task", "rewards"], "unknown task 'rewards'; did you mean 'reward'?"),
        (["train", "sums-sft", "--set", "data.world=nope", "--dry-run"], "world 'nope'; known: sums, sums-hard"),
        (["train", "sums-ppo", "--set", "data.world=nope", "--dry-run"], "world 'nope'; known: sums, sums-hard"),
        (["search", "--world", "nope", "--dry-run"], "world 'nope'; known: sums, sums-hard"),
    ],
)
def test_user_error_is_one_line_and_writes_nothing(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("mine")
    result = plaudit_here(*words, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["own.toml"]
    assert (tmp_path / "own.toml").read_text() == "mine"


@pytest.mark.parametrize("task", template_tasks())
def test_init_writes_a_recipe_for_own_data(task: str, tmp_path: Path) -> None:
    data, model = 'odd "name" \\ of.jsonl', "models/mine"
    result = plaudit_here("init", "my.toml", "--task", task, "--data", data, "--model", model, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    verb = "search" if task == "search" else "train"
    assert f"plaudit {verb} my.toml --dry-run" in result.stdout
    resolved = plaudit_here(verb, "my.toml", "--dry-run", cwd=tmp_path)
    assert resolved.returncode == 0, resolved.stderr
    tree = tomllib.loads(resolved.stdout)
    assert (tree["task"], tree["data"]["path"], tree["model"]["path"]) == (task, data, model)


def test_init_without_options_writes_the_default_template(tmp_path: Path) -> None:
    assert plaudit_here("init", cwd=tmp_path).returncode == 0
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert (recipe.task, recipe.model.path) == ("sft", "smollm2")
    assert set(template_tasks()) == {"sft", "preference", "reward", "prm", "rl", "search"}


ROWS = {
    "sft": '{"prompt": "7+8=", "response": "7+8=15;#15"}',
    "reward": '{"prompt": "7+8=", "chosen": "7+8=15;#15", "rejected": "#3"}',
    "prm": '{"prompt": "7+8=", "steps": ["7+8=15;", "#15"], "labels": [1, 0.5]}',
    "rl": '{"prompt": "7+8=", "answer": "15"}',
}


@pytest.mark.parametrize("task", ROWS)
def test_init_recipe_trains_on_rows_of_its_documented_form(task: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{ROWS[task]}\n" * 20)
    options = ["--task", task, "--data", "rows.jsonl", "--model", "sums-policy"]
    assert plaudit_here("init", "my.toml", *options, cwd=tmp_path).returncode == 0
    small = ["train.steps=1", "data.eval_items=2", "model.device=cpu"]
    small += ["train.prompts_per_step=2", "sampling.max_tokens=8"] if task == "rl" else ["train.batch=2"]
    result = plaudit_here("train", "my.toml", *(argument for key in small for argument in ("--set", key)), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs" / "my" / "final" / "config.json").is_file()


def test_missing_recipe_is_a_config_error_for_every_loader() -> None:
    for load in (load_recipe, lambda path: load_search(path, {})):
        with pytest.raises(ConfigError, match="no recipe at nowhere"):
            load(Path("nowhere"))
