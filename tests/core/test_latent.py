"""Latent KV of MLA models: what is cached and computed, and that other code is unaffected. Equality with transformers
and bit-identity are tested as for every family (test_equality.py, test_exact.py, test_families.py)."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV2Config

from plaudit.core import Engine, SamplingParams
from plaudit.core.device import cpu_decode
from plaudit.core.model import latent, varlen
from plaudit.core.model.decoder import LayerShape
from plaudit.core.model.fused import fused_rows
from plaudit.core.model.packing import hidden_rows, pack, pack_tree, use_packed_attention
from tests.core import families, interpreter, tiny  # noqa: F401
from tests.rotation import mostly_slow

FAMILIES = [
    "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "minicpm3", "mistral4",
    "youtu",
]  # fmt: skip
IDS = tiny.sequences(3, 5, 4, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=30)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def layers_of(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if hasattr(part, "expand_kv")]


@pytest.mark.parametrize("family", FAMILIES)
def test_latent_attention_of_every_family_is_recognised(family: str) -> None:
    case_of_family = {case.name: case for case in families.cases() if case.kind != "multimodal"}[family]
    with torch.device("meta"):
        module = families.MAPPINGS[case_of_family.kind][0].from_config(families.tiny_config(case_of_family))
    parts = layers_of(module)
    assert parts
    latent.pack_latents(module)
    assert all(part.expand_kv.__func__ is latent._kept for part in parts)


def test_modified_expand_kv_is_not_replaced() -> None:
    layer = layers_of(tiny.model("deepseek_v3"))[0]

    class Swapped(type(layer)):  # type: ignore[misc]
        def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = super().expand_kv(kv_nope, k_rot)
            return keys.flip(1), values

    class Needy(type(layer)):  # type: ignore[misc]
        def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().expand_kv(kv_nope * self.another_scale, k_rot)  # type: ignore[no-any-return]

    assert [latent._expands(kind) for kind in (type(layer), Swapped, Needy)] == [True, False, False]
    biased = SimpleNamespace(bias=torch.zeros(4), weight=torch.zeros(4, 3))
    assert not latent._absorbs(biased)


def test_token_of_the_v2_lite_shape_caches_576_numbers_per_layer() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
    config = DeepseekV2Config(
        **sizes, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=2,
        n_routed_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(3)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    engine = Engine(module, kv_bytes=64 * 2 * 4 * 576)
    assert engine.decoder.layers == (LayerShape(1, 576, 0),) * 2
    assert engine.decoder.token_bytes() == 2 * 576 * 4  # instead of 2 * 16 * (192 + 128) * 4
    assert engine.stats().blocks_total == 64 // engine.backend.block_size
    ids = [[3 + (5 * i + j * j) % 60 for j in range(6 + 4 * i)] for i in range(3)]
    for actual, sequence in zip(engine.logprobs(ids, cache=True), ids, strict=True):
        np.testing.assert_allclose(actual, tiny.plain_logprobs(module, sequence), atol=1e-4, rtol=0)
    cache = engine.backend.cache
    assert sum(layer.nbytes for layer in (*cache.keys, *cache.values)) == 64 * 2 * 4 * 576


def loss(rows: torch.Tensor) -> torch.Tensor:
    return (rows * torch.sin(torch.arange(rows.numel(), dtype=rows.dtype)).view_as(rows)).sum()


def gradients(module: nn.Module, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss(rows).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_match_the_plain_module(shared: bool) -> None:
    module = tiny.model("deepseek_v3")
    ids = [[*IDS[4][:9], *part] for part in IDS] if shared else IDS
    plain = copy.deepcopy(module)
    expected = gradients(
        plain, torch.cat([plain.model(input_ids=torch.tensor([s]), use_cache=False).last_hidden_state[0] for s in ids])
    )
    use_packed_attention(module)
    ids = ids if not shared else sorted(ids)
    for run in (hidden_rows, fused_rows):
        packed = pack_tree(ids, lone=False) if shared else None
        rows = run(module, pack(ids, lone=False) if packed is None else packed.packed)
        if packed is not None:
            order = [ids.index(s) for s in [[*IDS[4][:9], *part] for part in IDS]]
            rows = torch.cat([rows[torch.from_numpy(packed.rows[i])] for i in order])
        actual = gradients(module, rows)
        assert actual.keys() == expected.keys()
        for name, grad in actual.items():
            assert (grad - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name


@pytest.mark.slow
def test_adapter_on_the_absorbed_matrix_is_applied_and_trained() -> None:
    module = tiny.model("deepseek_v3")
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["kv_b_proj", "q_b_proj"], init_lora_weights=False)
    model: Any = get_peft_model(module, config).eval()
    engine, plain = Engine(model), model.get_base_model()
    assert engine.decoder.layers[0] == LayerShape(1, 32, 0)
    for actual, ids in zip(engine.logprobs(IDS, cache=True), IDS, strict=True):
        np.testing.assert_allclose(actual, tiny.plain_logprobs(plain, ids), atol=1e-4, rtol=0)
    tokens = [list(s.token_ids) for s in engine.generate(IDS, GREEDY)]
    assert tokens == [tiny.plain_greedy(plain, ids, 30) for ids in IDS]
    packed = pack(IDS, lone=False)
    actual_gradients = gradients(plain, hidden_rows(plain, packed))
    plain.set_attn_implementation("eager")
    plain_rows = torch.cat(
        [plain.model(input_ids=torch.tensor([s]), use_cache=False).last_hidden_state[0] for s in IDS]
    )
    expected = gradients(plain, plain_rows)
    assert any("kv_b_proj.lora_A" in name for name in actual_gradients)
    for name, grad in actual_gradients.items():
        assert (grad - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name


def test_adapter_with_dropout_is_not_absorbed_in_training_mode() -> None:
    """Dropout differs per token, which a merged matrix cannot express, so training then uses expanded keys."""
    module = tiny.model("deepseek_v3")
    config = LoraConfig(r=4, target_modules=["kv_b_proj"], lora_dropout=0.5)
    part = layers_of(get_peft_model(module, config).get_base_model())[0]  # type: ignore[arg-type]
    assert [latent._absorbs(part.train(mode).kv_b_proj) for mode in (False, True)] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("workspace", [2**26, 0])
def test_decoding_in_short_windows_and_from_blocks_matches_transformers(
    workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_decode, "WORKSPACE", workspace)
    monkeypatch.setattr(cpu_decode, "STEPS", 8)
    module = tiny.model("deepseek_v3")
    expected = [tiny.plain_greedy(module, ids, 30) for ids in IDS]
    engine = Engine(module, kv_bytes=20 * 16 * 256)
    assert [list(s.token_ids) for s in engine.generate(IDS, GREEDY)] == expected


def test_module_works_unchanged_with_another_attention_implementation() -> None:
    module = tiny.model("deepseek_v3")
    Engine(module).logprobs(IDS)
    other = copy.deepcopy(module)
    assert layers_of(other)[0].expand_kv.__self__ is layers_of(other)[0]
    for copied in (module, other):
        copied.set_attn_implementation("sdpa")  # type: ignore[operator]
        with torch.no_grad():
            logits = copied(input_ids=torch.tensor([IDS[4]])).logits[0]
        torch.testing.assert_close(logits, tiny.plain(copied, IDS[4]), atol=1e-4, rtol=1e-4)


# Kernels. Without a GPU they run in Triton's interpreter.

kernels = pytest.importorskip("plaudit.core.kernels")

from plaudit.core.device.backend import Span  # noqa: E402
from plaudit.core.device.cuda import DecodeLayout, StoredLayout  # noqa: E402
from plaudit.core.device.paged import PagedBackend  # noqa: E402
from plaudit.core.proof.support import inspect  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 3e-5 if actual.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33])
def test_heads_product(rows: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, 3, 40, dtype=dtype)[..., :24], randn(3, 30, 72, dtype=dtype)
    for matrices in (weight[:, :24], weight[:, :24].transpose(1, 2).contiguous().transpose(1, 2)):
        actual = kernels.heads_product(x, matrices)
        close(actual, torch.einsum("thi,hio->tho", x.float(), matrices.float()).to(dtype))


def attended(query: torch.Tensor, rows: torch.Tensor, rank: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (H, R) of one query (H, D) over rows (n, D), and the logsumexp of its scores."""
    scores = query.float() @ rows.float().T * scale
    return scores.softmax(-1) @ rows[:, :rank].float(), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rotated"), [(4, 24, 8), (20, 32, 16)])
@pytest.mark.parametrize("splits", mostly_slow([1, 3]))
def test_latent_attention_of_a_decode_step(
    splits: int, heads: int, rank: int, rotated: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plaudit.core.kernels.latent.SEGMENT", 32)
    lengths, width = [1, 16, 17, 130], rank + rotated
    rows = randn(4 * 192, 1, width, dtype=dtype)
    tables = torch.randperm(12, device=DEVICE).view(4, 3).int()
    query, positions = randn(4, heads, width, dtype=dtype), torch.tensor(lengths, device=DEVICE) - 1
    used = torch.zeros(4 * 192, dtype=torch.bool)
    slots = [[int(tables[i, n // 64]) * 64 + n % 64 for n in range(length)] for i, length in enumerate(lengths)]
    used[[slot for row in slots for slot in row]] = True
    rows[~used.to(DEVICE)] = float("nan")
    actual = kernels.latent_attention(query, rows, rank, positions, scale=0.3, tables=tables, size=64, splits=splits)
    for i, row_slots in enumerate(slots):
        close(actual[i], attended(query[i], rows[row_slots, 0], rank, 0.3)[0].to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_latent_attention_of_prefill_is_bit_identical_to_decode(
    scattered: bool, tiled: bool, dtype: torch.dtype
) -> None:
    lengths, rank, width = [5, 1, 20], 24, 32
    rows = randn(64, 1, width, dtype=dtype)
    places = torch.randperm(64, device=DEVICE)[:26] if scattered else torch.arange(26, device=DEVICE)
    query, sums = randn(26, 4, width, dtype=dtype), torch.empty(4, 26, device=DEVICE)
    offsets = [0, 5, 6]
    starts = torch.tensor([b for b, n in zip(offsets, lengths, strict=True) for _ in range(n)], device=DEVICE).int()
    positions = torch.tensor([i for n in lengths for i in range(n)], device=DEVICE).int()
    actual = kernels.latent_attention(
        query, rows, rank, positions, scale=0.3, starts=starts, places=places if scattered else None,
        tiles=torch.from_numpy(kernels.latent_tiles(lengths)).to(DEVICE) if tiled else None, sums=sums,
    )  # fmt: skip
    for i, (start, position) in enumerate(zip(starts.tolist(), positions.tolist(), strict=True)):
        out, log = attended(query[i], rows[places[start : start + position + 1], 0], rank, 0.3)
        close(actual[i], out.to(dtype))
        torch.testing.assert_close(sums[:, i], log, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 2e-2)
    block = torch.nn.functional.pad(rows[places[6:]], (0, 0, 0, 0, 64, 44), value=float("nan"))  # second of two blocks
    tables = torch.ones(20, 1, dtype=torch.int32, device=DEVICE)
    decoded = kernels.latent_attention(
        query[6:], block, rank, positions[6:], scale=0.3, tables=tables, size=64, splits=2
    )  # fmt: skip
    assert torch.equal(actual[6:], decoded)


def test_latent_tiles_hold_rows_of_one_sequence_and_start_with_the_last_rows() -> None:
    tiles = kernels.latent_tiles([5, 1, 9]).tolist()
    assert tiles == [[14, 1], [4, 1], [10, 4], [0, 4], [5, 1], [6, 4]]


class Blocks(PagedBackend):
    """Only the KV cache: the test calls the trunk directly."""

    block_size = 64
    rows = forward = decode = None  # type: ignore[assignment]


@pytest.mark.slow
def test_gpu_layouts_match_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, selected rows, a prompt continued from the cache, and one decoded token each."""
    monkeypatch.setattr(varlen, "HALF", (torch.float32,))  # on a GPU the kernels are used for half precision
    decoder = inspect(tiny.model("deepseek_v3").to(DEVICE))
    ids, shape = [s[:9] for s in IDS[:3]], LayerShape(1, 32, 0)
    assert decoder.layers == (shape, shape)
    with torch.inference_mode():
        expected_rows = [torch.cat([decoder.trunk(input_ids=torch.tensor([s], device=DEVICE), use_cache=False,
                 layout=pack([s], DEVICE).layout).last_hidden_state[0]]) for s in ids]  # fmt: skip
        backend = Blocks(decoder)
        backend.open(9)
        tables = torch.randperm(9).view(3, 3).int()

        def read(first: int, end: int) -> torch.Tensor:
            spans = [Span(s[first:end], first, t, []) for s, t in zip(ids, tables.tolist(), strict=True)]
            step = backend.arrange(spans, [])
            layout = StoredLayout(step, backend.cache, decoder.device)
            rows = decoder.hidden(step.input_ids, step.position_ids, layout)
            last = torch.tensor([(end - first) * (i + 1) - 1 for i in range(3)], device=DEVICE)
            narrow = backend.wanted._narrow(step.input_ids, step.position_ids, layout, last)
            torch.testing.assert_close(narrow, rows[last], rtol=1e-4, atol=1e-4)
            return rows

        length = min(map(len, ids))
        rows = torch.cat([read(0, 2).view(3, 2, -1), read(2, length - 1).view(3, length - 3, -1)], 1)
        tokens = torch.tensor([s[length - 1] for s in ids], device=DEVICE)
        positions = torch.full((3,), length - 1, device=DEVICE)
        decoding = DecodeLayout(backend.cache, backend.block_size, tables.to(DEVICE), positions, splits=2)
        rows = torch.cat([rows, decoder.hidden(tokens[None], positions[None], decoding)[:, None]], 1)
        for actual, expected in zip(rows, expected_rows, strict=True):
            torch.testing.assert_close(actual, expected[:length], rtol=1e-4, atol=1e-4)
