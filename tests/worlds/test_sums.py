import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.config import SumsTable
from plaudit.errors import DataError
from plaudit.models import encode
from plaudit.worlds import get_world
from plaudit.worlds.sums import HARD_OPERANDS, SYMBOLS, Problem, Sums, is_heldout, judge, split_steps
from plaudit.worlds.tokenizer import sums_tokenizer

PROBLEM = Problem((7, 8, 4))


def test_documented_problem() -> None:
    assert PROBLEM.prompt == "7+8+4="
    assert PROBLEM.solution == "7+8=15;15+4=19;#19"
    assert PROBLEM.answer == 19
    assert Problem.parse("7+8+4=") == PROBLEM
    with pytest.raises(ValueError, match="is not a problem of the sums world"):
        Problem.parse("7+8")


@pytest.mark.parametrize(
    ("response", "sound", "right"),
    [
        ("7+8=15;15+4=19;#19", [True, True, True], True),
        ("7+8=15;15+0=15;15+4=19;#19", [True, True, True, True], True),  # redundant but correct
        ("7+8=14;14+4=18;#18", [False, False, False], False),  # steps after an error are not sound
        ("7+8=15;15+4=18;#18", [True, False, False], False),
        ("7+8=15;15+4=19;#18", [True, True, False], False),
        ("7+8=14;15+4=19;#19", [False, False, False], True),  # a wrong step, but the right answer
        ("7+8=15;#19", [True, False], True),  # the sum is right, but the steps are missing
        ("7+8=15;15+4=19;", [True, True], False),  # no answer
        ("7+8=15;15+4=19;#", [True, True, False], False),
        ("7+9=16;16+4=20;#20", [False, False, False], False),  # another operand
        ("15+4=19;#19", [False, False], True),
        ("", [], False),
        ("#19;#19", [False, False], True),
        ("hello", [False], False),
    ],
)
def test_verdict_on_every_step(response: str, sound: list[bool], right: bool) -> None:
    verdict = judge(PROBLEM, response)
    assert list(verdict.sound) == sound
    assert verdict.right == right
    assert verdict.first_wrong == (sound.index(False) if False in sound else -1)


def test_zero_operand_must_be_added_at_least_once() -> None:
    problem = Problem((3, 0, 4))
    assert all(judge(problem, "3+0=3;3+4=7;#7").sound)
    assert all(judge(problem, "3+0=3;3+0=3;3+4=7;#7").sound)
    assert list(judge(problem, "3+4=7;#7").sound) == [False, False]


@given(st.lists(st.integers(0, 99), min_size=2, max_size=12))
def test_the_solution_is_sound_for_any_problem(operands: list[int]) -> None:
    problem = Problem(tuple(operands))
    verdict = judge(problem, problem.solution)
    assert verdict.right
    assert all(verdict.sound)
    assert len(verdict.sound) == verdict.needed == len(operands)
    assert "".join(split_steps(problem.solution)) == problem.solution


@given(st.text(alphabet=SYMBOLS + "a ", max_size=40))
def test_any_text_gets_a_verdict(text: str) -> None:
    assert len(judge(PROBLEM, text).sound) == len(split_steps(text))


def test_items_are_functions_of_seed_split_and_index() -> None:
    assert get_world("sums", 1).pair("train", 5) == get_world("sums", 1).pair("train", 5)
    assert get_world("sums", 1).pair("train", 5) != get_world("sums", 2).pair("train", 5)
    assert get_world("sums", 1).problem("train", 5) != get_world("sums", 1).problem("train", 6)


@pytest.mark.parametrize("name", ["sums", "sums-hard"])
def test_training_and_heldout_problems_cannot_overlap(name: str) -> None:
    worlds = [get_world(name, seed) for seed in (1, 2)]
    train = {world.problem("train", i) for world in worlds for i in range(3000)}
    heldout = {world.problem("heldout", i) for world in worlds for i in range(3000)}
    assert not train & heldout
    assert not any(map(is_heldout, train))
    assert all(map(is_heldout, heldout))
    pairs = {world.pair("train", i).prompt for world in worlds for i in range(1000)}
    assert not pairs & {problem.prompt for problem in heldout}


def test_heldout_problems_are_distinct_and_have_the_configured_difficulty() -> None:
    easy, hard = get_world("sums").heldout(400), get_world("sums-hard").heldout(400)
    assert len(set(easy)) == len(set(hard)) == 400
    assert {len(p.operands) for p in easy} == {3, 4, 5}
    assert {len(p.operands) for p in hard} == set(range(HARD_OPERANDS[0], HARD_OPERANDS[1] + 1))
    assert len(Sums(SumsTable(operands=(2, 2))).heldout(400)) < 20  # of 100 problems only a tenth are heldout


def test_digits_and_hard_share_follow_the_table() -> None:
    two = Sums(SumsTable(digits=2, hard_share=0.5))
    problems = [two.problem("train", i) for i in range(2000)]
    assert max(max(p.operands) for p in problems) == 99
    assert min(min(p.operands) for p in problems) == 1, "a 0 could be taken for a needless step"
    assert 0.45 < sum(len(p.operands) >= HARD_OPERANDS[0] for p in problems) / 2000 < 0.55


def test_demonstrations_have_slips_and_habitual_errors() -> None:
    def right(world: Sums) -> float:
        return sum(judge(*world.demonstration("train", i)).right for i in range(2000)) / 2000

    assert right(Sums(SumsTable(slip=0, habit=0))) == 1.0
    assert 0.80 < right(Sums(SumsTable(slip=0.05, habit=0))) < 0.90
    assert 0.75 < right(Sums(SumsTable(slip=0, habit=1))) < 0.85
    habitual = Sums(SumsTable(slip=0, habit=1, ramble=0))
    for i in range(500):
        problem, response = habitual.demonstration("train", i)
        wrong = judge(problem, response).first_wrong
        if wrong >= 0:
            assert split_steps(response)[wrong].split("=")[0].endswith("+7")


def test_pairs_prefer_right_over_wrong_and_short_over_rambling() -> None:
    kinds: Counter[str] = Counter()
    for i in range(2000):
        pair = get_world("sums").pair("train", i)
        problem = Problem.parse(pair.prompt)
        chosen, rejected = judge(problem, pair.chosen), judge(problem, pair.rejected)
        assert chosen.right
        assert all(chosen.sound)
        if rejected.right:
            assert len(rejected.sound) > len(chosen.sound)
            assert pair.margin == 0.5
        else:
            assert pair.margin == 1.0
        kinds["rambling" if rejected.right else "wrong"] += 1
    assert 400 < kinds["rambling"] < 600


def test_half_of_judged_solutions_are_wrong_with_errors_at_every_step() -> None:
    first = Counter(get_world("sums").judged("train", i)[2].first_wrong for i in range(2000))
    assert 0.4 < first[-1] / 2000 < 0.6
    assert all(first[index] > 50 for index in range(4))


@pytest.mark.parametrize(
    ("at", "by", "response", "first_wrong"),
    [
        (1, 1, "7+8=16;16+4=20;#20", 0),
        (2, -1, "7+8=15;15+4=18;#18", 1),
        (3, 1, "7+8=15;15+4=19;#20", 2),
        (2, 0, PROBLEM.solution, -1),
    ],
)
def test_near_miss_continues_from_its_error(at: int, by: int, response: str, first_wrong: int) -> None:
    assert PROBLEM.near_miss(at, by) == response
    assert judge(PROBLEM, response).first_wrong == first_wrong


def test_near_misses_come_in_pairs_with_the_right_solution() -> None:
    world = Sums(SumsTable(near=1.0, hard_share=0.2))
    answers = 0
    for i in range(0, 1000, 2):
        (problem, right, sound), (same_problem, wrong, unsound) = world.judged("train", i), world.judged("train", i + 1)
        assert problem == same_problem
        assert all(sound.sound)
        at = unsound.first_wrong
        assert at == len(unsound.sound) - 1 == len(sound.sound) - 1, "nothing comes after the error"
        assert split_steps(right)[:at] == split_steps(wrong)[:at]
        results = [int(re.findall(r"\d+", text)[-1]) for text in (right, wrong)]
        assert abs(results[0] - results[1]) == 1
        answers += "#" in wrong
    assert 100 < answers < 200


def test_near_miss_pairs_are_a_solution_and_one_off_by_one() -> None:
    world = Sums(SumsTable(near=1.0))
    for i in range(300):
        pair = world.pair("train", i)
        problem = Problem.parse(pair.prompt)
        assert pair.chosen == problem.solution
        assert abs(int(pair.rejected.split("#")[1]) - problem.answer) == 1
        assert not is_heldout(problem)


def test_items_before_near_from_equal_those_without_near_misses() -> None:
    plain, late = Sums(SumsTable()), Sums(SumsTable(near=1.0, near_from=20))
    for i in range(20):
        assert late.pair("train", i) == plain.pair("train", i)
        assert late.judged("train", i) == plain.judged("train", i)
    assert all(late.pair("train", i) != plain.pair("train", i) for i in range(20, 40))
    assert late.demonstration("train", 30) == plain.demonstration("train", 30), "policies never see them"


def test_shortest_problems_are_distinct() -> None:
    problems = get_world("sums").shortest(300)
    assert len(set(problems)) == 300
    assert {len(problem.operands) for problem in problems} == {3}
    assert len(Sums(SumsTable(operands=(2, 2))).shortest(300)) == 81


def test_unknown_world() -> None:
    with pytest.raises(DataError, match="unknown world 'sum'; did you mean 'sums'"):
        get_world("sum")


def test_tokenizer_has_one_token_per_symbol_and_survives_saving(tmp_path: object) -> None:
    from plaudit.models import load_tokenizer

    tokenizer = sums_tokenizer()
    text = PROBLEM.prompt + PROBLEM.solution
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) + 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert encode(tokenizer, text) == ids[1:]
    assert tokenizer.eos_token_id not in encode(tokenizer, "7<eos>8")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # type: ignore[operator]
    assert load_tokenizer(tmp_path).encode(text) == ids  # type: ignore[arg-type]
