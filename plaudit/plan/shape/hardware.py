"""Accelerators, nodes and clusters. The catalogue is data with its sources; a TOML file overrides any value.

Rates are dense (vendors often print the doubled rates of structured sparsity) and bandwidths one way.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from plaudit.config.table import Positive, Table, check, read_toml
from plaudit.errors import ConfigError, nearest

_CATALOGUE = Path(__file__).parents[1] / "data" / "accelerators.csv"
GB = 1e9
MIB = 1024.0**2
DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""fp4 includes a scale of one byte per sixteen values."""


def activation_bytes(dtype: str) -> float:
    """Bytes of one activation: weights narrower than two bytes are multiplied with two-byte activations."""
    return max(2.0, DTYPE_BYTES[dtype])


PRICES = {
    "low": "on demand, the lowest quote, 2026-08-22",
    "mid": "on demand, the middle quote, 2026-08-22",
    "high": "on demand, the highest quote, 2026-08-22",
    "3yr": "rented for three years, 2026-04-03",
    "owned": "owned by a small cloud, hosting and power included, 2026-04-03",
}
"""Meaning and date of each price level: quotes from skypilot-catalog, the rest from InferenceX."""


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per accelerator and hour, by level. None if no such price is public: no other level replaces it, so that
    accelerators are only compared on prices of the same kind."""

    low: float | None
    mid: float | None
    high: float | None
    three_years: float | None
    owned: float | None
    source: str
    owned_by_hyperscaler: float | None = None
    """The other end of the ownership cost range."""

    @staticmethod
    def given(dollars: float) -> Price:
        return Price(dollars, dollars, dollars, dollars, dollars, "given", dollars)

    def __post_init__(self) -> None:
        for level in PRICES:
            dollars = self.at(level)
            if dollars is not None and dollars < 0:
                raise ConfigError(f"price {level} = {dollars} $/h: a price is zero or more")

    def at(self, level: str) -> float | None:
        price: float | None = getattr(self, "three_years" if level == "3yr" else level)
        return price

    def range(self, level: str) -> tuple[float, float] | None:
        """Lowest and highest price among the sources of the level; None with fewer than two."""
        ends = {"3yr": (None,), "owned": (self.owned_by_hyperscaler, self.owned)}.get(level, (self.low, self.high))
        known = [end for end in ends if end is not None]
        return (min(known), max(known)) if len(set(known)) == 2 else None


@dataclass(frozen=True, slots=True)
class Accelerator:
    name: str
    vendor: str
    memory: float
    """Bytes as reported by the driver where known: the data sheet's number is 1 to 7 % less."""
    bandwidth: float
    bf16: float
    fp8: float
    fp4: float
    """FLOP/s. For a format without hardware support the bf16 rate, as weights are converted to bf16 first."""
    scale_up: float
    """Bytes per second and device, one way, inside a scale-up domain (NVLink, Infinity Fabric, ICI, or PCIe)."""
    domain: int
    scale_out: float
    pcie: float
    tdp: float
    power: float
    """Watts per device at the utility meter: device, host, network and cooling. Zero if unknown."""
    price: Price
    source: str

    def flops(self, dtype: str) -> float:
        return {"fp32": self.bf16 / 2, "bf16": self.bf16, "fp8": self.fp8, "fp4": self.fp4}[dtype]

    @property
    def node(self) -> int:
        """Devices of a typical node: trays of four in a rack-scale domain."""
        return 4 if self.domain == 72 else min(8, self.domain)

    def unpacks(self, dtype: str) -> bool:
        """Whether weights of the format are converted to bf16 before the matmul, for lack of hardware support."""
        return dtype in ("fp8", "fp4") and self.flops(dtype) <= self.bf16


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes with one kind of accelerator. `domain` of its devices communicate without the network."""

    accelerator: Accelerator
    nodes: int
    devices_per_node: int
    host_memory: float

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def domain(self) -> int:
        """Devices that share the fast links. A rack-scale domain spans nodes."""
        rack = self.accelerator.domain > 8
        return min(self.devices, self.accelerator.domain if rack else self.devices_per_node)

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.devices_per_node}x{self.accelerator.name}"

    def hourly(self, level: str) -> float | None:
        """Dollars per hour; None if no such price is public."""
        price = self.accelerator.price.at(level)
        return None if price is None else price * self.devices

    def of(self, chip: Accelerator) -> Cluster:
        """The same number of devices of another accelerator, in trays of four if it comes in such."""
        if chip.domain == 72 and self.devices_per_node == 8:
            return replace(self, accelerator=chip, nodes=2 * self.nodes, devices_per_node=4,
                           host_memory=self.host_memory / 2)  # fmt: skip
        return replace(self, accelerator=chip)

    def part(self, devices: int) -> Cluster:
        """A cluster with `devices` of the devices, in whole nodes if they fill at least one."""
        if devices >= self.devices_per_node:
            return replace(self, nodes=-(-devices // self.devices_per_node))
        return replace(self, nodes=1, devices_per_node=devices)


HOST_GB_PER_GPU = 256
"""DGX H100 and the usual HGX boxes ship with 2 TB in a node of eight."""

_ALIASES = {
    "a100": "A100-80G SXM", "a100-80g": "A100-80G SXM", "a100 80g": "A100-80G SXM", "a100-40g": "A100-40G SXM",
    "a100 40g": "A100-40G SXM", "h100": "H100 SXM", "h100-80g": "H100 SXM", "h200": "H200 SXM", "b200": "B200 SXM",
    "b300": "B300 SXM", "gb200": "GB200 NVL72", "gb300": "GB300 NVL72", "h800": "H800 SXM", "a800": "A800 SXM",
    "rtx4090": "RTX 4090", "4090": "RTX 4090", "rtx pro 6000": "RTX PRO 6000 Server", "tpu7x": "TPU7x Ironwood",
    "ironwood": "TPU7x Ironwood", "v5p": "TPU v5p", "v6e": "TPU v6e", "tpu-v5p": "TPU v5p", "tpu-v6e": "TPU v6e",
}  # fmt: skip


@cache
def catalogue() -> dict[str, Accelerator]:
    with _CATALOGUE.open(newline="", encoding="utf-8") as file:
        return {row["name"]: _accelerator(row) for row in csv.DictReader(file)}


def _accelerator(row: Mapping[str, str]) -> Accelerator:
    def number(key: str, default: float = 0.0) -> float:
        return float(row[key]) if row[key] else default

    bf16 = number("bf16_dense_tflops") * 1e12
    fp8 = number("fp8_dense_tflops") * 1e12 or bf16
    tdp = number("tdp_w")
    # If no all-in figure is published: its ratio to the TDP is 1.75 to 2.5 on the chips that have both.
    power = number("allin_utility_kw_per_gpu") * 1e3 or 2.2 * tdp
    low, mid, high = (number(f"cloud_{level}_usd_h") for level in ("low", "mid", "high"))
    quotes: list[float | None] = [quote for quote in (low, mid, high) if quote] or [None]
    price = Price(
        low=quotes[0], mid=mid or quotes[len(quotes) // 2], high=quotes[-1],
        three_years=number("rental_3yr_usd_h") or None, owned=number("tco_neocloud_usd_h") or None,
        source="; ".join(filter(None, (row["cloud_low_who"], row["cloud_mid_who"], row["cloud_high_who"]))),
        owned_by_hyperscaler=number("tco_hyperscaler_usd_h") or None,
    )  # fmt: skip
    pcie = number("pcie_unidir_gb_s", 32.0) * GB
    return Accelerator(
        name=row["name"], vendor=row["vendor"], memory=number("mem_mib") * MIB or number("mem_gb") * GB,
        bandwidth=number("mem_bw_gb_s") * GB,
        bf16=bf16, fp8=fp8, fp4=number("fp4_dense_tflops") * 1e12 or bf16,
        scale_up=number("scale_up_unidir_gb_s_per_gpu") * GB, domain=int(number("scale_up_domain")),
        scale_out=number("scale_out_gb_s_per_gpu", 12.5) * GB, pcie=pcie, tdp=tdp, power=power, price=price,
        source=row["spec_source"],
    )  # fmt: skip


def accelerator(name: str, overrides: Overrides | None = None) -> Accelerator:
    chips = catalogue()
    own = overrides.accelerator if overrides else {}
    wanted = _ALIASES.get(name.strip().lower(), name.strip())
    chip = next((chips[key] for key in chips if key.lower() == wanted.lower()), None)
    table = next((own[key] for key in own if key.lower() in (name.strip().lower(), wanted.lower())), None)
    if chip is None and table is None:
        short = {key.replace(" SXM", "").replace(" NVL72", "") for key in chips}
        raise ConfigError(f"unknown accelerator {name!r}; {nearest(wanted, {*short, *own})}")
    return chip if table is None else _override(chip, table, name)  # type: ignore[return-value]


def cluster(text: str, overrides: Overrides | None = None) -> Cluster:
    """Parse a cluster: `8x8xH100` is 8 nodes of 8, `64xH100` 64 devices in standard nodes, `H100` one device."""
    match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?([A-Za-z].*?)\s*", text)
    if not match:
        raise ConfigError(f"hardware {text!r}: expected nodes x devices x accelerator, such as 8x8xH100 or 64xH100")
    first, second, name = match.groups()
    device = accelerator(name, overrides)
    per_node = device.node
    if second is not None:
        nodes, count = int(first), int(second)
    else:
        devices = int(first or 1)
        nodes, count = (devices // per_node, per_node) if devices % per_node == 0 else (1, devices)
        if devices % per_node and devices > per_node:
            raise ConfigError(
                f"hardware {text!r}: {devices} devices do not fill nodes of {per_node}; "
                f"take {devices // per_node * per_node} or {(devices // per_node + 1) * per_node}, or nodes x devices"
            )
    if nodes < 1 or count < 1:
        raise ConfigError(f"hardware {text!r}: expected at least one node with one device")
    host = overrides.host_memory_gb if overrides and overrides.host_memory_gb else HOST_GB_PER_GPU * count
    return Cluster(device, nodes, count, host * GB)


class AcceleratorTable(Table):
    """Keys of an accelerator in a hardware file; a new one needs memory, bandwidth and a rate."""

    memory_gb: Positive | None = None
    bandwidth_gb_s: Positive | None = None
    bf16_tflops: Positive | None = None
    fp8_tflops: Positive | None = None
    fp4_tflops: Positive | None = None
    scale_up_gb_s: Positive | None = None
    domain: int | None = None
    scale_out_gb_s: Positive | None = None
    pcie_gb_s: Positive | None = None
    tdp_w: Positive | None = None
    power_w: Positive | None = None
    price: float | None = None
    """$ per hour, replacing every price level"""


class Overrides(Table):
    accelerator: Mapping[str, AcceleratorTable] = {}
    host_memory_gb: Positive | None = None
    """Of one node."""
    constants: Mapping[str, float] = {}
    """Constants of plan/shape/constants.py, as `plaudit plan --calibrate` writes them."""

    @staticmethod
    def read(path: Path) -> Overrides:
        tree = read_toml(path, "hardware file")
        tables = tree.get("accelerator")
        for name, table in tables.items() if isinstance(tables, dict) else ():
            # Checked separately, so that the error message can list the keys similar to an unknown one.
            check(TypeAdapter(AcceleratorTable), table, f"{path}: [accelerator.{name}]", AcceleratorTable)
        overrides: Overrides = check(TypeAdapter(Overrides), tree, str(path), Overrides)
        return overrides


_SCALES: dict[str, tuple[str, float]] = {
    "memory_gb": ("memory", GB), "bandwidth_gb_s": ("bandwidth", GB), "bf16_tflops": ("bf16", 1e12),
    "fp8_tflops": ("fp8", 1e12), "fp4_tflops": ("fp4", 1e12), "scale_up_gb_s": ("scale_up", GB),
    "domain": ("domain", 1), "scale_out_gb_s": ("scale_out", GB), "pcie_gb_s": ("pcie", GB), "tdp_w": ("tdp", 1),
    "power_w": ("power", 1),
}  # fmt: skip


def _override(base: Accelerator | None, table: AcceleratorTable, name: str) -> Accelerator:
    changes: dict[str, Any] = {
        field: type_of(field)(getattr(table, key) * scale)
        for key, (field, scale) in _SCALES.items()
        if getattr(table, key) is not None
    }
    if table.price is not None:
        changes["price"] = Price.given(table.price)
    if base is not None:
        return replace(base, **changes)
    missing = [key for key in ("memory_gb", "bandwidth_gb_s", "bf16_tflops") if getattr(table, key) is None]
    if missing:
        raise ConfigError(f"accelerator {name!r} is not in the catalogue and lacks {', '.join(missing)}")
    bf16 = changes["bf16"]
    fp8 = changes.get("fp8", bf16)
    defaults = {
        "vendor": "", "fp8": fp8, "fp4": fp8, "scale_up": 32 * GB, "domain": 8, "scale_out": 12.5 * GB,
        "pcie": 32 * GB, "tdp": 0.0, "power": 2.2 * changes.get("tdp", 0.0),
        "price": Price(None, None, None, None, None, "not given"),
        "source": "given",
    }  # fmt: skip
    return Accelerator(name=name, **{**defaults, **changes})


def type_of(field: str) -> type:
    return int if field == "domain" else float


assert {field for field, _ in _SCALES.values()} <= {field.name for field in fields(Accelerator)}
