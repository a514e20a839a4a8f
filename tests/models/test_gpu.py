"""Errors for a requested GPU that cannot be used: one line that names a recipe that would run."""

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
    ("device", "gpus", "message"),
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
def test_unusable_device_is_rejected_in_one_line(device: str, gpus: Gpus, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        check_device(device, gpus)
    assert "\n" not in str(refusal.value)
    assert 'set device = "cpu"; the smallest recipe that runs there is sums-grpo' in str(refusal.value)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (13, 0)])
def test_gpus_supported_by_torch_are_accepted(capability: tuple[int, int]) -> None:
    check_device("cuda:0", here(Gpu("some GPU", capability)))


def test_cpu_device_needs_no_gpu() -> None:
    check_device("cpu", Gpus((), (), None))


def test_smallest_recipe_exists() -> None:
    assert SMALLEST in recipe_names()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_device_without_a_gpu_is_rejected_before_loading(tmp_path: Path) -> None:
    assert gpus_here().there == ()
    with pytest.raises(ConfigError, match=r"the smallest recipe that runs there is sums-grpo"):
        load_policy("sums-policy", device="cuda")
    arguments = ["train", "sums-grpo", "--set", "model.device=cuda", "--out", str(tmp_path / "run")]
    process = plaudit_here(*arguments)
    assert process.returncode == 2
    assert process.stderr.startswith("plaudit: device = 'cuda' is a GPU, and ")
    assert len(process.stderr.splitlines()) == 1


def test_out_of_memory_is_reported_in_one_line() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
    )
    message = memory_ran_out(error)
    assert message is not None
    assert message.startswith("the GPU's memory ran out (Tried to allocate 2.00 GiB.): lower train.micro_batch_tokens")
    assert message.endswith(SMALLEST)
    assert memory_ran_out(RuntimeError("something else")) is None


def test_missing_cuda_ipc_error_names_alternatives() -> None:
    assert str(refused("cuIpcGetMemHandle", "operation not supported")) == (
        "the CUDA driver refused to share memory between processes (cuIpcGetMemHandle: operation not supported): set "
        'placement.channel = "disk" or "collective"; recipes of one process share nothing, and the smallest is '
        "sums-grpo"
    )
