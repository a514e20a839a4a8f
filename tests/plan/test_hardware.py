from pathlib import Path

import pytest

from plaudit.errors import ConfigError
from plaudit.plan.shape.hardware import Overrides, accelerator, catalogue, cluster


def test_the_catalogue_is_complete_and_has_dense_flops() -> None:
    chips = catalogue()
    assert len(chips) >= 22
    assert chips["H200 SXM"].bf16 == 989e12  # 1,979 with sparsity
    assert chips["H100 SXM"].scale_up == 450e9  # one direction
    assert all(chip.memory > 0 and chip.bandwidth > 0 and chip.bf16 > 0 and chip.source for chip in chips.values())
    quoted = [chip.price for chip in chips.values() if chip.price.low is not None]
    assert len(quoted) > 10
    assert all(price.low <= price.mid <= price.high for price in quoted)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "bytes_there"),
    [("H100", 81_559 * 2**20), ("H200", 143_771 * 2**20), ("A100", 81_920 * 2**20), ("MI300X", 206_141_652_992)],
)
def test_memory_matches_the_driver(name: str, bytes_there: int) -> None:
    assert accelerator(name).memory == bytes_there


def test_one_kind_of_price_is_never_used_for_another() -> None:
    rack, old = accelerator("GB200").price, accelerator("A100").price
    assert (rack.at("low"), rack.at("mid"), rack.at("high")) == (None, None, None)
    assert (rack.at("3yr"), rack.at("owned")) == (3.3, 2.75)
    assert (old.at("3yr"), old.at("owned")) == (None, None)


def test_three_notations_of_clusters_are_parsed() -> None:
    assert (cluster("8x8xH100").devices, cluster("8x8xH100").domain) == (64, 8)
    assert cluster("64xH100").nodes == 8
    assert cluster("H100").devices == 1
    assert cluster("72xGB200").domain == 72


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8x8xH10", "did you mean 'H100'"), ("H100x8", "unknown accelerator"), ("8x8", "expected nodes x devices"),
        ("0x8xH100", "at least one node"), ("12xH100", "take 8 or 16"),
    ],
)  # fmt: skip
def test_invalid_hardware_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster(text)


def test_a_hardware_file_overrides_and_adds_accelerators(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        "host_memory_gb = 512.0\n[accelerator.H100]\nmemory_gb = 94.0\nprice = 2.0\n"
        "[accelerator.mine]\nmemory_gb = 16.0\nbandwidth_gb_s = 100.0\nbf16_tflops = 10.0\n"
    )
    own = Overrides.read(path)
    changed = cluster("1x8xH100", own)
    assert (changed.accelerator.memory, changed.accelerator.price.high, changed.host_memory) == (94e9, 2.0, 512e9)
    assert changed.accelerator.bandwidth == accelerator("H100").bandwidth
    assert accelerator("mine", own).bf16 == 1e13


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[accelerator.H100]\nprice = -1.0\n", "price"), ("[accelerator.H100]\nmemory = 1.0\n", "memory_gb"),
        ("[accelerator.mine]\nmemory_gb = 1.0\n", "lacks bandwidth_gb_s, bf16_tflops"),
    ],
)  # fmt: skip
def test_an_invalid_hardware_file_is_rejected_naming_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        accelerator("mine" if "mine" in text else "H100", Overrides.read(path))
