"""Swapped: state that a phase does not need is not in memory, and no number changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plaudit.config import RlRecipe
from plaudit.core import Engine, SamplingParams
from plaudit.errors import StorageError
from plaudit.events import read_events
from plaudit.place.memory.residency import Dropped, Parked, Residency, Sleeping
from plaudit.place.memory.stores import FileStore
from plaudit.place.swapped import Swapped
from plaudit.rl.loop import RlTraining
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.run.clock import Clock
from plaudit.train.run.run import Run
from tests.train.rl_world import Silent, recipe, tiny

PPO = {"algorithm": {"name": "ppo", "kl": {"coef": 0.05}}, "reward": {"path": "sums"}}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": PPO,
    "ppo-minibatches": {**PPO, "train": {"minibatches": 2, "epochs": 2}},
    "grpo": {"algorithm": {"name": "grpo", "kl": {"coef": 0.05}}},
    "dapo": {"algorithm": {"name": "dapo", "dynamic": {"rounds": 3}}, "reward": {"path": "sums"}},
    "search": {
        "algorithm": {"name": "expert-iteration"},
        "sampling": {"step": ";"},
        "search": {"prm": {"path": "sums-steps"}},
    },
    "lora": {"algorithm": {"name": "grpo", "kl": {"coef": 0.05}}, "model": {"lora": {"rank": 4}}},
}


def built(name: str, placement: str, steps: int) -> RlRecipe:
    tables = RUNS[name]
    train = {"steps": steps, "checkpoint": {"every": steps}, "eval_every": 2, "dump": True, **tables.get("train", {})}
    return recipe(**{**tables, "train": train, "placement": {"name": placement}})


def fitted(directory: Path, tree: RlRecipe, **options: Any) -> tuple[RlTraining, list[dict[str, float]]]:
    viewer = Silent()
    with Run(directory, tree, **options) as run:
        training = RlTraining(tree, run, viewer)
        training.fit()
    return training, [
        {name: value for name, value in seen.items() if not name.startswith(("time/", "perf/"))} for seen in viewer.seen
    ]


def assert_equal_runs(tmp_path: Path, name: str, steps: int) -> None:
    """Samples, losses, weights, critic and optimizers match bit for bit."""
    _, expected = fitted(tmp_path / "colocated", built(name, "colocated", steps))
    swapped, actual = fitted(tmp_path / "swapped", built(name, "swapped", steps))
    assert isinstance(swapped.placement, Swapped)
    assert actual == expected
    files = {path.relative_to(tmp_path / "colocated") for path in (tmp_path / "colocated").rglob("*.safetensors")}
    assert len(files) >= 3
    for file in files:
        before, after = load_file(tmp_path / "colocated" / file), load_file(tmp_path / "swapped" / file)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before), file
    for dump in sorted((tmp_path / "colocated" / "rollouts").iterdir()):
        assert dump.read_bytes() == (tmp_path / "swapped" / "rollouts" / dump.name).read_bytes()


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_three_steps_match_colocated(tmp_path: Path, name: str) -> None:
    assert_equal_runs(tmp_path, name, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_ten_steps_match_colocated(tmp_path: Path, name: str) -> None:
    assert_equal_runs(tmp_path, name, 10)


def test_each_phase_has_only_the_state_it_needs_in_memory(tmp_path: Path) -> None:
    fitted(tmp_path / "run", built("ppo", "swapped", 2))
    events = [e for e in read_events(tmp_path / "run") if e["kind"] == "memory" and e["step"] == 2]
    policy = {"policy optimizer", "policy gradients"}
    critic = {"critic optimizer", "critic gradients"}
    needed = {
        "generate": {"KV"}, "reward": {"reward weights"}, "old": set(), "reference": {"reference weights"},
        "values": {"critic weights"}, "update": policy, "critic": {"critic weights", *critic}, "evaluate": {"KV"},
    }  # fmt: skip
    for event in events:
        if event["phase"] in needed:
            # Entries of a few kilobytes are buffers (rotary embedding angles), which stay in memory.
            owners = {name for name, size in event["bytes"].items() if size > 10_000 and name != "policy weights"}
            assert owners - {"program", "unaccounted", "activations", "reward weights"} == needed[event["phase"]] - {
                "reward weights"
            }
            assert ("reward weights" in owners) == (event["phase"] in ("reward", "evaluate"))
    metrics = [
        e["values"] for e in read_events(tmp_path / "run") if e["kind"] == "metric" and "time/swap" in e["values"]
    ]
    assert len(metrics) == 2


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocated", "swapped"])
def test_a_run_resumes_in_either_placement(tmp_path: Path, placement: str) -> None:
    _, expected = fitted(tmp_path / "straight", built("ppo", "swapped", 4))
    short = built("ppo", placement, 2)
    _, first = fitted(tmp_path / "run", short)
    longer = short.model_copy(update={"train": short.train.model_copy(update={"steps": 4})})
    _, second = fitted(tmp_path / "run", longer, resume=True)
    assert [*first, *second] == expected


def test_offloaded_tensors_are_restored_unchanged(tmp_path: Path) -> None:
    module = tiny().to(torch.bfloat16)
    optimizer = Optimizer(module, recipe().train)
    module(input_ids=torch.arange(8)[None]).logits.float().sum().backward()
    optimizer.step(0)
    odd = [torch.randn(4, 6).t(), torch.tensor(3.0), torch.empty(0, 5), torch.tensor([float("nan"), -0.0])]
    tensors = [*module.parameters(), *optimizer.masters.values(), *odd]
    tensors += [value for state in optimizer.adam.state.values() for value in state.values()]
    before = [(tensor.detach().clone(), tensor.stride(), id(tensor)) for tensor in tensors]
    parked = Parked(lambda: tensors, FileStore(tmp_path))
    for _ in range(2):
        parked.leave()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        parked.come()
    parked.close()
    for tensor, (value, stride, identity) in zip(tensors, before, strict=True):
        assert (id(tensor), tensor.stride()) == (identity, stride)
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    assert list(tmp_path.iterdir()) == []  # the file never had a name
    optimizer.zero()
    module(input_ids=torch.arange(8)[None]).logits.float().sum().backward()
    assert optimizer.step(1)["grad_norm"] > 0


def test_frozen_tensors_are_written_once(tmp_path: Path) -> None:
    weights = [torch.arange(5.0)]
    parked = Parked(lambda: weights, FileStore(tmp_path), frozen=True)
    parked.leave()
    parked.come()
    weights[0].zero_()  # violates frozen=True
    parked.leave()
    parked.come()
    parked.close()
    assert weights[0].tolist() == [0, 1, 2, 3, 4]


def test_a_failed_write_is_reported_with_the_fix(tmp_path: Path) -> None:
    import resource

    parked = Parked(lambda: [torch.zeros(1 << 20)], FileStore(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(StorageError, match=r'set placement\.name = "colocated"'):
            parked.leave()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        parked.close()


def test_an_engine_generates_the_same_after_sleeping() -> None:
    engine = Engine(tiny(), None, kv_bytes=1 << 20)
    params = SamplingParams(max_tokens=12, seed=5)
    expected = engine.generate([[1, 2, 3], [4, 5]], params)
    sleeping = Sleeping(engine)
    sleeping.leave()
    assert engine.kv_held() == 0
    assert sleeping.size > 0
    sleeping.come()
    assert engine.generate([[1, 2, 3], [4, 5]], params) == expected


class Gauge:
    device, capacity, whole = "made up", 1000, False

    def __init__(self) -> None:
        self.highest = 0

    def restart(self) -> None: ...

    def now(self) -> int:
        return self.highest

    def peak(self) -> int:
        return self.highest

    def reserved(self) -> None:
        return None


class Made:
    """A resident that records the calls it gets."""

    def __init__(self, name: str, size: int, told: list[str]) -> None:
        self.name, self.size, self.told, self.here = name, size, told, True

    def leave(self) -> None:
        self.told.append(f"-{self.name}")
        self.here = False

    def come(self) -> None:
        self.told.append(f"+{self.name}" if not self.here else f"={self.name}")
        self.here = True

    def come_ahead(self) -> bool:
        self.told.append(f">{self.name}")
        self.here = True
        return True

    def close(self) -> None: ...


def test_state_is_prefetched_where_that_does_not_raise_the_peak() -> None:
    calls: list[str] = []
    clock, gauge = Clock(), Gauge()
    residents = {name: Made(name, size, calls) for name, size in {"model": 20, "optimizer": 60}.items()}
    needs = {"score": {"model"}, "update": {"optimizer"}, "generate": set[str]()}
    clock.watchers.append(Residency(residents, needs, clock, gauge))

    def step(peaks: dict[str, int]) -> list[str]:
        calls.clear()
        for phase, peak in peaks.items():
            with clock(phase):
                gauge.highest = peak
        return list(calls)

    peaks = {"generate": 50, "score": 30, "other": 99, "update": 100}
    assert step(peaks) == ["-model", "-optimizer", "+model", "-model", "+optimizer"]
    # The model is prefetched during generation (50 + 20 of 100), the optimizer during scoring (30 + 60), nothing after
    # the update.
    assert step(peaks) == ["-optimizer", ">model", "=model", ">optimizer", "-model", "=optimizer"]
    # Scoring rises to 45, which is 45 + 60 with the optimizer: from then on the optimizer is loaded on demand.
    assert step({**peaks, "score": 45 + 60}) == ["-optimizer", ">model", "=model", ">optimizer", "-model", "=optimizer"]
    assert step({**peaks, "score": 45}) == ["-optimizer", ">model", "=model", "-model", "+optimizer"]
    assert clock.split()["time/swap"] >= 0


def test_gradients_are_dropped(tmp_path: Path) -> None:
    module = tiny()
    optimizer = Optimizer(module, recipe().train)
    module(input_ids=torch.arange(8)[None]).logits.sum().backward()
    Dropped(optimizer).leave()
    assert all(p.grad is None for p in module.parameters())
