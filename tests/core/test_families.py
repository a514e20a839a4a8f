"""Every decoder family of the installed transformers, from disk: equal to plain transformers or rejected in one line.

With PLAUDIT_SOAK set all of them run and the table in docs/core.md is written; the slow stage runs a tenth, a different
one every day (tests/rotation.py); a few always run. The results of a run must match the table.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.core.model.packing import pack_tree
from plaudit.core.proof.stand_in import tokens_for
from plaudit.errors import ModelError
from plaudit.records import Sample
from plaudit.train.optim.sharding import packed_rows
from tests.core.doubles import Doubles
from tests.core.families import BEGIN, END, MAPPINGS, PROVED, Case, cases, from_table, on_disk, reason, table
from tests.rotation import DAY, SOAK, in_turn

PAGE = Path(__file__).parents[2] / "docs" / "core.md"
ALWAYS = {
    "causal diffllama", "causal doge", "causal ministral3", "causal qwen2_moe, use_sliding_window",
    "sequence modernbert-decoder", "sequence eurobert", "sequence qwen3",
}  # fmt: skip
BLOCK = 16
GRADIENT = 1e-10  # relative difference of gradients
OUTCOMES: dict[Case, str] = {}


def chosen() -> list[Any]:
    all_cases = cases()
    return [
        pytest.param(case, id=str(case), marks=() if SOAK or str(case) in ALWAYS else pytest.mark.slow)
        for i, case in enumerate(all_cases)
        if str(case) in ALWAYS or in_turn(i, 10)
    ]


@pytest.mark.parametrize("case", chosen())
def test_family_matches_transformers_or_is_rejected(case: Case, tmp_path: Path) -> None:
    print(f"a tenth of the families: PLAUDIT_DAY={DAY % 10}")
    warnings.simplefilter("ignore")
    directory = on_disk(case, tmp_path / "model")
    engine, outcome = loaded(case, directory)
    if engine is not None:
        auto = MAPPINGS[case.kind][0]
        plain = auto.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
        plain.config.pad_token_id = engine.decoder.module.config.pad_token_id
        if case.kind == "sequence":
            as_reward(engine, plain)
        else:
            as_policy(engine, plain)
            as_policy_under_pressure(engine, plain)
            as_learner(engine, plain)
    OUTCOMES[case] = outcome
    if not SOAK:
        assert from_table(PAGE.read_text())[case.kind, case.name] == outcome


def loaded(case: Case, directory: Path) -> tuple[Engine | None, str]:
    try:
        return Engine.load(directory), PROVED
    except ModelError as refusal:
        message = str(refusal)
    assert len(message.splitlines()) == 1
    return None, reason(case, message, directory)


def as_policy(engine: Engine, plain: Any) -> None:
    ids = [tokens_for(plain, seed, length) for seed, length in enumerate((64, 37, 5))]
    expected = [logprobs(plain, s) for s in ids]
    for actual in (engine.logprobs(ids), engine.logprobs(ids, cache=True), [engine.logprobs([s])[0] for s in ids]):
        for g, e in zip(actual, expected, strict=True):
            close(g, e)
    prompts = [s[:30] for s in ids]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for samples in (engine.generate(prompts, greedy), [engine.generate([p], greedy)[0] for p in prompts]):
        for sample in samples:
            row_logits = logits(plain, [*sample.prompt_ids, *sample.token_ids])[len(sample.prompt_ids) - 1 : -1]
            gap = row_logits.max(dim=-1).values - row_logits[torch.arange(16), torch.tensor(sample.token_ids)]
            assert float(gap.max()) < 1e-4 * float(row_logits.abs().max())
    right(plain, engine.generate(prompts, SamplingParams(seed=3, max_tokens=24, ignore_eos=True)))


def as_policy_under_pressure(engine: Engine, plain: Any) -> None:
    """Prefix hits at and next to every block border, forked samples, and preemption."""
    module, decoder = engine.decoder.module, engine.decoder
    sequence, other = tokens_for(plain, 5, 50), tokens_for(plain, 6, 9)
    tree = Engine(module, state_every=BLOCK)
    tree.score([sequence], columns=[5], cache=True)
    for shared in (1, 15, 16, 17, 31, 32, 33, 47, 48, 49):
        branch = [*sequence[:shared], *other]
        close(tree.score([branch], columns=[5, 11], logprobs=True, cache=True)[0], table_of(plain, branch)[-1, [5, 11]])
    tree.check()
    prompts = [tokens_for(plain, seed, length) for seed, length in enumerate((37, 32, 5))]
    right(plain, tree.generate(prompts, SamplingParams(n=3, max_tokens=12, seed=1, ignore_eos=True)))
    assert tree.stats().tokens_shared > 0
    state, block = decoder.state_bytes(), BLOCK * decoder.token_bytes()
    small = Engine(
        module, kv_bytes=max(16 * state, 8 * state + 14 * block), budget=32, max_running=4, state_every=BLOCK
    )
    share = small.stats().blocks_total * BLOCK // 4  # of each running sequence: all of them need more
    right(plain, small.generate(prompts, SamplingParams(n=2, max_tokens=share, seed=2, ignore_eos=True)))
    assert small.stats().preemptions > 0
    small.check()


def as_learner(engine: Engine, plain: Any) -> None:
    """Gradients of a packed batch with a shared prefix equal those of the single sequences. Float64 throughout: with
    these weights float32 rounding errors grow to 1e-4 in both, and those of a float32 softmax in a float64 model to
    1e-5 (docs/log/family-gradients.md)."""
    module = engine.decoder.module
    for model in (module, plain):
        model.double().set_experts_implementation("eager")  # torch's grouped matmul does not support float64
    ids = [tokens_for(plain, seed, length) for seed, length in enumerate((37, 9))]
    ids = sorted([*ids, [*ids[0][:20], *ids[1]], ids[0][:21]])
    tree = pack_tree(ids, lone=False)
    with Doubles():
        rows = packed_rows(module, tree.packed)
        assert len(rows) < sum(map(len, ids))
        packed_rows_of_tree = torch.cat([rows[torch.from_numpy(at)] for at in tree.rows])
        plain_rows = torch.cat([rows_of(plain, s) for s in ids])
        weights = torch.randn(plain_rows.shape, generator=torch.Generator().manual_seed(1))
        for result in (packed_rows_of_tree, plain_rows):
            (result * weights).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    floor = 1e-2 * max(float(grad.abs().max()) for grad in expected.values())  # a key bias has only rounding error
    actual = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        scale = max(float(expected[name].abs().max()), floor)
        assert float((grad - expected[name]).abs().max()) < GRADIENT * scale, name


def rows_of(plain: Any, ids: list[int]) -> torch.Tensor:
    trunk = getattr(plain, "model", None) or plain.base_model
    rows: torch.Tensor = trunk(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    return rows


def as_reward(engine: Engine, plain: Any) -> None:
    ids = [tokens_for(plain, seed, length) for seed, length in enumerate((64, 37, 5))]
    ids.append([*ids[0][:40], *ids[1]])  # shares a prefix with the first
    expected = [logits(plain, s).numpy() for s in ids]
    scale = float(np.abs(expected).max())
    for cache in (False, True, True):
        for g, e in zip(engine.score(ids, cache=cache), expected, strict=True):
            close(g, e, scale)
    for s, e in zip(ids, expected, strict=True):
        close(engine.score([s])[0], e, scale)


@torch.inference_mode()
def logits(plain: Any, ids: list[int]) -> torch.Tensor:
    result: torch.Tensor = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return result


def table_of(plain: Any, ids: list[int]) -> np.ndarray:
    return torch.log_softmax(logits(plain, ids), dim=-1).numpy()


def logprobs(plain: Any, ids: list[int]) -> np.ndarray:
    result: np.ndarray = table_of(plain, ids)[np.arange(len(ids) - 1), ids[1:]]
    return result


def right(plain: Any, samples: Iterable[Sample]) -> None:
    """The raw log-probs of samples match the model."""
    for sample in samples:
        expected = logprobs(plain, [*sample.prompt_ids, *sample.token_ids])
        close(np.array(sample.raw_logprobs), expected[len(sample.prompt_ids) - 1 :])


def close(actual: np.ndarray, expected: np.ndarray, scale: float = 1.0) -> None:
    error = np.abs(actual - expected).max() / max(np.abs(expected).max(), scale)
    assert error < 1e-4, f"relative error {error}"


def test_docs_table_lists_every_family() -> None:
    page = PAGE.read_text()
    if SOAK:
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(OUTCOMES) + END + rest.partition(END)[2])
    outcomes = from_table(PAGE.read_text())
    assert set(outcomes) == {(case.kind, case.name) for case in cases()}
