"""The CUDA back end against the CPU back end and plain transformers. Needs a GPU; skipped with a notice elsewhere."""

import dataclasses
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Glm4MoeConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from plaudit.algo.tokens import products
from plaudit.core import Engine, SamplingParams
from plaudit.core.device.backend import DecodeBatch, Decoded
from plaudit.core.model.attention import Rule
from plaudit.core.model.fusion import Fusion
from plaudit.core.model.packing import pack, use_packed_attention
from plaudit.core.model.readouts import Read, Reading, take
from plaudit.core.model.varlen import VarlenLayout
from plaudit.core.proof.support import inspect
from plaudit.train.policy.forward import hidden_of, logprobs_and_entropy, pack_responses

differentiable = pytest.importorskip("plaudit.core.model.differentiable")  # needs Triton
kernels = pytest.importorskip("plaudit.core.kernels")
product_kernel = pytest.importorskip("plaudit.algo.tokens.product_kernel")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SHAPE, "num_key_value_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "mistral": MistralConfig(**GROUPED, sliding_window=20),
    "gemma2": Gemma2Config(**GROUPED, head_dim=16, sliding_window=20, query_pre_attn_scalar=16),
    "gpt-neox": GPTNeoXConfig(**SHAPE),
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ALL = {
    **CONFIGS,
    "qwen3-moe": Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=16),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=None),
    "gpt-oss": GptOssConfig(
        **GROUPED, head_dim=16, sliding_window=20, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "deepseek-v2": DeepseekV2Config(
        **SHAPE, num_key_value_heads=4, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, topk_method="group_limited_greedy", first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, head_dim=16,
    ),
    "deepseek-v3": DeepseekV3Config(
        **SHAPE, num_key_value_heads=4, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, head_dim=16,
    ),
}  # fmt: skip
PROMPTS = [[5 + (7 * i + j * j) % 290 for j in range(3 + 9 * i)] for i in range(8)]


EAGER = pytest.mark.filterwarnings("ignore:.*decodes without CUDA graphs")


def causal(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(ALL[name]).to(dtype).eval()


def engine(module: torch.nn.Module, **options: object) -> Engine:
    return Engine(module.cuda(), **{"kv_bytes": 64 * 2**20, "max_running": 32, "budget": 256, **options})


def tokens(samples: list) -> list[tuple[int, ...]]:
    return [sample.token_ids for sample in samples]


@EAGER
@pytest.mark.parametrize("name", ALL)
def test_greedy_tokens_and_logprobs_match_transformers(name: str) -> None:
    model = causal(name)
    samples = engine(model).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    model.set_attn_implementation("eager")
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        sequence = torch.tensor([prompt + list(sample.token_ids)], device="cuda")
        with torch.no_grad():
            logits = model(sequence).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        best, chosen = logits.max(-1).values, logits.gather(1, sequence[0, len(prompt) :, None])[:, 0]
        assert (best - chosen).max() < 1e-4  # greedy, except for ties in the last digit
        torch.testing.assert_close(torch.tensor(sample.raw_logprobs), chosen.cpu(), rtol=1e-4, atol=1e-4)


@EAGER
@pytest.mark.parametrize("name", ALL)
def test_samples_and_scores_match_the_cpu_backend(name: str) -> None:
    params = SamplingParams(n=3, temperature=0.8, max_tokens=30, seed=5)
    model = causal(name)
    on_cpu = Engine(model, kv_bytes=64 * 2**20)
    expected, logprobs = on_cpu.generate(PROMPTS, params), on_cpu.logprobs(PROMPTS)
    on_gpu = engine(model)
    samples = on_gpu.generate(PROMPTS, params)
    equal = sum(a == b for a, b in zip(tokens(samples), tokens(expected), strict=True))
    assert equal >= len(expected) - 1  # one sample may differ because of a tie
    for a, b in zip(on_gpu.logprobs(PROMPTS), logprobs, strict=True):
        assert abs(a - b).max() < 1e-4


def test_samples_are_equal_alone_batched_cached_preempted_and_after_sleep() -> None:
    model = causal("llama")
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=3, ignore_eos=True)
    large = engine(model)
    expected = large.generate(PROMPTS, params)
    assert tokens(large.generate(PROMPTS, params)) == tokens(expected)
    assert large.stats().tokens_shared > 0
    alone = [large.generate([p], dataclasses.replace(params))[0] for p in PROMPTS]
    for a, b in zip(alone, expected, strict=True):
        assert a.token_ids == b.token_ids
    large.sleep()
    large.wake()
    assert tokens(large.generate(PROMPTS, params)) == tokens(expected)
    large.sleep(weights=True)
    assert next(model.parameters()).device.type == "cpu"
    large.wake()
    assert tokens(large.generate(PROMPTS, params)) == tokens(expected)
    block = large.stats().kv_bytes // large.stats().blocks_total
    longer = dataclasses.replace(params, max_tokens=130)
    small = engine(model, kv_bytes=7 * block)
    assert tokens(small.generate(PROMPTS, longer)) == tokens(large.generate(PROMPTS, longer))
    assert small.stats().preemptions > 0


def test_branches_are_bit_identical_to_generating_from_full_prompts() -> None:
    model = causal("llama", torch.bfloat16)
    reference, run = engine(model), engine(model)
    params = SamplingParams(n=3, max_tokens=9, stop_token_ids=tuple(range(20)))
    paths, places = [list(prompt) for prompt in PROMPTS], [None] * len(PROMPTS)
    for level in range(3):
        seeds = list(range(100 * level, 100 * level + len(paths)))
        branched = run.branches().sample(paths, places, [params] * len(paths), seeds)
        run.check()
        reference.new_version()
        expected = reference.generate(paths, params, seeds=seeds, text=False)
        extended = [(path, continuation) for path, group in zip(paths, branched, strict=True) for continuation in group]
        assert [continuation.tokens for _, continuation in extended] == tokens(expected)
        means = [sum(sample.raw_logprobs) / len(sample.token_ids) for sample in expected]
        assert [continuation.logprob for _, continuation in extended] == means
        paths, places = (
            [[*path, *continuation.tokens] for path, continuation in extended[::2]],
            [continuation.place for _, continuation in extended[::2]],
        )
    scored = [path[:-1] for path in paths]
    values, ends = run.branches().read(scored, [None] * len(scored), [len(s) - 1 for s in scored], [3, 5], False)
    assert abs(values - np.stack(run.score(scored, columns=[3, 5]))).max() < 0.1
    run.branches().free_paths([place for place in ends if place is not None])
    run.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama_shapes_use_the_lean_trunk_bit_identical_to_the_learners_kernels(dtype: torch.dtype) -> None:
    lean = {name: inspect(causal(name, dtype).cuda()).lean is not None for name in (*CONFIGS, "qwen3-moe", "mixtral")}
    assert lean == {
        "llama": True, "qwen3": True, "mistral": True, "gemma2": False, "gpt-neox": False, "qwen3-moe": True,
        "mixtral": True,
    }  # fmt: skip
    for name in ("llama", "qwen3", "qwen3-moe", "mixtral"):
        decoder = inspect(causal(name, dtype).cuda())
        packed = pack(PROMPTS, "cuda")
        with torch.inference_mode(), Fusion(decoder.trunk, differentiable).applied(steady=True):
            actual = decoder.hidden(packed.input_ids, packed.position_ids, packed.layout)
            decoder.lean = None
            expected = decoder.hidden(packed.input_ids, packed.position_ids, packed.layout)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("stops", [(), tuple(range(10, 18))])
def test_long_decode_windows_match_short_ones_and_stop_when_all_rows_end(stops: tuple[int, ...]) -> None:
    model = causal("llama")
    params = SamplingParams(n=4, max_tokens=200, seed=4, ignore_eos=True, stop_token_ids=stops)
    short, long = engine(model, look_every=8), engine(model)
    assert tokens(long.generate(PROMPTS, params)) == tokens(short.generate(PROMPTS, params))
    assert long.stats().steps < short.stats().steps
    decoded: list[int] = []
    decode = long.backend.decode

    def counting(batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        for done in decode(batch, steps):
            decoded.append(done.tokens.shape[0])
            yield done

    long.backend.decode = counting  # type: ignore[method-assign]
    before = long.stats().steps
    sample = long.generate([PROMPTS[0]], SamplingParams(max_tokens=200, seed=1, ignore_eos=True))[0]
    assert decoded == [16] * 12 + [7]  # 199 tokens after the first, in one window
    assert long.stats().steps == before + 2
    end = sample.token_ids[20]
    decoded.clear()
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True, stop_token_ids=(end,))
    first = sample.token_ids.index(end)
    assert long.generate([PROMPTS[0]], params)[0].token_ids == sample.token_ids[: first + 1]
    assert sum(decoded) < first + 2 * 16


@EAGER
@pytest.mark.parametrize("name", ALL)
def test_bf16_logprobs_are_as_accurate_as_transformers(name: str) -> None:
    """Log-probs from decoding and from scoring, both compared with float32 on the same weights."""
    half = causal(name, torch.bfloat16).cuda()
    samples = engine(half).generate(PROMPTS, SamplingParams(n=4, max_tokens=48, seed=2, ignore_eos=True))
    sequences = [[*PROMPTS[i // 4], *sample.token_ids] for i, sample in enumerate(samples)]
    read = engine(half).logprobs(sequences)
    exact = causal(name).cuda()
    exact.load_state_dict({key: value.float() for key, value in half.state_dict().items()})
    for module in (half, exact):
        module.set_attn_implementation("eager")
    errors: dict[str, list[torch.Tensor]] = {"decoded": [], "read": [], "transformers": []}
    for ids, sample, read_logprobs in zip(sequences, samples, read, strict=True):
        new, row = len(sample.token_ids), torch.tensor([ids], device="cuda")
        with torch.no_grad():
            exact_logprobs, plain_logprobs = (
                module(row).logits[0, :-1].float().log_softmax(-1).gather(1, row[0, 1:, None])[-new:, 0].cpu()
                for module in (exact, half)
            )
        errors["decoded"].append(torch.tensor(sample.raw_logprobs) - exact_logprobs)
        errors["read"].append(torch.tensor(read_logprobs[-new:]).flatten() - exact_logprobs)
        errors["transformers"].append(plain_logprobs - exact_logprobs)
    means = {name: torch.cat(parts).abs().mean().item() for name, parts in errors.items()}
    # Near-ties between experts are resolved differently in both: gpt-oss has 1.7 on this model.
    factor = 2.0 if name in ("gpt-oss", "mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3") else 1.2
    assert max(means["decoded"], means["read"]) <= factor * means["transformers"] + 1e-4, means


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixtures_of_experts_decode_in_cuda_graphs(dtype: torch.dtype) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with warnings.catch_warnings(action="error"):
        engine(causal("qwen3-moe", dtype)).generate(PROMPTS, params)


def test_model_that_synchronizes_with_the_host_decodes_without_graphs() -> None:
    """Transformers' loop over experts does so, here in modules that no kernel recognizes as experts."""
    model = causal("qwen3-moe")
    model.config._experts_implementation = "eager"
    for layer in model.model.layers:
        del layer.mlp.experts.is_transposed
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with pytest.warns(UserWarning, match="Qwen3MoeForCausalLM decodes without CUDA graphs, .*: .*synchron"):
        engine(model).generate(PROMPTS, params)


def test_filters_biases_and_stop_tokens_match_the_cpu_backend() -> None:
    model = causal("llama")
    options = [
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, max_tokens=20, seed=1),
        SamplingParams(temperature=0.9, top_k=20, max_tokens=20, seed=1),
        SamplingParams(temperature=0.9, top_p=0.7, max_tokens=20, seed=1),
        SamplingParams(temperature=1.0, min_tokens=5, max_tokens=20, seed=1, logit_bias={2: 9.0}),
        SamplingParams(temperature=1.0, max_tokens=20, seed=1, stop_token_ids=tuple(range(30, 200))),
        SamplingParams(temperature=0.0, max_tokens=20),
    ]
    on_cpu, on_gpu = Engine(model, kv_bytes=64 * 2**20), None
    expected = [on_cpu.generate(PROMPTS[:3], params) for params in options]
    on_gpu = engine(model)
    for params, samples in zip(options, expected, strict=True):
        actual = on_gpu.generate(PROMPTS[:3], params)
        assert tokens(actual) == tokens(samples)
        assert [s.finish_reason for s in actual] == [s.finish_reason for s in samples]


def test_weights_changed_in_place_are_used_after_new_version() -> None:
    model = causal("llama")
    on_gpu = engine(model)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    before = on_gpu.generate(PROMPTS, params)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    on_gpu.new_version()
    after = on_gpu.generate(PROMPTS, params)
    assert tokens(before) != tokens(after)
    assert {v for s in after for v in s.versions} == {1}
    assert tokens(engine(model).generate(PROMPTS, params)) == tokens(after)


def test_bf16_scores_are_as_accurate_as_transformers() -> None:
    torch.manual_seed(2)
    config = LlamaConfig(
        **{**GROUPED, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_labels": 1}
    )
    exact = AutoModelForSequenceClassification.from_config(config).eval().cuda()
    half = AutoModelForSequenceClassification.from_config(config).eval().cuda()
    half.load_state_dict(exact.state_dict())
    half.to(torch.bfloat16)
    sequences = [[5 + (7 * i + j * j) % 290 for j in range(20 + 3 * i)] for i in range(64)]
    with torch.no_grad():
        truth = torch.stack([exact(torch.tensor([s], device="cuda")).logits[0] for s in sequences]).cpu().float()
        plain_scores = torch.stack([half(torch.tensor([s], device="cuda")).logits[0] for s in sequences]).cpu().float()
    scores = torch.tensor([v.tolist() for v in Engine(half, kv_bytes=2**24).score(sequences)])
    assert (scores - truth).abs().mean() <= 1.2 * (plain_scores - truth).abs().mean()


def test_readout_does_not_wait_for_work_queued_after_it() -> None:
    run = engine(causal("llama"))
    rows = torch.randn(3, run.decoder.module.config.hidden_size, device="cuda")
    readings = [Reading(Read("columns", (0,), (5, 6)), [1], [0])] * 3
    with torch.inference_mode():
        expected = run.decoder.columns(rows, (5, 6)).cpu()
        pending = take(run.decoder, rows, readings)
        torch.cuda._sleep(2_000_000_000)  # about a second
        values = pending.arrays()
    busy = not torch.cuda.current_stream().query()
    assert busy
    assert torch.equal(torch.from_numpy(np.concatenate(values)), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-neox"])
def test_bf16_logits_are_not_rounded(name: str) -> None:
    """The logits of scoring, and those that a decode graph samples from."""
    model = causal(name, torch.bfloat16)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(50)  # logits so large that bfloat16 rounds them coarsely
    run = engine(model)
    rows = torch.randn(9, 64, device="cuda", dtype=torch.bfloat16)
    exact = run.decoder.finish(rows.double() @ head.double().T)
    with torch.inference_mode():
        logits_of_rows = run.decoder.logits(rows)
    assert logits_of_rows.dtype == torch.float32
    assert (logits_of_rows - exact).abs().max() < 1e-4 * exact.abs().max()
    run.generate(PROMPTS[:2], SamplingParams(max_tokens=8, ignore_eos=True))
    sampled_logits = [graph.logits for graph in run.backend._graphs.values()]
    assert sampled_logits
    assert all((logits != logits.bfloat16()).any() for logits in sampled_logits)


def test_backward_works_on_the_module_after_generation() -> None:
    model = causal("llama")
    on_gpu = engine(model)
    on_gpu.generate(PROMPTS[:1], SamplingParams(max_tokens=4))
    model.set_attn_implementation("sdpa")
    model(torch.tensor([PROMPTS[3]], device="cuda")).logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_cuda_graphs_follow_the_active_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(causal("llama").cuda(), config).eval()
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    run = engine(model)
    adapted, repeated = (tokens(run.generate(PROMPTS, greedy)) for _ in range(2))
    with model.disable_adapter():
        plain = tokens(run.generate(PROMPTS, greedy))
    assert adapted == repeated == tokens(run.generate(PROMPTS, greedy))
    assert adapted != plain == tokens(engine(causal("llama")).generate(PROMPTS, greedy))


WIDE = {**GROUPED, "vocab_size": 512}
SHAPES = {
    "smollm2": LlamaConfig(
        **{**WIDE, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    ),
    "deep": LlamaConfig(**{**WIDE, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}),
    "qwen3": Qwen3Config(**{**WIDE, "hidden_size": 512, "num_attention_heads": 8}, head_dim=128),
    "windows": MistralConfig(**{**WIDE, "hidden_size": 512, "num_attention_heads": 8}, sliding_window=50),
    "qwen3-moe": Qwen3MoeConfig(**{**WIDE, "hidden_size": 512, "num_attention_heads": 8}, **EXPERTS, head_dim=64),
    "gpt-oss": GptOssConfig(
        **{**WIDE, "hidden_size": 512, "num_attention_heads": 8}, head_dim=64, num_local_experts=8,
        num_experts_per_tok=2, layer_types=["sliding_attention"] * 2 + ["full_attention"], sliding_window=50,
    ),
    "glm-4.5": Glm4MoeConfig(
        **{**WIDE, "hidden_size": 512, "num_attention_heads": 8}, head_dim=64, moe_intermediate_size=64,
        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", SHAPES)
def test_sampled_logprobs_are_bit_identical_to_the_learners_for_any_batch(name: str, temperature: float) -> None:
    """bf16: decoded in small and large batches, after a prefix hit and a preemption, and in the learner's forward."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16).eval()
    params = SamplingParams(n=2, temperature=temperature, max_tokens=70, seed=2, ignore_eos=True)
    prompts = [[5 + (7 * i + j * j) % 290 for j in range(1 + 3 * i)] for i in range(60)]
    run = engine(model, max_running=256, kv_bytes=2**30)
    samples = run.generate(prompts, params)
    repeated = run.generate(prompts, params)
    assert run.stats().tokens_shared > 0
    assert [s.logprobs for s in repeated] == [s.logprobs for s in samples]
    for i in (0, 7, 59):
        assert [s.logprobs for s in run.generate([prompts[i]], params)] == [
            s.logprobs for s in samples[2 * i : 2 * i + 2]
        ]
    block = run.stats().kv_bytes // run.stats().blocks_total
    small = engine(model, max_running=256, kv_bytes=40 * block)
    assert [s.logprobs for s in small.generate(prompts, params)] == [s.logprobs for s in samples]
    assert small.stats().preemptions > 0
    model.train()
    use_packed_attention(model)
    for batch in (samples, samples[:1]):
        responses = pack_responses(batch, torch.device("cuda"))
        actual, _ = logprobs_and_entropy(run.decoder, responses, hidden_of(model, responses), temperature)
        actual.sum().backward()
        expected = torch.tensor([value for sample in batch for value in sample.logprobs])
        assert torch.equal(actual.detach().cpu().view(torch.int32), expected.view(torch.int32))


def test_learner_attention_with_sinks_matches_plain_attention_gradients() -> None:
    torch.manual_seed(2)
    lengths = [1, 40, 75]
    inputs = [torch.randn(sum(lengths), heads, 64, device="cuda").bfloat16() for heads in (8, 2, 2)]
    sinks, grad = torch.randn(8, device="cuda").bfloat16(), torch.randn(sum(lengths), 8, 64, device="cuda").bfloat16()
    packed = pack([[5] * n for n in lengths], torch.device("cuda"))
    layout = packed.layout
    assert isinstance(layout, VarlenLayout)
    results = []
    for attend in (layout.attend, layout.grouped.attend):
        leaves = [x.clone().requires_grad_() for x in (*inputs, sinks)]
        out = attend(0, *leaves[:3], Rule(sinks=leaves[3], window=30))
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for result, expected in zip(*results, strict=True):
        assert (result - expected).float().norm() <= 0.02 * expected.float().norm()
    with torch.no_grad():
        assert torch.equal(layout.attend(0, *inputs, Rule(sinks=sinks, window=30)), results[0][0])


@pytest.mark.parametrize("bias", [False, True])
def test_few_row_matmul_kernel_is_bit_identical_to_large_batches(bias: bool) -> None:
    for inner, widths in ((2048, (2048, 512, 512)), (576, (576, 192, 192)), (4096, (6144, 96, 1000)), (14336, (4096,))):
        weights = [torch.randn(width, inner, device="cuda", dtype=torch.bfloat16) for width in widths]
        biases = [torch.randn(width, device="cuda", dtype=torch.bfloat16) for width in widths] if bias else None
        assert products.few_rows_agree(weights, biases)
        x = torch.randn(64, inner, device="cuda", dtype=torch.bfloat16)
        many = [F.linear(x.repeat(64, 1), weight, biases and biases[i])[:64] for i, weight in enumerate(weights)]
        for rows in (1, 5, 16, 17, 64):
            few = product_kernel.few_rows_products(x[:rows], weights, biases)
            assert all(torch.equal(a, b[:rows]) for a, b in zip(few, many, strict=True))
    for inner, width in ((2048, 8192), (576, 1536), (4096, 14336), (1000, 72)):
        gate, up = (torch.randn(width, inner, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        assert products.few_rows_agree([gate, up], None, kernels.silu_mul)
        x = torch.randn(64, inner, device="cuda", dtype=torch.bfloat16)
        many = kernels.silu_mul(F.linear(x.repeat(64, 1), gate), F.linear(x.repeat(64, 1), up))
        for rows in (1, 16, 33, 64):
            assert torch.equal(product_kernel.few_rows_gated(x[:rows], gate, up), many[:rows])


def test_tabulated_rotary_angles_match_the_module() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    for rope in ({"rope_type": "default", "rope_theta": 1e4}, scaled, {**scaled, "rope_type": "dynamic"}):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**GROUPED, rope_parameters=rope), dtype=torch.bfloat16)
        lean = inspect(model.eval().cuda()).lean
        assert lean is not None
        with torch.inference_mode():
            angles = lean.angles(500)
            assert angles is not None
            positions = torch.tensor([[499, 3, 77, 0]], device="cuda")
            expected = lean.trunk.rotary_emb(torch.empty(1, 1, device="cuda", dtype=torch.bfloat16), positions)
            assert all(torch.equal(table[positions], angle) for table, angle in zip(angles, expected, strict=True))


@pytest.mark.parametrize(("inner", "width"), [(8192, 2048), (14336, 4096), (4096, 4096)])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_of_wide_matmuls_are_bit_identical_to_many_rows(inner: int, width: int, bias: bool) -> None:
    """Shapes of 1B and 8B models, whose inner dimension cuBLAS splits for few rows."""
    x = torch.randn(700, inner, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(width, inner, device="cuda", dtype=torch.bfloat16)
    added = torch.randn(width, device="cuda", dtype=torch.bfloat16) if bias else None
    many = products.steady_linear(x, weight, added)
    for rows in (1, 7, 16, 17, 64, 65, 200):
        for first in (0, 300):
            few = products.steady_linear(x[first : first + rows], weight, added)
            assert torch.equal(few, many[first : first + rows])
    x.requires_grad_()
    products.steady_linear(x[:7], weight, added).float().sum().backward()  # with gradients, through the library
    assert torch.allclose(x.grad[:7].float(), weight.float().sum(0).expand(7, -1), rtol=2e-2, atol=2.0)
