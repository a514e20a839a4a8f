"""On an asynchronous device the scores of a step are reported while the next step is computed. Here a CPU simulates it
with the same order of events."""

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
    return [engine.submit_score(list(sequence)) for sequence in sequences]


def drained(engine: Engine) -> dict[int, Update]:
    updates: dict[int, Update] = {}
    while engine.busy:
        for update in engine.step():
            assert update.request not in updates
            updates[update.request] = update
    engine.check()
    return updates


def values(updates: dict[int, Update], requests: Sequence[int]) -> list[float]:
    return [float(updates[request].values[0, 0]) for request in requests]  # type: ignore[index]


def test_overlapping_scores_match_a_synchronous_engine() -> None:
    engine = overlapping()
    requests = submitted(engine)
    assert np.allclose(values(drained(engine), requests), EXPECTED, rtol=0, atol=1e-9)
    assert np.allclose([v[0] for v in engine.score(SEQUENCES, cache=True)], EXPECTED, rtol=0, atol=1e-9)


def test_step_reports_the_scores_of_the_previous_step() -> None:
    engine = overlapping(budget=64)
    sequences = [sequence[:20] for sequence in SEQUENCES[:4]]
    requests = submitted(engine, sequences)
    # 80 tokens: 41 are half of them, and no sequence is split.
    assert engine.step() == []
    assert [update.request for update in engine.step()] == requests[:2]
    assert not engine._runner.scheduler.live
    assert engine.busy
    assert [update.request for update in engine.step()] == requests[2:]
    assert not engine.busy


def test_sequences_are_split_only_if_a_step_cannot_hold_them() -> None:
    engine = overlapping(budget=64)
    sequences = [(SEQUENCES[i] * 9)[:length] for i, length in enumerate((20, 50, 60, 90))]
    requests = submitted(engine, sequences)
    steps, updates = [], dict[int, Update]()
    while engine.busy:
        before = engine.stats().tokens_computed
        updates |= {update.request: update for update in engine.step()}
        steps.append(engine.stats().tokens_computed - before)
    assert steps == [20 + 44, 50, 46, 60, 0]  # the sequence of 90 fills up the first step
    expected = [float(value[0]) for value in Engine(MODULE).score(sequences)]
    assert np.allclose(values(updates, requests), expected, rtol=0, atol=1e-9)


def test_long_sequence_is_scored_in_parts_while_others_decode() -> None:
    """It fits into a step alone, but not beside decoding sequences, so it is split."""
    module = tiny.model("mistral", dtype=torch.float64)
    engine = overlapping(module, budget=64)
    decoding = engine.submit(SEQUENCES[0][:20], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    engine.step()
    scoring = engine.submit_score((SEQUENCES[1] * 4)[:64], columns=[5])
    finished = []
    while engine.busy:
        finished += [u.request for u in engine.step() if u.values is not None or u.sample is not None]
    assert finished == [scoring, decoding]


def test_pending_scores_are_reported_before_samples_are_computed() -> None:
    module = tiny.model("mistral", dtype=torch.float64)
    engine, params = overlapping(module), SamplingParams(max_tokens=5, seed=1, temperature=0.0)
    expected = Engine(module).generate([SEQUENCES[5]], params)[0]
    scores = [engine.submit_score(sequence, columns=[5, 11]) for sequence in SEQUENCES[:2]]
    assert engine.step() == []
    generation = engine.submit(SEQUENCES[5], params)
    first = engine.step()
    assert {update.request for update in first[:2]} == {*scores}
    tokens = [token for update in first[2:] for token in update.token_ids]
    while engine.busy:
        for update in engine.step():
            assert update.request == generation
            tokens += update.token_ids
    assert tuple(tokens) == expected.token_ids


def test_request_aborted_after_computation_ends_once() -> None:
    engine = overlapping(budget=1024)
    requests = submitted(engine)
    engine.step()
    engine.abort(requests[0])
    updates = drained(engine)
    assert sorted(updates) == requests
    assert np.allclose(values(updates, requests[1:]), EXPECTED[1:], rtol=0, atol=1e-9)


def test_discarded_requests_are_not_reported() -> None:
    engine = overlapping(budget=1024)
    requests = submitted(engine)
    engine.step()
    engine.discard(requests[:3])
    assert sorted(drained(engine)) == requests[3:]


@pytest.mark.parametrize("keep", ["recompute", "continue"])
def test_new_weights_do_not_change_scores_already_computed(keep: str) -> None:
    module = tiny.model("mistral", "sequence", labels=1, dtype=torch.float64)
    engine = overlapping(module, budget=1024)
    requests = submitted(engine)
    engine.step()
    computed = [sequence for step in engine._runner.late for sequence in step.sequences]
    assert 0 < len(computed) < len(requests)
    with torch.no_grad():
        module.score.weight.mul_(2.0)  # type: ignore[union-attr, operator]
    engine.new_version(keep=keep)  # type: ignore[arg-type]
    actual = values(drained(engine), requests)
    before = {sequence.request.number for sequence in computed}
    for request, value, expected in zip(requests, actual, EXPECTED, strict=True):
        assert abs(value - expected * (1 if request in before else 2)) < 1e-9


@pytest.mark.parametrize("fault", [1, 2])
def test_device_failure_during_readout_fails_only_the_scores_of_that_step(
    fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first report, the next step contains generation as well as scoring."""
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
    requests = [engine.submit_score(sequence, columns=[5]) for sequence in SEQUENCES]
    assert engine.step() == []
    generation = engine.submit(SEQUENCES[0], params)
    finished: dict[int, Update] = {}
    while engine.busy:
        finished |= {u.request: u for u in engine.step() if u.values is not None or u.sample is not None}
    engine.check()
    assert sorted(finished) == [*requests, generation]
    failed = [request for request in requests if finished[request].values is None]
    assert failed
    for request in failed:
        error = finished[request].sample.error  # type: ignore[union-attr]
        assert error is not None
        assert "illegal memory access" in error.message
    for request, value in zip(requests, expected, strict=True):
        if request not in failed:
            assert abs(float(finished[request].values[0, 0]) - value[0]) < 1e-9  # type: ignore[index]
    generated = finished[generation].sample
    assert generated is not None
    if generated.error is None:  # its step did not fail
        assert generated.token_ids == sample.token_ids
    else:
        assert fault == 2


def test_non_finite_scores_fail_only_their_own_request() -> None:
    module = tiny.model("mistral", "sequence", labels=1, dtype=torch.float64)
    engine = overlapping(module, budget=1024)
    with torch.no_grad():
        module.get_input_embeddings().weight[3].fill_(float("nan"))  # type: ignore[operator]
    sequences = [[token if token != 3 else 4 for token in sequence] for sequence in SEQUENCES[:4]]
    sequences[1][5] = 3
    requests = submitted(engine, sequences)
    updates = drained(engine)
    assert [request for request in requests if updates[request].values is None] == [requests[1]]
    sample = updates[requests[1]].sample
    assert sample is not None
    assert sample.error is not None
    assert sample.error.type == "NotANumber"
