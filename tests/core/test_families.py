"""Every decoder family of the installed transformers, from disk: equal to plain transformers, or refused in one line.

All of them run with PLAUDIT_SOAK set, which writes the table in docs/core.md; a tenth in the slow stage, a different
one every day (tests/rotation.py); a few always. The results of a run must match the table.
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
    every = cases()
    return [
        pytest.param(case, id=str(case), marks=() if SOAK or str(case) in ALWAYS else pytest.mark.slow)
        for i, case in enumerate(every)
        if str(case) in ALWAYS or in_turn(i, 10)
    ]


@pytest.mark.parametrize("case", chosen())
def test_equal_or_refused(case: Case, tmp_path: Path) -> None:
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
    for got in (engine.logprobs(ids), engine.logprobs(ids, cache=True), [engine.logprobs([s])[0] for s in ids]):
        for g, e in zip(got, expected, strict=True):
            close(g, e)
    prompts = [s[:30] for s in ids]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for samples in (engine.generate(prompts, greedy), [engine.generate([p], greedy)[0] for p in prompts]):
        for sample in samples:
            own = logits(plain, [*sample.prompt_ids, *sample.token_ids])[len(sample.prompt_ids) - 1 : -1]
            best = own.max(dim=-1).values - own[torch.arange(16), torch.tensor(sample.token_ids)]
            assert float(best.max()) < 1e-4 * float(own.abs().max())
    right(plain, engine.generate(prompts, SamplingParams(seed=3, max_tokens=24, ignore_eos=True)))


def as_policy_under_pressure(engine: Engine, plain: Any) -> None:
    """Found again at every border of a block and beside it, forked, and thrown out by others."""
    module, shape = engine.decoder.module, engine.decoder
    whole, other = tokens_for(plain, 5, 50), tokens_for(plain, 6, 9)
    tree = Engine(module, state_every=BLOCK)
    tree.score([whole], columns=[5], cache=True)
    for shared in (1, 15, 16, 17, 31, 32, 33, 47, 48, 49):
        branch = [*whole[:shared], *other]
        close(tree.score([branch], columns=[5, 11], logprobs=True, cache=True)[0], table_of(plain, branch)[-1, [5, 11]])
    tree.check()
    prompts = [tokens_for(plain, seed, length) for seed, length in enumerate((37, 32, 5))]
    right(plain, tree.generate(prompts, SamplingParams(n=3, max_tokens=12, seed=1, ignore_eos=True)))
    assert tree.stats().tokens_shared > 0
    state, block = shape.state_bytes(), BLOCK * shape.token_bytes()
    small = Engine(
        module, kv_bytes=max(16 * state, 8 * state + 14 * block), budget=32, max_running=4, state_every=BLOCK
    )
    share = small.stats().blocks_total * BLOCK // 4  # of each that runs: all of them need more
    right(plain, small.generate(prompts, SamplingParams(n=2, max_tokens=share, seed=2, ignore_eos=True)))
    assert small.stats().preemptions > 0
    small.check()


def as_learner(engine: Engine, plain: Any) -> None:
    """Packed, with a beginning that is computed once: the gradients of the sequences one by one. In float64 throughout,
    for with such weights the roundings of float32 grow to 1e-4 in either, and those of a float32 softmax in float64 to
    1e-5 (docs/log/family-gradients.md)."""
    module = engine.decoder.module
    for each in (module, plain):
        each.double().set_experts_implementation("eager")  # torch's grouped product has no float64
    ids = [tokens_for(plain, seed, length) for seed, length in enumerate((37, 9))]
    ids = sorted([*ids, [*ids[0][:20], *ids[1]], ids[0][:21]])
    tree = pack_tree(ids, lone=False)
    with Doubles():
        rows = packed_rows(module, tree.packed)
        assert len(rows) < sum(map(len, ids))
        ours = torch.cat([rows[torch.from_numpy(at)] for at in tree.rows])
        own = torch.cat([rows_of(plain, s) for s in ids])
        weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
        for result in (ours, own):
            (result * weights).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    least = 1e-2 * max(float(grad.abs().max()) for grad in expected.values())  # a bias of keys has none but roundings
    got = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        scale = max(float(expected[name].abs().max()), least)
        assert float((grad - expected[name]).abs().max()) < GRADIENT * scale, name


def rows_of(plain: Any, ids: list[int]) -> torch.Tensor:
    trunk = getattr(plain, "model", None) or plain.base_model
    rows: torch.Tensor = trunk(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    return rows


def as_reward(engine: Engine, plain: Any) -> None:
    ids = [tokens_for(plain, seed, length) for seed, length in enumerate((64, 37, 5))]
    ids.append([*ids[0][:40], *ids[1]])  # shares its beginning with the first
    expected = [logits(plain, s).numpy() for s in ids]
    scale = float(np.abs(expected).max())
    for cache in (False, True, True):
        for g, e in zip(engine.score(ids, cache=cache), expected, strict=True):
            close(g, e, scale)
    for s, e in zip(ids, expected, strict=True):
        close(engine.score([s])[0], e, scale)


@torch.inference_mode()
def logits(plain: Any, ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return found


def table_of(plain: Any, ids: list[int]) -> np.ndarray:
    return torch.log_softmax(logits(plain, ids), dim=-1).numpy()


def logprobs(plain: Any, ids: list[int]) -> np.ndarray:
    found: np.ndarray = table_of(plain, ids)[np.arange(len(ids) - 1), ids[1:]]
    return found


def right(plain: Any, samples: Iterable[Sample]) -> None:
    """The log-probs that samples were drawn with are the model's own."""
    for sample in samples:
        whole = logprobs(plain, [*sample.prompt_ids, *sample.token_ids])
        close(np.array(sample.raw_logprobs), whole[len(sample.prompt_ids) - 1 :])


def close(got: np.ndarray, expected: np.ndarray, scale: float = 1.0) -> None:
    error = np.abs(got - expected).max() / max(np.abs(expected).max(), scale)
    assert error < 1e-4, f"relative error {error}"


def test_the_table_has_every_family() -> None:
    page = PAGE.read_text()
    if SOAK:
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(OUTCOMES) + END + rest.partition(END)[2])
    said = from_table(PAGE.read_text())
    assert set(said) == {(case.kind, case.name) for case in cases()}
