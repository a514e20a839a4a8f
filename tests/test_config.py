import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.config import NewModel, Table, differences, load_recipe, parse_recipe, to_toml
from plaudit.config.reward import OutcomeTable
from plaudit.config.search import load_search, parse_search
from plaudit.config.serve import parse_serve, read_serve
from plaudit.config.shipped.catalog import RECIPES as RECIPES_DIR
from plaudit.config.shipped.template import new_recipe
from plaudit.errors import ConfigError

TASKS = {path: tomllib.loads(path.read_text()).get("task") for path in sorted(RECIPES_DIR.glob("*.toml"))}
RECIPES = [path for path, task in TASKS.items() if task not in (None, "search")]
SEARCHES = [path for path, task in TASKS.items() if task == "search"]
SERVERS = [path for path, task in TASKS.items() if task is None]
SFT = RECIPES_DIR / "sums-sft.toml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_resolved_recipe_round_trips_through_toml(path: Path) -> None:
    recipe = load_recipe(path)
    assert parse_recipe(tomllib.loads(to_toml(recipe)), "again") == recipe


@pytest.mark.parametrize("path", SEARCHES, ids=lambda path: path.stem)
def test_resolved_search_recipe_round_trips_through_toml(path: Path) -> None:
    recipe = load_search(path, {})
    assert parse_search(tomllib.loads(to_toml(recipe)), "again") == recipe


@pytest.mark.parametrize("path", SERVERS, ids=lambda path: path.stem)
def test_shipped_server_configs_serve_models_that_shipped_recipes_train(path: Path) -> None:
    for model in read_serve(path)["models"].values():
        assert RECIPES_DIR / f"{Path(model['path']).name}.toml" in RECIPES
        assert set(model) <= set(OutcomeTable.model_fields)


def test_resolving_keeps_user_settings_and_adds_defaults() -> None:
    given_tree = tomllib.loads(SFT.read_text())
    resolved = load_recipe(SFT).model_dump()
    for table in ("data", "train"):
        for key, value in given_tree[table].items():
            if not isinstance(value, dict):
                assert resolved[table][key] == value


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.lr=0.5", lambda r: r.train.lr, 0.5),
        ("train.lr=1", lambda r: r.train.lr, 1.0),
        ("data.sums.operands=[2, 9]", lambda r: r.data.sums.operands, (2, 9)),
        ("data.world=sums-hard", lambda r: r.data.world, "sums-hard"),
        ('data.world="sums"', lambda r: r.data.world, "sums"),
        ("model.new.tie_embeddings=false", lambda r: r.model.new.tie_embeddings, False),
    ],
)
def test_set_overrides_one_key(override: str, key: object, value: object) -> None:
    assert key(load_recipe(SFT, [override])) == value  # type: ignore[operator]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.stepz=3"], "unknown key 'train.stepz'; did you mean 'steps'?"),
        (["trian.lr=1"], "unknown key 'trian'; did you mean 'train'?"),
        (["lr=1e-4"], "unknown key 'lr'; did you mean 'train.lr'?"),
        (["train.eval_items=3"], "unknown key 'train.eval_items'; did you mean 'data.eval_items'?"),
        (["data.sums.operand=[2,3]"], "unknown key 'data.sums.operand'; did you mean 'operands'?"),
        (["train.checkpoint.evry=3"], "unknown key 'train.checkpoint.evry'; did you mean 'every'?"),
        (["task=reward", "algorithm.centering=1.0"], "unknown key 'algorithm.centering'; did you mean 'centring'?"),
        (["train.steps='many'"], "train.steps = 'many': input should be a valid integer"),
        (["train.batch=true"], "train.batch = True: input should be a valid integer"),
        (["train.lr=-1"], "train.lr = -1: input should be greater than 0"),
        (["data.world=nope"], "[data.world] unknown world 'nope'; known: sums, sums-hard"),
        (["data.world=5"], "data.world = 5: input should be a valid string"),
        (["data.sums=3"], "data.sums = 3: expected a table"),
        (["task=reward", "algorithm=3"], "algorithm = 3: expected a table"),
        (["task=reward", "algorithm.name=x"], "algorithm.name = 'x': expected 'bradley-terry' or 'regression'"),
        (["task=dance"], "task is 'dance'; expected one of sft, reward, prm"),
        (["data.sums.operands=[6,3]"], "[data.sums] operands must be [fewest, most]"),
        (["model.path=x"], "give either model.path or a [model.new] table, and not both"),
        (["model.new.heads=5"], "hidden (80) must be a multiple of heads (5)"),
        (["data.path=x.jsonl"], "give either data.world"),
        (["train.steps"], "--set 'train.steps' is not of the form table.key=value"),
        (["train.steps.x=1"], "train.steps is a value, not a table"),
        (['model.path="a\\d"'], "is not valid TOML (Unescaped"),
        (["model.path='a"], "leave the quotes out, or double backslashes"),
    ],
)
def test_config_errors_name_the_key_the_value_and_the_fix(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(SFT, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", ["sft", "preference", "reward", "prm", "rl"])
def test_recipe_for_own_data_has_no_world_settings(task: str) -> None:
    tree = tomllib.loads(new_recipe(task, "sums-policy", "mine.jsonl"))
    recipe = parse_recipe(tree, "init")
    data = tomllib.loads(to_toml(recipe))["data"]
    assert not {"sums", "problems", "gym_options", "sources"} & data.keys()
    # Explicit settings are never left out.
    changed = parse_recipe({**tree, "data": {**tree["data"], "sums": {"digits": 2}}}, "init")
    assert parse_recipe(tomllib.loads(to_toml(changed)), "again") == changed
    assert parse_recipe(tomllib.loads(to_toml(recipe)), "again") == recipe


def test_missing_key_file_and_syntax(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no recipe at sum-sft.toml, .*; did you mean 'sums-sft'"):
        load_recipe(Path("sum-sft.toml"))
    recipe = tmp_path / "r.toml"
    recipe.write_text('task = "sft"\n[model]\npath = "x"\n[data]\nworld = "sums"\n[train]\nbatch = 1\nlr = 1.0\n')
    with pytest.raises(ConfigError, match=r"the key 'train\.steps' is missing"):
        load_recipe(recipe)
    recipe.write_text("task = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_recipe(recipe)
    recipe.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        load_recipe(recipe)
    recipe.write_text("seed = 1")
    with pytest.raises(ConfigError, match="task is missing; expected one of sft, reward, prm"):
        load_recipe(recipe)


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe(SFT).seed = 2


def test_differences_names_keys_and_respects_ignore() -> None:
    a, b = load_recipe(SFT), load_recipe(SFT, ["train.lr=0.5", "train.checkpoint.keep=9"])
    assert set(differences(a, b)) == {"train.lr", "train.checkpoint.keep"}
    assert set(differences(a, b, ["train.checkpoint"])) == {"train.lr"}


class Holder(Table):
    text: str
    numbers: tuple[float, ...]
    shape: NewModel = NewModel()


@given(st.text(), st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_toml_writer_round_trips_any_text_and_number(text: str, numbers: list[float]) -> None:
    holder = Holder(text=text, numbers=tuple(numbers))
    tree = tomllib.loads(to_toml(holder))
    assert tree["text"] == text
    assert tree["numbers"] == numbers


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "judge", "url": "http://localhost/v1"}, "the key 'models.j.template' is missing"),
        ({"kind": "rule", "rule": "exact", "answer": 3}, "models.j.answer = 3: input should be a valid string"),
        ({"kind": "jugde"}, "models.j.kind = 'jugde': expected 'outcome' or "),
        ({"kind": "judge", "template": "a", "regex": "b"}, "unknown key 'models.j.regex'"),
    ],
)
def test_errors_of_served_models_are_those_of_their_kind(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        parse_serve({"models": {"j": entry}}, "serve.toml")
    assert "function" not in str(refused.value)
