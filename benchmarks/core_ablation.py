"""Speedup from each optimization of the core, added one at a time, with the largest difference of scores at every
stage.

    python benchmarks/core_ablation.py            on a GPU: scoring and generation; on a CPU: scoring alone

Scoring reads two vocabulary columns at the last token, as a process reward model does, for groups of responses that
share a prompt. Generation times whole calls.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from stamp import processor, stamp
from transformers import LlamaConfig, LlamaForCausalLM

from plaudit.core import Engine, SamplingParams
from plaudit.core.model.packing import pack
from plaudit.core.sampling.noise import row_key, token_hashes
from plaudit.core.sampling.sampler import Sampler

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPE = (2048, 16, 32, 8, 8192) if GPU else (256, 6, 8, 4, 768)
VOCABULARY = 49152
COLUMNS = (101, 202)
GROUPS, RESPONSES, PROMPT, ANSWER = (16, 16, 1024, 5.8) if GPU else (8, 8, 256, 4.0)
RESULTS = Path("benchmarks/results") / f"core_ablation_{DEVICE}.json"


def build() -> Any:
    torch.manual_seed(0)
    hidden, layers, heads, kv_heads, ffn = SHAPE
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=ffn, vocab_size=VOCABULARY, max_position_embeddings=4096, pad_token_id=0,
    )  # fmt: skip
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).to(torch.bfloat16 if GPU else torch.float32).eval()


def seconds(work: Callable[[], Any], repeats: int = 2) -> tuple[float, Any]:
    result, best = work(), float("inf")
    for _ in range(repeats):
        _wait()
        begin = time.perf_counter()
        result = work()
        _wait()
        best = min(best, time.perf_counter() - begin)
    return best, result


def _wait() -> None:
    if GPU:
        torch.cuda.synchronize()


@torch.inference_mode()
def padded(module: Any, sequences: list[list[int]]) -> np.ndarray:
    """The usual way to call transformers: padded batches of 16, logits of every token."""
    module.set_attn_implementation("sdpa")
    out = np.zeros((len(sequences), len(COLUMNS)))
    for start in range(0, len(sequences), 16):
        chosen = sequences[start : start + 16]
        longest = max(map(len, chosen))
        ids = torch.tensor([s + [0] * (longest - len(s)) for s in chosen], device=DEVICE)
        mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in chosen], device=DEVICE)
        logits = module(input_ids=ids, attention_mask=mask).logits
        for row, s in enumerate(chosen):
            out[start + row] = logits[row, len(s) - 1, list(COLUMNS)].float().cpu().numpy()
        del logits
    return out


@torch.inference_mode()
def packed(engine: Engine, sequences: list[list[int]], *, whole_head: bool) -> np.ndarray:
    """The core's packed forward without prefix sharing; the head runs on all tokens or only on those that are read."""
    out: list[np.ndarray] = []
    batch: list[list[int]] = []
    for s in [*sequences, None]:
        if (s is not None and sum(map(len, batch)) + len(s) <= engine.budget) or not batch:
            batch.append(s)  # type: ignore[arg-type]
            continue
        row = pack(batch, DEVICE)
        last = torch.tensor([a + n - 1 for a, n in zip(row.starts, row.lengths, strict=True)], device=DEVICE)
        if whole_head:
            everything = torch.arange(row.input_ids.shape[1], device=DEVICE)
            hidden = engine.backend.rows(row, everything)
            logits = torch.cat([engine.decoder.logits(part)[:, list(COLUMNS)] for part in hidden.split(2048)])
            out.append(logits[last].float().cpu().numpy())
        else:
            out.append(engine.decoder.columns(engine.backend.rows(row, last), COLUMNS).cpu().numpy())
        batch = [s] if s is not None else []
    return np.concatenate(out)


def scoring(module: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    sequences: list[list[int]] = []
    for _ in range(GROUPS):
        prompt = rng.integers(5, VOCABULARY, PROMPT).tolist()
        for length in np.clip(rng.lognormal(ANSWER, 0.6, RESPONSES), 8, 2000).astype(int):
            sequences.append(prompt + rng.integers(5, VOCABULARY, length).tolist())
    engine = Engine(module, kv_bytes=2**28)
    stages: list[tuple[str, Callable[[], np.ndarray]]] = [
        ("naive: transformers, padded, all logits", lambda: padded(module, sequences)),
        ("packed", lambda: packed(engine, sequences, whole_head=True)),
        ("no full head", lambda: packed(engine, sequences, whole_head=False)),
        ("shared prefixes", lambda: np.stack(engine.score(sequences, columns=COLUMNS))),
    ]
    rows: list[dict[str, Any]] = []
    reference = None
    for name, work in stages:
        took, scores = seconds(work)
        reference = scores if reference is None else reference
        difference = float(np.abs(scores - reference).max())
        rows.append({"stage": name, "value": len(sequences) / took, "unit": "samples/s", "difference": difference})
    return rows


@torch.inference_mode()
def decode_eagerly(engine: Engine, prompts: list[list[int]], new: int) -> None:
    """The same kernels without CUDA graphs: every launch and every token goes through the host."""
    from plaudit.core.device.cuda import DecodeLayout

    backend: Any = engine.backend
    rows, blocks = len(prompts), -(-(len(prompts[0]) + new) // engine.backend.block_size)
    from plaudit.core.device.backend import Span

    tables = np.arange(rows * blocks).reshape(rows, blocks)
    for start in range(0, rows, 128):
        part = range(start, min(rows, start + 128))
        backend.forward([Span(prompts[i], 0, tables[i].tolist(), [len(prompts[i]) - 1]) for i in part], [])
    tokens = torch.tensor([p[-1] for p in prompts], device="cuda")
    positions = torch.full((rows,), len(prompts[0]) - 1, device="cuda")
    layout = DecodeLayout(backend.cache, backend.block_size, torch.from_numpy(tables).int().cuda(), positions, 1)
    sampler = Sampler(
        [SamplingParams()] * rows, [row_key(1, i) for i in range(rows)], [frozenset()] * rows,
        token_hashes(VOCABULARY, torch.device("cuda")),
    )  # fmt: skip
    for step in range(new):
        with backend.fusion.applied():
            hidden = engine.decoder.hidden(tokens[None], positions[None], layout)
        drawn = sampler.draw(engine.decoder.logits(hidden), torch.full((rows,), step, device="cuda"))
        tokens = torch.tensor(drawn.tokens.tolist(), device="cuda")
        positions += 1


def generation(module: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    count, new = 512, 128
    params = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, seed=1)

    def prompts() -> list[list[int]]:
        return [rng.integers(5, VOCABULARY, 128).tolist() for _ in range(count)]

    stepwise = Engine(module, kv_bytes=8 * 2**30, look_every=1)
    stepwise.generate(prompts()[:8], SamplingParams(max_tokens=2))
    eager, _ = seconds(lambda: decode_eagerly(stepwise, prompts(), new), 1)
    graphs, _ = seconds(lambda: stepwise.generate(prompts(), params), 1)
    stepwise.sleep()
    resident = Engine(module, kv_bytes=8 * 2**30)
    looked, _ = seconds(lambda: resident.generate(prompts(), params))
    stages = (("our kernels, eager", eager), ("graphs", graphs), ("device-resident decode", looked))
    return [{"stage": name, "value": count * new / took, "unit": "tokens/s"} for name, took in stages]


def main() -> None:
    module = build()
    rows = scoring(module) + (generation(module) if GPU else [])
    table = Table(title=f"ablation on {torch.cuda.get_device_name() if GPU else platform.machine()}")
    for heading in ("stage", "value", "unit", "largest difference"):
        table.add_column(heading, justify="left" if heading in ("stage", "unit") else "right")
    for row in rows:
        difference = f"{row['difference']:.2g}" if "difference" in row else "-"
        table.add_row(row["stage"], f"{row['value']:,.1f}", row["unit"], difference)
    Console(width=110).print(table)
    plain = version("transformers"), "padded batches, all logits, sdpa"
    record = stamp(__file__, torch.cuda.get_device_name() if GPU else processor(), {"transformers": plain})
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({**record, "stages": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
