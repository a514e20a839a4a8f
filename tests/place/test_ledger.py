"""The memory ledger: by hand, on real models, and against the process's actual memory."""

import mmap
from pathlib import Path

import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.events import EventLog, read_events
from plaudit.place.memory.ledger import Ledger
from plaudit.place.memory.meter import HostMeter, new_meter
from plaudit.place.memory.owners import Holdings, reward_engines
from plaudit.rl.loop import RlTraining
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.rollouts.scorer import Scorer
from plaudit.train.run.clock import Clock
from plaudit.train.run.run import Run
from tests.train.rl_world import Silent, recipe, tiny

PPO = {"name": "ppo", "kl": {"coef": 0.05}}


class Gauge:
    """A meter that reports the values it is given."""

    device, capacity, whole = "made up", 1000, False

    def __init__(self) -> None:
        self.taken = self.highest = 0

    def take(self, taken: int, highest: int = 0) -> None:
        self.taken, self.highest = taken, max(self.highest, taken, highest)

    def restart(self) -> None:
        self.highest = self.taken

    def now(self) -> int:
        return self.taken

    def peak(self) -> int:
        return self.highest

    def reserved(self) -> None:
        return None


def made_up(**sizes: int) -> tuple[Ledger, Gauge, dict[str, int]]:
    holdings, gauge = Holdings(), Gauge()
    for owner in sizes:
        holdings.counts[owner] = lambda owner=owner: sizes[owner]  # type: ignore[misc]
    return Ledger(holdings, gauge), gauge, sizes


def written(ledger: Ledger, directory: Path, step: int = 1) -> list[dict[str, object]]:
    log = EventLog(directory)
    ledger.write(log, step)
    log.close()
    return [event for event in read_events(directory) if event["kind"] == "memory"]


def test_memory_without_owner_is_unaccounted_and_temporary_memory_is_activations(tmp_path: Path) -> None:
    ledger, gauge, sizes = made_up(weights=100, gradients=0)
    gauge.take(130)
    ledger.begin("update")
    gauge.take(220, highest=400)
    sizes["gradients"] = 80
    ledger.end("update", 0.5)
    (event,) = written(ledger, tmp_path)
    # The peak of 400: weights 100, gradients 80, the 30 that had no owner at the start, and the rest.
    assert event["bytes"] == {"weights": 100, "gradients": 80, "unaccounted": 30, "activations": 190}
    assert event["start"] == {"gradients": 0, "activations": 0}
    assert event["end"] == {"unaccounted": 40, "activations": 0}
    assert event["taken"] == {"start": 130, "end": 220, "peak": 400}
    assert (event["phase"], event["seconds"], event["device"], event["capacity"]) == ("update", 0.5, "made up", 1000)
    assert ledger.peak == 400


def test_a_repeated_phase_is_logged_once_at_its_peak(tmp_path: Path) -> None:
    ledger, gauge, _ = made_up(weights=100)
    for highest in (150, 300, 200):
        gauge.take(100)
        ledger.begin("update")
        gauge.take(100, highest)
        ledger.end("update", 1.0)
    gauge.take(100, highest=700)  # between two phases
    ledger.begin("publish")
    ledger.end("publish", 0.0)
    update, publish = written(ledger, tmp_path)
    assert update["bytes"] == {"weights": 100, "activations": 200}
    assert (update["times"], update["seconds"]) == (3, 3.0)
    assert publish["bytes"] == {"weights": 100}
    assert ledger.peak == 700
    assert written(ledger, tmp_path) == [update, publish]  # the second write adds no events


def test_owners_that_exceed_the_measured_memory_give_negative_unaccounted(tmp_path: Path) -> None:
    ledger, gauge, _ = made_up(kv=100)
    gauge.take(60)
    ledger.begin("generate")
    ledger.end("generate", 0.0)
    (event,) = written(ledger, tmp_path)
    assert event["bytes"] == {"kv": 100}
    assert event["start"] == {"unaccounted": -40}


def test_the_clock_notifies_watchers_in_order_and_not_of_a_failed_phase() -> None:
    calls: list[str] = []

    class Ear:
        def __init__(self, name: str) -> None:
            self.name = name

        def begin(self, phase: str) -> None:
            calls.append(f"{self.name} {phase}")

        def end(self, phase: str, seconds: float) -> None:
            assert seconds >= 0
            calls.append(f"{phase} {self.name}")

    clock = Clock()
    clock.watchers += [Ear("a"), Ear("b")]
    with clock("one"):
        calls.append("work")
    with pytest.raises(ValueError, match="no"), clock("two"):
        raise ValueError("no")
    assert calls == ["a one", "b one", "work", "one b", "one a", "a two", "b two"]
    clock.count("swap", 2.0)
    assert clock.split()["time/swap"] == 2.0


def test_optimizer_copies_gradients_and_moments_have_the_expected_sizes(tmp_path: Path) -> None:
    count = sum(p.numel() for p in tiny().parameters())
    for dtype, copies in ((torch.float32, 0), (torch.bfloat16, 4 * count)):
        module = tiny().to(dtype)
        optimizer = Optimizer(module, recipe().train)
        assert sum(t.nbytes for t in optimizer.copies()) == copies
        assert optimizer.gradients() == optimizer.moments() == []
        out = module(input_ids=torch.arange(8)[None]).logits
        out.float().sum().backward()
        assert sum(t.nbytes for t in optimizer.gradients()) == 4 * count
        optimizer.step(0)
        assert sum(t.nbytes for t in optimizer.moments()) == 8 * count


def test_used_kv_is_counted_in_blocks() -> None:
    engine = Engine(tiny(), None, kv_bytes=1 << 20)
    assert engine.kv_held() == 0
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, temperature=0))
    # 22 tokens are written in blocks of 16: 2 layers of 2 heads, keys and values of 8 floats each.
    assert engine.kv_held() == 2 * 16 * (2 * 2 * 2 * 8 * 4)
    engine.sleep()
    assert engine.kv_held() == 0
    engine.wake()
    assert engine.kv_held() == 0


def test_reward_engines_lists_the_engines_of_model_rewards() -> None:
    blended = recipe(
        reward={
            "members": {"a": {"path": "sums"}, "b": {"path": "sums-steps"}, "c": {"rule": "exact", "answer": "(x)"}}
        }
    )
    scorer = Scorer(blended.reward)
    try:
        assert [engine.decoder.kind for engine in reward_engines(scorer)] == ["sequence", "token"]
    finally:
        scorer.close()


@pytest.mark.skipif(new_meter(torch.device("cpu")) is None, reason="no /proc")
def test_the_host_meter_measures_allocation_and_peak() -> None:
    meter = HostMeter()
    meter.restart()
    before = meter.now()
    # Pages mapped directly from the kernel: an allocator may return pages that were already resident.
    mapping = mmap.mmap(-1, 64 << 20)
    mapping.write(bytes(64 << 20))
    assert meter.now() - before > 60 << 20
    mapping.close()
    peak = meter.peak()
    if peak is not None:
        assert peak - before > 60 << 20
        meter.restart()
        assert (meter.peak() or 0) - before < 32 << 20
    assert meter.capacity > meter.now() > 0


def test_a_run_logs_its_memory_by_owner(tmp_path: Path) -> None:
    tree = recipe(algorithm=PPO, reward={"path": "sums"}, train={"minibatches": 2})
    with Run(tmp_path / "run", tree) as run:
        training = RlTraining(tree, run, Silent())
        summary = training.fit()
    events = [event for event in read_events(tmp_path / "run") if event["kind"] == "memory"]
    phases = ["prompts", "generate", "reward", "reference", "values", "advantages", "update", "critic", "publish"]
    steps = [[event["phase"] for event in events if event["step"] == step] for step in (1, 2)]
    assert "old" in steps[0]  # later steps leave it out if the engine's log-probs equal the learner's bit for bit
    assert [phase for phase in steps[1] if phase != "old"] == [*phases, "evaluate"]
    policy = sum(p.nbytes for p in training.loaded.module.parameters())
    buffers = sum(b.nbytes for b in training.loaded.module.buffers())
    update = next(event for event in events if (event["step"], event["phase"]) == (2, "update"))
    assert update["times"] == 2
    update_bytes = update["bytes"]
    assert update_bytes["policy weights"] == update_bytes["reference weights"] == policy + buffers
    assert (update_bytes["policy gradients"], update_bytes["policy optimizer"]) == (policy, 2 * policy)
    assert "policy masters" not in update_bytes  # float32 weights need no copy
    critic_bytes = next(event for event in events if (event["step"], event["phase"]) == (2, "critic"))["bytes"]
    assert (
        update_bytes["critic optimizer"] == critic_bytes["critic optimizer"] == 2 * critic_bytes["critic gradients"] > 0
    )
    # No phase has the gradients of both, or gradients of an earlier update.
    assert "critic gradients" not in update_bytes
    assert all("policy gradients" not in e["bytes"] for e in events if e["phase"] != "update")
    first = next(event for event in events if (event["step"], event["phase"]) == (1, "update"))
    assert first["start"]["policy optimizer"] == first["start"]["policy gradients"] == 0
    assert all((event["taken"]["peak"] or 0) <= summary["peak_bytes"] for event in events)
    for event in events:  # owners, program and unaccounted sum to the memory of the process, to the byte
        at_end = {**event["bytes"], **event["end"]}
        assert sum(at_end.values()) == event["taken"]["end"]
