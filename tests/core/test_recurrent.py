"""Models with recurrent or convolution layers beside attention: equal to plain transformers, including states."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    NemotronHConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

from plaudit.config.placement import EngineTable
from plaudit.config.search import GenerationTable
from plaudit.core import Engine, SamplingParams
from plaudit.core import engine as engine_module
from plaudit.core.device.backend import DecodeBatch, Decoded
from plaudit.core.device.cpu import CpuBackend
from plaudit.core.device.cpu_decode import DecodeWindow
from plaudit.core.device.mixing import GraphStates
from plaudit.core.kv.blocks import BlockPool
from plaudit.core.model.mixers import Mixer
from plaudit.core.model.packing import hidden_rows, pack_tree, use_packed_attention
from plaudit.core.states import EVERY, StateBank, StateTable
from plaudit.errors import ConfigError, RequestError
from plaudit.models import load_policy
from plaudit.models.heads.value_head import ValueModel
from plaudit.rl.loop import RlTraining
from plaudit.train.optim.sharding import packed_rows
from plaudit.train.run.run import Run
from tests.core import tiny
from tests.rotation import mostly_slow
from tests.train.rl_world import Silent, recipe

LINEAR = ["linear_attention", "full_attention"]
CONFIGS: dict[str, Any] = {
    "lfm2": Lfm2Config(**tiny.GROUPED, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "qwen3_next": Qwen3NextConfig(
        **tiny.GROUPED, head_dim=16, layer_types=LINEAR, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0, mlp_only_layers=[0, 1],
    ),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **tiny.GROUPED, layer_types=LINEAR, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8,
        num_local_experts=0, shared_intermediate_size=48,
    ),
}  # fmt: skip
# For the kernels: families with the same recurrent layers inside other modules, and KDA.
KERNELS: dict[str, Any] = {
    "bamba": BambaConfig(
        **tiny.GROUPED, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8,
    ),
    "falcon_h1": FalconH1Config(
        **tiny.GROUPED, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2,
        mamba_chunk_size=8,
    ),
    "kimi_linear": KimiLinearConfig(
        **{**tiny.GROUPED, "num_key_value_heads": 4}, layer_types=LINEAR, mlp_layer_types=["dense", "dense"],
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, linear_head_dim=8, linear_num_heads=4,
    ),
    "nemotron_h": NemotronHConfig(
        **{key: value for key, value in tiny.GROUPED.items() if key not in ("num_hidden_layers", "initializer_range")},
        layers_block_type=LINEAR, head_dim=8, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=2,
        chunk_size=8, initializer_range=0.1,
    ),
    "zamba2": Zamba2Config(
        **tiny.GROUPED, layers_block_type=["linear_attention", "hybrid"], n_mamba_heads=4, mamba_d_state=8,
        mamba_ngroups=2, chunk_size=8, num_mem_blocks=1, adapter_rank=8,
    ),
}  # fmt: skip
FAMILIES = sorted(CONFIGS)
BLOCK = 16
MODELS: dict[str, nn.Module] = {}


def model(family: str) -> Any:
    if family not in MODELS:
        torch.manual_seed(7)
        config = copy.deepcopy({**CONFIGS, **KERNELS}[family])
        MODELS[family] = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        MODELS[family].eval()
    return MODELS[family]


def engine_of(module: nn.Module, **options: Any) -> Engine:
    return Engine(module, **{"state_every": BLOCK, **options})


def right(module: nn.Module, samples: Any) -> None:
    """The raw log-probs of samples match the model."""
    for sample in samples:
        sequence = [*sample.prompt_ids, *sample.token_ids]
        close(np.array(sample.raw_logprobs), tiny.plain_logprobs(module, sequence)[len(sample.prompt_ids) - 1 :])


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    error = np.abs(actual - expected).max() / max(np.abs(expected).max(), 1.0)
    assert error < 1e-4, f"relative error {error}"


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_mamba_step_limits_apply_to_decoded_tokens_too(family: str) -> None:
    """transformers applies the lower bound on Mamba-2 step sizes in prefill but not when decoding one token."""
    module = copy.deepcopy(model(family))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("dt_bias"):
                parameter.fill_(-9.0)  # steps of 0.0001, below the limit of 0.001
            elif name.endswith(".D"):
                parameter.zero_()
    prompts = tiny.sequences(3, 3, 20, 40)
    right(module, engine_of(module).generate(prompts, SamplingParams(max_tokens=40, seed=1, ignore_eos=True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_alone_batched_and_cached_match_transformers(family: str) -> None:
    module = model(family)
    engine = engine_of(module, budget=48)  # so that prefill is chunked
    ids = tiny.sequences(1, 6, 2, 70)
    expected = [tiny.plain_logprobs(module, s) for s in ids]
    cached = (engine.logprobs(ids, cache=True) for _ in range(2))
    for actual in (engine.logprobs(ids), *cached, [engine.logprobs([s])[0] for s in ids]):
        for g, e in zip(actual, expected, strict=True):
            close(g, e)
    engine.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_hits_at_block_borders_recompute_only_the_rest(family: str) -> None:
    module = model(family)
    sequence = tiny.sequences(2, 1, 50, 50)[0]
    engine = engine_of(module)
    engine.score([sequence], columns=[5], cache=True)
    for shared in range(1, 50, 7):
        branch = [*sequence[:shared], *tiny.sequences(shared, 1, 20, 20)[0]]
        before = engine.stats().tokens_computed
        actual = engine.score([branch], columns=[5, 11], logprobs=True, cache=True)[0]
        close(actual, torch.log_softmax(tiny.plain(module, branch)[-1].float(), -1)[[5, 11]].numpy())
        assert engine.stats().tokens_computed - before == len(branch) - shared // BLOCK * BLOCK
    engine.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_of_several_samples_is_computed_once(family: str) -> None:
    module = model(family)
    engine = engine_of(module, state_every=64)
    prompts = tiny.sequences(3, 4, 37, 37)
    samples = engine.generate(prompts, SamplingParams(n=4, max_tokens=1, seed=1, ignore_eos=True))
    stats = engine.stats()
    # Each prompt once, and its last token for each of the other three samples.
    assert stats.tokens_computed == 4 * 37 + 4 * 3
    right(module, samples)
    right(module, engine.generate(prompts, SamplingParams(n=4, max_tokens=30, seed=2, ignore_eos=True)))
    assert engine.stats().tokens_computed - stats.tokens_computed == 16 * 30  # of the prompts only the last tokens
    engine.check()


@pytest.mark.slow
def test_32_prompts_of_1024_tokens_with_16_samples_compute_each_prompt_once() -> None:
    samples = 16
    torch.manual_seed(7)
    config = copy.deepcopy(CONFIGS["lfm2"])
    config.max_position_embeddings = 2048
    engine = Engine(AutoModelForCausalLM.from_config(config).eval())  # with the default state spacing and limits
    prompts = tiny.sequences(3, 32, 1024, 1024)
    engine.generate(prompts, SamplingParams(n=samples, max_tokens=2, seed=1, ignore_eos=True))
    ends = 32 * (samples - 1)  # for each other sample only the last prompt token is computed
    assert engine.stats().tokens_computed == 32 * 1024 + ends + 32 * samples
    engine.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_match_transformers(family: str) -> None:
    module = model(family)
    prompts = tiny.sequences(4, 5, 1, 40)
    expected = [tiny.plain_greedy(module, p, 24) for p in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    engine = engine_of(module)
    for _ in range(2):  # the second time with prefix hits
        assert [list(s.token_ids) for s in engine.generate(prompts, greedy)] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_sequences_resume_with_correct_logprobs(family: str) -> None:
    module = model(family)
    decoder = engine_of(module).decoder
    state, block = decoder.state_bytes(), BLOCK * decoder.token_bytes()
    small = engine_of(module, kv_bytes=max(16 * state, 8 * state + 10 * block), budget=32, max_running=4)
    samples = small.generate(tiny.sequences(4, 5, 5, 20), SamplingParams(max_tokens=80, seed=6, ignore_eos=True))
    assert small.stats().preemptions > 0
    right(module, samples)
    small.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_finished_sequence_resumes_from_its_cached_state(family: str) -> None:
    module = model(family)
    engine = engine_of(module, state_every=64)
    first = engine.generate([tiny.sequences(5, 1, 21, 21)[0]], SamplingParams(max_tokens=9, seed=3, ignore_eos=True))[0]
    before = engine.stats().tokens_computed
    continued = [*first.prompt_ids, *first.token_ids, 7, 8]
    right(module, engine.generate([continued], SamplingParams(max_tokens=5, seed=4, ignore_eos=True)))
    assert engine.stats().tokens_computed - before == 3 + 4  # the last token of the response was never computed


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_packed_tree_match_the_module(family: str) -> None:
    module = copy.deepcopy(model(family)).train()
    prompt = tiny.sequences(6, 1, 20, 20)[0]
    ids = sorted([*prompt, *tail] for tail in [[5], [5, 9, 4], *tiny.sequences(7, 2, 5, 9)])
    module.set_attn_implementation("eager")
    plain_rows = torch.cat([module.model(input_ids=torch.tensor([s])).last_hidden_state[0] for s in ids])
    weights = torch.randn(plain_rows.shape, generator=torch.Generator().manual_seed(1))
    (plain_rows * weights).sum().backward()
    expected = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    use_packed_attention(module)
    tree = pack_tree(ids, lone=False)
    rows = packed_rows(module, tree.packed)
    assert len(rows) < sum(map(len, ids))  # shared
    read = torch.cat([rows[torch.from_numpy(at)] for at in tree.rows])
    assert float((read - plain_rows).detach().abs().max() / plain_rows.detach().abs().max()) < 1e-5
    (read * weights).sum().backward()
    for name, parameter in module.named_parameters():
        if name in expected:
            assert parameter.grad is not None
            scale = expected[name].abs().max().clamp(min=1e-6)
            assert float((parameter.grad - expected[name]).abs().max() / scale) < 1e-5, name


def test_copy_of_a_packed_module_uses_its_own_weights() -> None:
    module = copy.deepcopy(model("lfm2"))
    use_packed_attention(module)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    ids = tiny.sequences(8, 2, 5, 9)
    with torch.inference_mode():
        assert float(hidden_rows(twin, pack_tree(sorted(ids)).packed).abs().max()) > 0.1


def test_step_scores_of_a_value_model_match_the_module() -> None:
    torch.manual_seed(3)
    value = ValueModel(copy.deepcopy(model("lfm2")).model).eval()
    engine = engine_of(value)
    ids = tiny.sequences(9, 3, 8, 40)
    positions = [[2, len(s) - 1] for s in ids]
    with torch.inference_mode():
        value.trunk.set_attn_implementation("eager")
        all_values = [value(input_ids=torch.tensor([s]))[0].numpy().reshape(-1) for s in ids]
    expected = [values[where] for values, where in zip(all_values, positions, strict=True)]
    for cache in (False, True):
        for actual, e in zip(engine.score(ids, positions=positions, cache=cache), expected, strict=True):
            close(actual.reshape(-1), e)


def test_pool_too_small_for_a_state_is_rejected_with_the_arithmetic() -> None:
    engine = engine_of(model("lfm2"))
    state, block = engine.decoder.state_bytes(), BLOCK * engine.decoder.token_bytes()
    with pytest.raises(RequestError, match=rf"2 × {state} \+ {block} = {2 * state + block}; raise kv_bytes"):
        engine_of(model("lfm2"), kv_bytes=state)
    smallest = engine_of(model("lfm2"), kv_bytes=2 * state + 2 * block)
    right(model("lfm2"), smallest.generate(tiny.sequences(1, 2, 5, 5), SamplingParams(n=2, max_tokens=9, seed=1)))
    assert smallest.stats().kv_bytes <= 2 * state + 2 * block


def test_state_every_must_be_a_multiple_of_the_block_size() -> None:
    with pytest.raises(RequestError, match="state_every is 10 tokens, and must be a multiple of the block of 16"):
        engine_of(model("lfm2"), state_every=10)


def test_states_are_included_in_kv_memory() -> None:
    engine = engine_of(model("lfm2"))
    assert engine.kv_held() == 0
    engine.generate(tiny.sequences(1, 1, 20, 20), SamplingParams(max_tokens=1, seed=1))
    states = engine.backend.states
    assert states is not None
    assert engine.stats().states_in_use == 3  # at 16, at 19 where samples branch off, and at the end
    block = BLOCK * engine.decoder.token_bytes()
    assert engine.kv_held() == 2 * block + states.reached * engine.decoder.state_bytes()
    engine.sleep()
    assert engine.kv_held() == 0


@pytest.mark.parametrize("family", mostly_slow(FAMILIES))
def test_state_is_exported_and_imported_with_the_kv(family: str) -> None:
    """Prompt lengths around block borders; the prompts share prefixes."""
    module = model(family)
    sequence = tiny.sequences(11, 1, 50, 50)[0]
    prompts = [sequence[:n] for n in (1, 15, 16, 17, 40)] + [[*sequence[:40], 5, 6]]
    params = [SamplingParams(n=2, max_tokens=12, seed=i, ignore_eos=True) for i in range(len(prompts))]
    expected = engine_of(module).generate(prompts, params)
    first, second = engine_of(module), engine_of(module)
    begun = first.generate(prompts, [replace(p, max_tokens=1) for p in params])
    for prompt in prompts:
        handover = first.export_kv(prompt)
        assert len(handover.tokens) == len(prompt)
        assert sum(state.nbytes for state in handover.state) == first.decoder.state_bytes()
        assert second.import_kv(handover) == len(prompt)
    groups = [[s for s in begun if s.group == g] for g in range(len(prompts))]
    samples = second.generate(prompts, params, begun=groups)
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
    right(module, samples)
    assert second.stats().tokens_computed <= sum(len(s.token_ids) for s in samples)  # and no prompt tokens
    first.check()
    second.check()


def test_import_of_a_mismatched_state_is_rejected_and_without_space_skipped() -> None:
    module = model("lfm2")
    prompt = tiny.sequences(12, 1, 40, 40)[0]
    first = engine_of(module)
    first.generate([prompt], SamplingParams(max_tokens=1, seed=1))
    handover = first.export_kv(prompt)
    with pytest.raises(RequestError, match="a state of 0 tensors does not fit Lfm2ForCausalLM, which has 1"):
        engine_of(module).import_kv(replace(handover, state=[]))
    decoder = first.decoder
    small = engine_of(module, kv_bytes=2 * decoder.state_bytes() + 2 * BLOCK * decoder.token_bytes())
    assert small.import_kv(handover) == 0  # two blocks of 16 are too few, and a state covers only the full prompt
    right(module, small.generate([prompt[:9]], SamplingParams(max_tokens=3, seed=1)))
    small.check()


class RowsWindow(DecodeWindow):
    """Decodes in the rows of the state bank, as CUDA graphs do on a GPU."""

    bank: StateBank

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        carry = self.bank.rows(mixer.layer, hidden.shape[1])
        mixed = mixer(hidden[0][:, None], carry).transpose(0, 1)
        self.bank.keep_rows(mixer.layer, carry)
        return mixed


class RowsBackend(CpuBackend):
    def state_rows(self, running: int) -> int:
        return running

    def decode(self, batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        assert self.states is not None
        states = GraphStates(self.states, self.bank, batch.tables.tolist(), [n - 1 for n in batch.lengths])
        window = RowsWindow(self.cache, batch, steps, self.block_size, self.steady)
        window.bank = self.bank
        results = []
        for _ in range(steps):
            window.next()
            hidden = self.decoder.hidden(batch.tokens[None], batch.positions[None], window)
            results.append((batch.sampler.draw(self.decoder.logits(hidden), batch.drawn), batch.alive))
            batch.advance(results[-1][0].tokens)
        window.store()
        states.store(steps, results[-1][1].tolist())
        yield Decoded.of(results)


@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "lfm2")]
)
def test_decoding_in_rows_of_the_state_bank_matches_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = model(family)
    monkeypatch.setattr(engine_module, "backend_of", RowsBackend)
    run = engine_of(module, max_running=6)
    assert isinstance(run.backend, RowsBackend)
    prompts = tiny.sequences(4, 5, 2, 40)
    samples = run.generate(prompts, SamplingParams(n=2, max_tokens=45, seed=6, stop_token_ids=(7, 9)))
    assert len({len(s.token_ids) for s in samples}) > 2
    right(module, samples)
    continued = [[*s.prompt_ids, *s.token_ids, 7, 8] for s in samples]
    right(module, run.generate(continued, SamplingParams(max_tokens=20, seed=7, ignore_eos=True)))
    run.check()
    decoder = run.decoder
    state, block = decoder.state_bytes(), BLOCK * decoder.token_bytes()
    small = engine_of(module, kv_bytes=max(24 * state, 12 * state + 10 * block), budget=32, max_running=4)
    right(module, small.generate(prompts, SamplingParams(max_tokens=80, seed=6, ignore_eos=True)))
    assert small.stats().preemptions > 0
    assert small.kv_held() <= max(24 * state, 12 * state + 10 * block)
    small.check()


def test_new_weights_invalidate_cached_states() -> None:
    module = copy.deepcopy(model("lfm2"))
    engine = engine_of(module)
    prompts = tiny.sequences(2, 2, 40, 40)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.generate(prompts, greedy)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.1)
    engine.new_version()
    assert engine.stats().states_in_use == 0
    assert [list(s.token_ids) for s in engine.generate(prompts, greedy)] == [
        tiny.plain_greedy(module, p, 6) for p in prompts
    ]


def test_cached_states_are_dropped_for_running_sequences() -> None:
    table = StateTable(BLOCK, slots=6, every=BLOCK, running=2)
    pool = BlockPool(8)
    blocks = [pool.allocate() for _ in range(4)]
    table.begin(set())
    kept = [table.keep((block, BLOCK)) for block in blocks]
    assert kept.count(None) == 2  # of six slots, two for each of two running sequences are reserved
    table.begin(set())
    slots = {table.advance((100 + i, 3)) for i in range(4)}
    assert len(slots) == 4
    table.begin({(100 + i, 3) for i in range(4)})
    assert table.keep((7, BLOCK)) is not None
    assert table.keep((8, BLOCK)) is not None
    assert table.in_use == 6
    assert table.dropped == 2


def test_state_every_of_a_recipe_is_applied_and_validated(tmp_path: Path) -> None:
    tokenizer = load_policy("sums-policy").tokenizer
    config = copy.deepcopy(CONFIGS["lfm2"])
    config.vocab_size = len(tokenizer)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hybrid")
    tokenizer.save_pretrained(tmp_path / "hybrid")
    tree = recipe(model={"path": str(tmp_path / "hybrid")}, engine={"state_every": 32})
    with Run(tmp_path / "run", tree) as run:
        training = RlTraining(tree, run, Silent())
        training.close()
    assert isinstance(training.engine, Engine)
    assert training.engine.backend.states is not None
    assert training.engine.backend.states.every == 32
    assert EVERY == EngineTable().state_every == GenerationTable().state_every
    with pytest.raises(ConfigError, match=r"engine\.state_every"):
        recipe(engine={"state_every": 0})
