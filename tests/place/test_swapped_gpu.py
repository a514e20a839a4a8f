"""Transfers between a GPU and the host. Needs a GPU; skipped with a notice elsewhere."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.events import read_events
from plaudit.place.memory.meter import CudaMeter
from plaudit.place.memory.owners import weights_of
from plaudit.place.memory.residency import Parked, Sleeping
from plaudit.place.memory.stores import HostStore
from plaudit.rl.loop import RlTraining
from plaudit.train.run.run import Run
from tests.train.rl_world import Silent, recipe, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MIB = 1 << 20


def bits(tensors: Any) -> list[bytes]:
    return [t.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def random_tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = [
        torch.randn(257, 1000 + i, device="cuda", dtype=d) for i, d in enumerate((torch.float32, torch.bfloat16))
    ]
    return [*tensors, torch.randn(40, 60, device="cuda").t(), torch.tensor(3.0, device="cuda"), torch.empty(0).cuda()]


def test_a_round_trip_is_bit_identical_and_frees_the_memory() -> None:
    tensors = [*random_tensors(), torch.randn(64 * MIB // 4, device="cuda")]
    before, strides = bits(tensors), [t.stride() for t in tensors]
    parked = Parked(lambda: tensors, HostStore(torch.device("cuda")))
    for ahead in (False, True, True):
        full = torch.cuda.memory_allocated()
        parked.leave()
        assert full - torch.cuda.memory_allocated() >= 64 * MIB
        work = torch.randn(2048, 2048, device="cuda")
        if ahead:
            assert parked.come_ahead()
        for _ in range(20):  # keeps the stream busy and reuses its memory while the copy runs
            work = torch.tanh(work @ work)
        parked.come()
        assert bits(tensors) == before
        assert [t.stride() for t in tensors] == strides
    parked.close()


def test_offloaded_tensors_include_queued_updates() -> None:
    """The copy waits for work that is queued before it, and later work gets the memory only after the copy."""
    weight = torch.zeros(16 * MIB // 4, device="cuda")
    parked = Parked(lambda: [weight], HostStore(torch.device("cuda")))
    for round_ in range(1, 4):
        for _ in range(50):
            weight += 1
        parked.leave()
        others = [torch.full((16 * MIB // 4,), -1.0, device="cuda") for _ in range(3)]
        assert parked.come_ahead()
        others = [other * 2 for other in others]
        parked.come()
        assert torch.equal(weight, torch.full_like(weight, 50.0 * round_))
        assert all(bool((other == -2).all()) for other in others)
    parked.close()


def test_an_engine_generates_the_same_after_kv_and_weights_have_moved() -> None:
    module = tiny().to("cuda")
    engine = Engine(module, None, kv_bytes=8 * MIB)
    params = SamplingParams(max_tokens=40, seed=5)
    prompts = [[1, 2, 3], [4, 5], [6] * 20]
    expected = engine.generate(prompts, params)
    kv, weights = Sleeping(engine), Parked(lambda: list(module.parameters()), HostStore(torch.device("cuda")))
    kv_bytes = engine.kv_held()
    assert kv_bytes > 7 * MIB
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        kv.leave()
        assert before - torch.cuda.memory_allocated() >= kv_bytes
        weights.leave()
        ballast = torch.empty(3 * MIB, device="cuda")  # so that the restored tensors get other addresses
        weights.come()
        kv.come()
        assert engine.generate(prompts, params) == expected
        del ballast
    weights.close()


def fitted(directory: Path, placement: str, **tables: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    tree = recipe(
        **{"algorithm": {"name": "ppo", "kl": {"coef": 0.05}}, "reward": {"path": "sums", "device": "cuda"}, **tables},
        model={"device": "cuda"}, placement={"name": placement}, engine={"kv_bytes": 32 * MIB},
    )  # fmt: skip
    viewer = Silent()
    with Run(directory, tree) as run:
        training = RlTraining(tree, run, viewer)
        training.fit()
    weights = {name: p.detach().cpu() for name, p in training.loaded.module.named_parameters()}
    return weights, [{k: v for k, v in s.items() if not k.startswith(("time/", "perf/"))} for s in viewer.seen]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_swapped_steps_match_colocated(tmp_path: Path, minibatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    train = {"steps": 4, "minibatches": minibatches}
    try:
        colocated_weights, expected = fitted(tmp_path / "colocated", "colocated", train=train)
        swapped_weights, actual = fitted(tmp_path / "swapped", "swapped", train=train)
    finally:
        torch.use_deterministic_algorithms(False)
    assert actual == expected
    assert all(torch.equal(colocated_weights[name], swapped_weights[name]) for name in colocated_weights)


def test_the_ledger_matches_the_allocator(tmp_path: Path) -> None:
    """Within 100 MiB: batches, tables of the sampler, graphs and the workspace of cuBLAS have no owner."""
    gc.collect()  # garbage of earlier tests must not be freed during this test
    before = CudaMeter(torch.device("cuda")).now()
    fitted(tmp_path / "run", "colocated")
    events = [event for event in read_events(tmp_path / "run") if event["kind"] == "memory"]
    for event in events:
        for end in ("start", "end"):
            by_owner = {**event["bytes"], **event[end]}
            assert sum(by_owner.values()) == event["taken"][end]
            assert -MIB < by_owner.get("unaccounted", 0) - before < 100 * MIB
        assert event["taken"]["reserved"] >= event["taken"]["peak"] >= event["taken"]["end"]
    generate = next(e for e in events if (e["step"], e["phase"]) == (2, "generate"))
    assert generate["bytes"]["KV"] > 30 * MIB
    assert generate["device"] == "cuda:0"


def test_module_weights_are_counted_up_to_allocator_rounding() -> None:
    before = torch.cuda.memory_allocated()
    module = tiny().to("cuda")
    allocated, counted = torch.cuda.memory_allocated() - before, sum(t.nbytes for t in weights_of(module))
    assert counted <= allocated <= counted + 512 * len(weights_of(module))
