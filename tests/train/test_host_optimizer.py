"""An optimizer in host memory takes the same steps as one on the device, bit for bit, and loads its checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from plaudit.config import TrainTable
from plaudit.train.optim import host_optimizer
from plaudit.train.optim.host_optimizer import HostOptimizer
from plaudit.train.optim.optimizer import NotFinite, Optimizer
from plaudit.train.optim.sharded_optimizer import new_optimizer
from plaudit.train.run.ranks import DATA, TENSOR, Ranks
from tests.train.rank_offload import check
from tests.train.rl_world import tiny
from tests.train.test_ranks import fork_ranks

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
TABLE = TrainTable(steps=8, lr=1e-3, warmup=2, weight_decay=0.1, clip_norm=0.5)


class Net(nn.Module):
    """Matrices larger and smaller than a bucket, vectors, a frozen weight, and a weight that some updates leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 11), nn.Linear(11, 3)
        self.frozen = nn.Linear(11, 11, bias=False).requires_grad_(False)
        self.rare = nn.Parameter(torch.ones(11))

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        hidden = self.frozen(self.first(x)).tanh()
        out: Tensor = self.last(hidden * self.rare if rare else hidden)
        return out


def net(dtype: torch.dtype, device: str) -> Net:
    torch.manual_seed(3)
    return Net().to(device, dtype)


def update(model: Net, optimizer: Optimizer, step: int) -> dict[str, float]:
    optimizer.zero()
    draw = torch.Generator().manual_seed(step)
    weight = next(model.parameters())
    for _ in range(2):  # micro-batches
        x = torch.randn(5, 7, generator=draw).to(weight.device, weight.dtype)
        model(x, rare=step % 2 == 1).float().square().sum().backward()
    return optimizer.step(step)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value.cpu(), other[name].cpu()) for name, value in one.items()
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_steps_and_state_equal_those_of_an_optimizer_on_the_device(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_optimizer, "BUCKET", 64)  # the first matrix has 77 elements
    device_model, host_model = net(dtype, device), net(dtype, device)
    plain, host = Optimizer(device_model, TABLE), HostOptimizer(host_model, TABLE)
    assert same(plain.state(), host.state())
    for step in range(5):
        assert update(device_model, plain, step) == update(host_model, host, step)
        assert same(device_model.state_dict(), host_model.state_dict())
    assert same(plain.state(), host.state())
    # Each resumes from the other's checkpoint.
    resumed_device_model, resumed_host_model = net(dtype, device), net(dtype, device)
    resumed_device_model.load_state_dict(device_model.state_dict())
    resumed_host_model.load_state_dict(device_model.state_dict())
    resumed_plain, resumed_host = Optimizer(resumed_device_model, TABLE), HostOptimizer(resumed_host_model, TABLE)
    resumed_plain.load({name: value.clone() for name, value in host.state().items()})
    resumed_host.load(plain.state())
    for step in range(5, 8):
        update(device_model, plain, step)
        update(resumed_device_model, resumed_plain, step)
        update(resumed_host_model, resumed_host, step)
        assert same(device_model.state_dict(), resumed_device_model.state_dict())
        assert same(device_model.state_dict(), resumed_host_model.state_dict())


@pytest.mark.parametrize("device", DEVICES)
def test_non_finite_gradient_changes_nothing(device: str) -> None:
    model = net(torch.bfloat16, device)
    optimizer = HostOptimizer(model, TABLE)
    update(model, optimizer, 0)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: value.clone() for name, value in optimizer.state().items()}
    optimizer.zero()
    (model(torch.full((1, 7), torch.inf, device=device, dtype=torch.bfloat16), rare=True).sum() * torch.inf).backward()
    with pytest.raises(NotFinite, match="the weights are left as they were"):
        optimizer.step(1)
    assert same(model.state_dict(), weights)
    assert same(optimizer.state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_only_gradients_stay_on_the_device() -> None:
    model = nn.Linear(2048, 2048, bias=False, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    optimizer = HostOptimizer(model, TABLE)
    model(torch.ones(1, 2048, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step(0)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 1.1 * 4 * model.weight.numel()
    optimizer.zero()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_offload_optimizer_selects_the_host_optimizer() -> None:
    model = net(torch.float32, "cpu")
    assert type(new_optimizer(model, TABLE)) is Optimizer
    table = TABLE.model_copy(update={"offload_optimizer": True})
    optimizer = new_optimizer(model, table)
    assert isinstance(optimizer, HostOptimizer)
    update(model, optimizer, 0)
    assert optimizer.copies() == optimizer.moments() == []
    assert sum(t.nbytes for t in optimizer.gradients()) == 4 * (7 * 11 + 11 + 11 * 3 + 3)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 1, 1, 1, 1), id="data"),
        pytest.param((1, 2, 1, 1, 1), id="context", marks=pytest.mark.slow),
        pytest.param((1, 1, 2, 1, 1), id="tensor", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 2, 1), id="stages"),
        pytest.param((2, 1, 1, 1, 2), id="experts"),
        pytest.param((3, 1, 1, 1, 1), id="uneven", marks=pytest.mark.slow),
        pytest.param((2, 1, 2, 1, 1), id="data-tensor", marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 2, 1), id="data-stages", marks=pytest.mark.slow),
        pytest.param((2, 1, 2, 1, 2), id="data-tensor-experts", marks=pytest.mark.slow),
    ],
)
def test_sharded_steps_in_host_memory_equal_those_on_the_device(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Equal bit for bit in bfloat16, and in float32 with a replicated value head."""
    words = ["-m", "tests.train.rank_offload", *map(str, shape), str(tmp_path)]
    fork_ranks(math.prod(shape[:4]), words, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_mesh_of_one_gpu_steps_its_shards_in_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL allows one rank per GPU."""
    monkeypatch.setattr(host_optimizer, "BUCKET", 512)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=(DATA, TENSOR))
        check("shared", tiny, Ranks(mesh=mesh), tmp_path, shared=True, device="cuda")
    finally:
        dist.destroy_process_group()
