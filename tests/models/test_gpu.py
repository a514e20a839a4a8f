"""The error where a GPU is requested and cannot be used: one line that names a recipe that would run."""

from pathlib import Path

import pytest
import torch

from plaudit.config.shipped.catalog import recipe_names
from plaudit.errors import ConfigError
from plaudit.models import load_policy
from plaudit.models.gpu import SMALLEST, Gpu, Gpus, check_device, gpus_here, memory_ran_out
from plaudit.place.channels.cuda_segment import refused
from tests.command import plaudit_here

NEW = ("sm_80", "sm_90", "sm_100", "sm_120", "compute_120")
H200 = Gpu("NVIDIA H200", (9, 0))


def here(*gpus: Gpu, built_for: tuple[str, ...] = NEW) -> Gpus:
    return Gpus(gpus, built_for, "13.0")


@pytest.mark.parametrize(
    ("device", "gpus", "said"),
    [
        ("cuda", Gpus((), (), None), "this torch is built without CUDA"),
        ("cuda", Gpus((), (), "13.0"), "torch sees no GPU"),
        ("cuda:2", here(H200), r"device = 'cuda:2', and there are 1 GPU\(s\): cuda:0 is the first"),
        ("cuda:1", here(H200, Gpu("Tesla T4", (7, 5))),
         r"Tesla T4 \(cuda:1\) has compute capability 7.5, and the kernels need 8.0 or more"),
        ("cuda", here(Gpu("NVIDIA L4", (8, 9)), built_for=("sm_90", "sm_100")),
         "compute capability 8.9, and this torch is built for sm_90, sm_100: install one that is built for it"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_a_line(device: str, gpus: Gpus, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        check_device(device, gpus)
    assert "\n" not in str(refusal.value)
    assert 'set device = "cpu"; the smallest recipe that runs there is sums-grpo' in str(refusal.value)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (13, 0)])
def test_what_torch_has_code_for_is_used(capability: tuple[int, int]) -> None:
    check_device("cuda:0", here(Gpu("some GPU", capability)))


def test_a_cpu_needs_no_gpu() -> None:
    check_device("cpu", Gpus((), (), None))


def test_the_smallest_recipe_is_there() -> None:
    assert SMALLEST in recipe_names()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_loaded(tmp_path: Path) -> None:
    assert gpus_here().there == ()
    with pytest.raises(ConfigError, match=r"the smallest recipe that runs there is sums-grpo"):
        load_policy("sums-policy", device="cuda")
    asked = ["train", "sums-grpo", "--set", "model.device=cuda", "--out", str(tmp_path / "run")]
    told = plaudit_here(*asked)
    assert told.returncode == 2
    assert told.stderr.startswith("plaudit: device = 'cuda' is a GPU, and ")
    assert len(told.stderr.splitlines()) == 1


def test_memory_that_runs_out_is_told_in_a_line() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB")
    told = memory_ran_out(full)
    assert told is not None
    assert told.startswith("the GPU's memory ran out (Tried to allocate 2.00 GiB.): lower train.micro_batch_tokens")
    assert told.endswith(SMALLEST)
    assert memory_ran_out(RuntimeError("something else")) is None


def test_a_driver_without_ipc_is_told_with_what_needs_none() -> None:
    assert str(refused("cuIpcGetMemHandle", "operation not supported")) == (
        "the CUDA driver refused to share memory between processes (cuIpcGetMemHandle: operation not supported): set "
        'placement.channel = "disk" or "collective"; recipes of one process share nothing, and the smallest is '
        "sums-grpo"
    )
