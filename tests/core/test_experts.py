"""The mixture-of-experts kernels against transformers' loop over experts, and across different batches. Without a GPU
they run in Triton's interpreter."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

GPU = torch.cuda.is_available()
pytest.importorskip("triton")
kernels = pytest.importorskip("plaudit.core.kernels")

from plaudit.core.model import differentiable  # noqa: E402
from plaudit.core.model.fusion import ACTIVATIONS, Fusion  # noqa: E402
from tests.core import interpreter  # noqa: E402, F401

DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
EXPERTS = {
    "qwen3_moe": (Qwen3MoeExperts, {"num_experts": 6, "moe_intermediate_size": 24}),
    "gpt_oss": (GptOssExperts, {"num_local_experts": 6, "intermediate_size": 24}),
    "nemotron_h": (NemotronHExperts, {"n_routed_experts": 6, "moe_intermediate_size": 24}),
}
ROUTERS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeTopKRouter, {"num_experts": 20, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "olmoe": (OlmoeTopKRouter, {"num_experts": 20, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "mixtral": (MixtralTopKRouter, {"num_local_experts": 8, "num_experts_per_tok": 2}),
}
HIDDEN = 32
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def built(kind: type, name: str, fields: dict[str, Any], dtype: torch.dtype) -> Any:
    config = AutoConfig.for_model(name, hidden_size=HIDDEN, **fields)
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    module = kind(config).to(DEVICE, dtype)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3)
    return module


def fused(kind: type, name: str, fields: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any, Fusion]:
    """The module, an unmodified copy of it, and the fusion that replaces the module's forward by kernels."""
    module = built(kind, name, fields, dtype)
    original = copy.deepcopy(module)
    fusion = Fusion(torch.nn.ModuleList([module]), differentiable)  # type: ignore[arg-type]
    # Besides the activation inside it, which on a CPU torch computes in full vectors.
    assert [part for part, _ in fusion.forwards if not isinstance(part, ACTIVATIONS)] == [module]
    return module, original, fusion


def pairs(tokens: int, experts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, HIDDEN, device=DEVICE).to(dtype)
    ids = torch.rand(tokens, experts, device=DEVICE).argsort(-1)[:, :2]
    return x, ids, torch.rand(tokens, 2, device=DEVICE).to(dtype)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-5 if result.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(result.float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_routes_sort_pairs_by_expert_and_token_in_blocks_of_one_expert() -> None:
    ids = torch.tensor([[2, 0], [2, 5], [0, 2], [5, 2]], device=DEVICE)
    routes = kernels.routes(ids, 6)
    assert routes.order.tolist() == [1, 4, 0, 2, 5, 7, 3, 6]
    assert routes.ends.tolist() == [2, 2, 6, 6, 6, 8]
    full = [(e, start, end) for e, start, end in routes.blocks.T.tolist() if start < end]
    assert full == [(0, 0, 2), (2, 2, 6), (5, 6, 8)]


@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_blocks_cover_every_pair_once(tokens: int) -> None:
    ids = (torch.rand(tokens, 5, device=DEVICE) ** 3 * 7).long()  # skewed towards the first experts
    routes = kernels.routes(ids, 7)
    assert routes.order.tolist() == torch.sort(ids.flatten().cpu(), stable=True).indices.tolist()
    positions = [
        (position, expert)
        for expert, start, end in routes.blocks.T.tolist()
        for position in range(start, min(end, start + routes.tiles.rows))
    ]
    assert sorted(position for position, _ in positions) == list(range(ids.numel()))
    assert all(ids.flatten()[routes.order[position]] == expert for position, expert in positions)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXPERTS)
def test_expert_kernels_match_the_module_and_its_gradients(name: str, dtype: torch.dtype) -> None:
    kind, fields = EXPERTS[name]
    module, original, fusion = fused(kind, name, fields, dtype)
    x, ids, weights = pairs(9, 6, dtype)
    with fusion.applied(False), torch.no_grad():
        without_grad = module(x, ids, weights)
    results = []
    for part, context in ((module, fusion.applied(False)), (original, None)):
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        if context is None:
            out = part(inputs[0], ids, inputs[1])
        else:
            with context:
                out = part(inputs[0], ids, inputs[1])
        (out.float() ** 2).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in (*inputs, *part.parameters()))])
    assert torch.equal(results[0][0], without_grad)  # bit-identical with and without gradients
    for result, expected in zip(*results, strict=True):
        scale = expected.float().abs().max()
        close(result / scale, expected / scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTERS)
def test_router_kernels_match_the_module(name: str, dtype: torch.dtype) -> None:
    kind, fields = ROUTERS[name]
    module, original, fusion = fused(kind, name, fields, dtype)
    x = torch.randn(11, HIDDEN, device=DEVICE).to(dtype)
    results = []
    for part, replaced in ((module, True), (original, False)):
        hidden = x.clone().requires_grad_()
        if replaced:
            with fusion.applied(False):
                logits, values, ids = part(hidden)
        else:
            logits, values, ids = part(hidden)
        (values.float() ** 2 * torch.arange(1, values.shape[1] + 1, device=DEVICE)).sum().backward()
        results.append(
            [logits.detach(), values.detach(), logits.detach().gather(1, ids), hidden.grad, part.weight.grad]
        )
    for result, expected in zip(*results, strict=True):
        assert result.dtype == expected.dtype
        close(result, expected)


def test_ties_between_experts_go_to_the_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    values, ids = kernels.softmax_top(logits, 2, True, torch.float32)
    assert ids.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(values, torch.full_like(values, 0.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_output_is_bit_identical_in_any_batch(dtype: torch.dtype) -> None:
    kind, fields = EXPERTS["qwen3_moe"]
    module = built(kind, "qwen3_moe", fields, dtype)
    x, ids, weights = pairs(700 if GPU else 120, 6, dtype)
    many = differentiable.experts(module, True, x, ids, weights)
    for count in (1, 7, 50):
        few = differentiable.experts(module, True, x[:count], ids[:count], weights[:count])
        assert torch.equal(few, many[:count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXPERTS)
def test_expert_outputs_of_two_ranks_sum_to_the_full_output(name: str, dtype: torch.dtype) -> None:
    """The kernels skip pairs of the other rank and leave no uninitialized memory in the output."""
    kind, fields = EXPERTS[name]
    full = built(kind, name, fields, dtype)
    x, ids, weights = pairs(40, 6, dtype)
    total, fused_total = torch.zeros_like(x), torch.zeros_like(x)
    for first in (0, 3):
        half = copy.deepcopy(full)
        half.config._experts_implementation = "grouped_mm"
        for name_of_parameter, parameter in list(half.named_parameters()):
            setattr(half, name_of_parameter, torch.nn.Parameter(parameter.data[first : first + 3].clone()))
        half.num_experts, half._is_expert_parallel = 3, True
        local_ids = torch.where((ids >= first) & (ids < first + 3), ids - first, 3)
        fusion = Fusion(torch.nn.ModuleList([half]), differentiable)  # type: ignore[arg-type]
        assert half in dict(fusion.forwards)
        torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
        try:
            with torch.no_grad():
                total += half(x, local_ids, weights)
                with fusion.applied(False):
                    fused_total += half(x, local_ids, weights)
        finally:
            torch.use_deterministic_algorithms(False)
    expected = full(x, ids, weights).detach()
    scale = expected.float().abs().max()
    close(fused_total / scale, expected / scale)
    close(total / scale, expected / scale)


class Clamped(Qwen3MoeExperts):
    """Identical to a plain silu gate for small values."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)


def test_clamped_gate_is_computed_by_the_module_itself() -> None:
    module = built(Clamped, "qwen3_moe", EXPERTS["qwen3_moe"][1], torch.float32)
    module.config._experts_implementation = "batched_mm"
    for parameter in module.parameters():
        parameter.data.mul_(0.1)
    fusion = Fusion(torch.nn.ModuleList([module]), differentiable)  # type: ignore[arg-type]
    x, ids, weights = pairs(9, 6, torch.float32)
    expected = module(400 * x, ids, weights)
    with fusion.applied(False), torch.no_grad():
        close(module(400 * x, ids, weights) / 100, expected / 100)


def test_router_with_a_zero_bias_is_not_replaced_by_a_kernel() -> None:
    module = built(GptOssTopKRouter, "gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 2}, torch.float32)
    module.bias.data.zero_()
    assert not Fusion(torch.nn.ModuleList([module]), differentiable).forwards  # type: ignore[arg-type]
