"""Every decoder family of the installed transformers, from disk: equal to plain transformers, or refused in one line.

All of them run with PLAUDIT_SOAK set, which writes the table in docs/core.md; a tenth of them in the slow stage,
another one every day (tests/rotation.py); a handful always. What a run finds must be what the table says.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.core.proof.stand_in import tokens_for
from plaudit.errors import ModelError
from tests.core.families import BEGIN, END, MAPPINGS, PROVED, Case, cases, from_table, on_disk, reason, table
from tests.rotation import DAY, SOAK, in_turn

PAGE = Path(__file__).parents[2] / "docs" / "core.md"
ALWAYS = {
    "causal diffllama", "causal doge", "causal ministral3", "causal qwen2_moe, use_sliding_window",
    "sequence modernbert-decoder", "sequence eurobert", "sequence qwen3",
}  # fmt: skip
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
        (as_policy if case.kind == "causal" else as_reward)(engine, plain)
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
    for sample in engine.generate(prompts, SamplingParams(seed=3, max_tokens=24, ignore_eos=True)):
        whole = logprobs(plain, [*sample.prompt_ids, *sample.token_ids])
        close(np.array(sample.raw_logprobs), whole[len(sample.prompt_ids) - 1 :])


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


def logprobs(plain: Any, ids: list[int]) -> np.ndarray:
    said = torch.log_softmax(logits(plain, ids), dim=-1)
    return said[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


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
