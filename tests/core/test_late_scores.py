"""On an asynchronous device the scores of a step are reported while the next one is computed. Here a CPU stands in for
it: the order of events is the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from plaudit.core import Engine, SamplingParams, Update
from plaudit.core.model.readouts import PendingReadout
from tests.core import tiny

MODULE = tiny.model("mistral", "sequence", labels=1, dtype=torch.float64)
SEQUENCES = tiny.sequences(21, 12, 20, 60)
EXPECTED = [float(value[0]) for value in Engine(MODULE).score(SEQUENCES)]


def overlapping(module: torch.nn.Module = MODULE, budget: int = 128) -> Engine:
    engine = Engine(module, budget=budget, max_running=16)
    engine.backend.overlaps = engine._runner.scheduler.overlaps = True
    return engine


def submitted(engine: Engine, sequences: Sequence[Sequence[int]] = SEQUENCES) -> list[int]:
    return [engine.submit_score(list(each)) for each in sequences]


def drained(engine: Engine) -> dict[int, Update]:
    updates: dict[int, Update] = {}
    while engine.busy:
        for update in engine.step():
            assert update.request not in updates
            updates[update.request] = update
    engine.check()
    return updates


def values(updates: dict[int, Update], numbers: Sequence[int]) -> list[float]:
    return [float(updates[number].values[0, 0]) for number in numbers]  # type: ignore[index]


def test_scores_are_those_of_an_engine_that_waits() -> None:
    engine = overlapping()
    numbers = submitted(engine)
    assert np.allclose(values(drained(engine), numbers), EXPECTED, rtol=0, atol=1e-9)
    assert np.allclose([v[0] for v in engine.score(SEQUENCES, cache=True)], EXPECTED, rtol=0, atol=1e-9)


def test_a_step_reports_the_one_before_it() -> None:
    engine = overlapping(budget=64)
    sequences = [each[:20] for each in SEQUENCES[:4]]
    numbers = submitted(engine, sequences)
    # 80 tokens: 41 are half of them, and no sequence is torn.
    assert engine.step() == []
    assert [update.request for update in engine.step()] == numbers[:2]
    assert not engine._runner.scheduler.live
    assert engine.busy
    assert [update.request for update in engine.step()] == numbers[2:]
    assert not engine.busy


def test_sequences_are_torn_only_where_a_step_cannot_take_them_whole() -> None:
    engine = overlapping(budget=64)
    sequences = [(SEQUENCES[i] * 9)[:length] for i, length in enumerate((20, 50, 60, 90))]
    numbers = submitted(engine, sequences)
    steps, updates = [], dict[int, Update]()
    while engine.busy:
        before = engine.stats().tokens_computed
        updates |= {update.request: update for update in engine.step()}
        steps.append(engine.stats().tokens_computed - before)
    assert steps == [20 + 44, 50, 46, 60, 0]  # the one of 90 fills up the first
    expected = [float(value[0]) for value in Engine(MODULE).score(sequences)]
    assert np.allclose(values(updates, numbers), expected, rtol=0, atol=1e-9)


def test_a_long_sequence_is_scored_while_others_decode() -> None:
    """It fits into a step by itself, and never into what the decoding ones leave: it is torn then."""
    module = tiny.model("mistral", dtype=torch.float64)
    engine = overlapping(module, budget=64)
    decoding = engine.submit(SEQUENCES[0][:20], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    engine.step()
    number = engine.submit_score((SEQUENCES[1] * 4)[:64], columns=[5])
    ended = []
    while engine.busy:
        ended += [u.request for u in engine.step() if u.values is not None or u.sample is not None]
    assert ended == [number, decoding]


def test_scores_go_out_before_samples_are_computed() -> None:
    module = tiny.model("mistral", dtype=torch.float64)
    engine, params = overlapping(module), SamplingParams(max_tokens=5, seed=1, temperature=0.0)
    expected = Engine(module).generate([SEQUENCES[5]], params)[0]
    scores = [engine.submit_score(each, columns=[5, 11]) for each in SEQUENCES[:2]]
    assert engine.step() == []
    number = engine.submit(SEQUENCES[5], params)
    first = engine.step()
    assert {update.request for update in first[:2]} == {*scores}
    tokens = [token for update in first[2:] for token in update.token_ids]
    while engine.busy:
        for update in engine.step():
            assert update.request == number
            tokens += update.token_ids
    assert tuple(tokens) == expected.token_ids


def test_a_request_that_is_aborted_once_it_was_computed_ends_once() -> None:
    engine = overlapping(budget=1024)
    numbers = submitted(engine)
    engine.step()
    engine.abort(numbers[0])
    updates = drained(engine)
    assert sorted(updates) == numbers
    assert np.allclose(values(updates, numbers[1:]), EXPECTED[1:], rtol=0, atol=1e-9)


def test_a_request_that_is_discarded_is_never_heard_of() -> None:
    engine = overlapping(budget=1024)
    numbers = submitted(engine)
    engine.step()
    engine.discard(numbers[:3])
    assert sorted(drained(engine)) == numbers[3:]


@pytest.mark.parametrize("keep", ["recompute", "continue"])
def test_new_weights_do_not_change_what_was_computed(keep: str) -> None:
    module = tiny.model("mistral", "sequence", labels=1, dtype=torch.float64)
    engine = overlapping(module, budget=1024)
    numbers = submitted(engine)
    engine.step()
    computed = [sequence for late in engine._runner.late for sequence in late.sequences]
    assert 0 < len(computed) < len(numbers)
    with torch.no_grad():
        module.score.weight.mul_(2.0)  # type: ignore[union-attr, operator]
    engine.new_version(keep=keep)  # type: ignore[arg-type]
    found = values(drained(engine), numbers)
    before = {sequence.request.number for sequence in computed}
    for number, value, expected in zip(numbers, found, EXPECTED, strict=True):
        assert abs(value - expected * (1 if number in before else 2)) < 1e-9


@pytest.mark.parametrize("fault", [1, 2])
def test_a_device_that_fails_after_the_step_began(fault: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first report something else than scoring is about to be computed."""
    module = tiny.model("mistral", dtype=torch.float64)
    engine, arrays, calls = overlapping(module), PendingReadout.arrays, [0]
    expected = Engine(module).score(SEQUENCES, columns=[5])
    params = SamplingParams(max_tokens=5, temperature=0.0)
    sample = Engine(module).generate([SEQUENCES[0]], params)[0]

    def failing(self: PendingReadout) -> list[np.ndarray]:
        calls[0] += 1
        if calls[0] == fault:
            raise RuntimeError("illegal memory access")
        return arrays(self)

    monkeypatch.setattr(PendingReadout, "arrays", failing)
    numbers = [engine.submit_score(each, columns=[5]) for each in SEQUENCES]
    assert engine.step() == []
    generation = engine.submit(SEQUENCES[0], params)
    ended: dict[int, Update] = {}
    while engine.busy:
        ended |= {u.request: u for u in engine.step() if u.values is not None or u.sample is not None}
    engine.check()
    assert sorted(ended) == [*numbers, generation]
    failed = [number for number in numbers if ended[number].values is None]
    assert failed
    for number in failed:
        error = ended[number].sample.error  # type: ignore[union-attr]
        assert error is not None
        assert "illegal memory access" in error.message
    for number, value in zip(numbers, expected, strict=True):
        if number not in failed:
            assert abs(float(ended[number].values[0, 0]) - value[0]) < 1e-9  # type: ignore[index]
    drawn = ended[generation].sample
    assert drawn is not None
    if drawn.error is None:  # it was not in the step that failed
        assert drawn.token_ids == sample.token_ids
    else:
        assert fault == 2


def test_scores_that_are_not_numbers_fail_alone() -> None:
    module = tiny.model("mistral", "sequence", labels=1, dtype=torch.float64)
    engine = overlapping(module, budget=1024)
    with torch.no_grad():
        module.get_input_embeddings().weight[3].fill_(float("nan"))  # type: ignore[operator]
    sequences = [[token if token != 3 else 4 for token in each] for each in SEQUENCES[:4]]
    sequences[1][5] = 3
    numbers = submitted(engine, sequences)
    updates = drained(engine)
    assert [number for number in numbers if updates[number].values is None] == [numbers[1]]
    sample = updates[numbers[1]].sample
    assert sample is not None
    assert sample.error is not None
    assert sample.error.type == "NotANumber"
