"""`plaudit plan --from`: a run's log against its plan, and constants refitted to it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plaudit.config import load_recipe, to_toml
from plaudit.events import EventLog
from plaudit.plan import GenerationLayout, TrainingLayout, predict
from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.observed.measured import other_run
from plaudit.plan.shape.hardware import Overrides
from plaudit.plan.shape.layouts import GenerationLayout as Engines
from tests.command import plaudit_here

SLOWER = {"generation": 2.5, "scoring": 1.2, "training": 0.8, "weights": 2.5, "transitions": 1.5}
STEPS = 5
WORK: dict[str, Any] = {"prompt": 200, "response": 1000, "max_response": 2000, "batch": 512, "samples_per_prompt": 8}
LAYOUTS = ("--generation-layout", "tp2", "--training-layout", "tp1 dp8 fsdp")
WORDS = ("--model", "llama-3.1-8b", "--hardware", "1x8xH100", "--placement", "swapped", "--samples", "8")


def plaudit(*words: object) -> subprocess.CompletedProcess[str]:
    return plaudit_here("plan", *map(str, words))


def planned() -> Prediction:
    return predict("llama-3.1-8b", "1x8xH100", "swapped", generation=GenerationLayout(tp=2),
                   training=TrainingLayout(dp=8, zero=3), **WORK)  # fmt: skip


def as_measured(plan: Prediction) -> dict[str, float]:
    """Seconds of a run whose phases deviate from the plan, each by its own factor."""
    return {phase.name: SLOWER[phase.name] * phase.seconds.value for phase in plan.phases}


def verl_step(number: int) -> dict[str, float]:
    seconds = as_measured(planned())
    step = {
        "timing_s/gen": seconds["generation"], "timing_s/old_log_prob": 0.6 * seconds["scoring"],
        "timing_s/ref": 0.3 * seconds["scoring"], "timing_s/adv": 0.1 * seconds["scoring"],
        "timing_s/update_actor": seconds["training"], "timing_s/update_weights": seconds["weights"],
        "timing_s/step": sum(seconds.values()) + 100 * (number == 1), "timing_s/save_checkpoint": 0.0,
        "prompt_length/mean": WORK["prompt"], "response_length/mean": WORK["response"],
        "response_length/max": WORK["max_response"],
        "perf/total_num_tokens": WORK["batch"] * (WORK["prompt"] + WORK["response"]),
    }  # fmt: skip
    return {**step, "perf/throughput": step["perf/total_num_tokens"] / step["timing_s/step"] / 8}


def verl_file(path: Path, steps: int = STEPS) -> Path:
    path.write_text("".join(json.dumps({"step": n, "data": verl_step(n)}) + "\n" for n in range(1, steps + 1)))
    return path


def verl_console(path: Path) -> Path:
    lines = ["(TaskRunner pid=71) Training Progress:   0%|          | 0/100"]
    for n in range(1, STEPS + 1):
        pairs = [f"{key}:{value!r}" if n % 2 else f"{key}:np.float64({value!r})" for key, value in verl_step(n).items()]
        lines.append(f"(TaskRunner pid=71) step:{n} - " + " - ".join(pairs))
    path.write_text("\n".join(lines))
    return path


def nemo_timing() -> dict[str, float]:
    took = as_measured(planned())
    return {
        "generation": took["generation"], "policy_and_reference_logprobs": took["scoring"],
        "policy_training": took["training"], "prepare_for_generation/total": took["weights"] + took["transitions"],
        "prepare_for_generation/transfer_and_update_weights": took["weights"],
    }  # fmt: skip


def nemo_metrics(path: Path) -> Path:
    """In the format of NeMo-RL's test suites: every metric by step."""
    timing = {**nemo_timing(), "total_step_time": sum(as_measured(planned()).values())}
    figures = {f"timing/train/{key}": value for key, value in timing.items()} | {
        "train/mean_prompt_length": WORK["prompt"], "train/mean_gen_tokens_per_sample": WORK["response"],
        "train/gen_tokens_per_sample/max": WORK["max_response"],
        "train/total_num_tokens": WORK["batch"] * (WORK["prompt"] + WORK["response"]),
    }  # fmt: skip
    path.write_text(json.dumps({key: {str(n): value for n in range(1, STEPS + 1)} for key, value in figures.items()}))
    return path


def nemo_console(path: Path) -> Path:
    """The console has two decimals and no prompt lengths."""
    step_seconds = sum(as_measured(planned()).values())
    step = [
        f"  • Mean Generation Length: {WORK['response']:.4f}",
        "",
        "⏱️  Timing:",
        f"  • Total step time: {step_seconds:.2f}s",
    ]
    step += [f"  • {key}: {value:.2f}s ({value / step_seconds * 100:.1f}%)" for key, value in nemo_timing().items()]
    path.write_text("\n".join(step * STEPS))
    return path


@pytest.mark.parametrize("write", [verl_file, verl_console, nemo_metrics, nemo_console])
def test_phases_are_read_from_logs_of_other_projects(write: Any, tmp_path: Path) -> None:
    measured = other_run(write(tmp_path / "log"))
    expected = as_measured(planned())
    assert measured.steps == STEPS - 1
    for name, seconds in measured.phases.items():
        assert seconds == pytest.approx(expected[name], abs=0.011)
    assert {"generation", "scoring", "training", "weights"} <= measured.phases.keys()
    assert measured.step == pytest.approx(sum(expected.values()), abs=0.011)
    assert measured.response == WORK["response"]
    if write is not nemo_console:
        assert (measured.prompt, measured.batch, measured.longest) == (200, 512, 2000)


@pytest.mark.parametrize("write", [verl_file, nemo_metrics])
def test_a_plan_with_refitted_constants_matches_the_run(write: Any, tmp_path: Path) -> None:
    log, out = write(tmp_path / "log"), tmp_path / "own.toml"
    run = plaudit("--from", log, *WORDS, *LAYOUTS, "--out", out, "--json")
    assert run.returncode == 0, run.stderr
    data = json.loads(run.stdout)
    assert "generation deviates the most" in data["headline"]
    rows = {row["name"]: row for row in data["phases"]}
    assert rows["generation"]["factor"] == pytest.approx(2.5, rel=0.01)
    # A plan with the refitted file matches every measured phase within a few percent.
    replanned = predict("llama-3.1-8b", "1x8xH100", "swapped", generation=GenerationLayout(tp=2),
                    training=TrainingLayout(dp=8, zero=3), **WORK,
                    constants=_constants(out))  # fmt: skip
    for name, seconds in other_run(log).phases.items():
        assert replanned.phase(name).seconds.value == pytest.approx(seconds, rel=0.03), name


def _constants(path: Path) -> Any:
    from plaudit.plan import Constants

    return Constants().changed(Overrides.read(path).constants)


def test_the_plan_command_accepts_the_refitted_file(tmp_path: Path) -> None:
    log, out = verl_file(tmp_path / "log"), tmp_path / "own.toml"
    own = tmp_path / "before.toml"
    own.write_text("[accelerator.H100]\nprice = 2.5\n[constants]\nlength_spread = 0.9\n")
    assert plaudit("--from", log, *WORDS, *LAYOUTS, "--hardware-file", own, "--out", out).returncode == 0
    overrides = Overrides.read(out)
    assert overrides.accelerator["H100"].price == 2.5
    assert overrides.constants["length_spread"] == 0.9
    replanned = plaudit("--from", log, *WORDS, *LAYOUTS, "--hardware-file", out)
    assert "no phase deviates by a twentieth of the step" in replanned.stdout, replanned.stdout


def our_run(directory: Path, steps: int, **more: float) -> Path:
    directory.mkdir()
    recipe = load_recipe(Path("sums-grpo"))
    (directory / "recipe.toml").write_text(to_toml(recipe))
    log = EventLog(directory)
    for step in range(1, steps + 1):
        log.metric({"time/generate": 1.0, "time/reward": 0.1, "time/update": 0.5, "time/publish": 0.001,
                    "time/step": 1.7, "length/mean": 28.0, "length/prompt_mean": 9.0, **more}, step=step)  # fmt: skip
    log.close()
    return directory


def test_a_plaudit_run_is_planned_from_its_recipe(tmp_path: Path) -> None:
    run = our_run(tmp_path / "run", STEPS, **{"time/evaluate": 5.0, "time/step": 6.7})
    out = tmp_path / "own.toml"
    compared = plaudit("--from", run, "--hardware", "1x1xH100", "--out", out)
    assert compared.returncode == 0, compared.stderr
    assert "A step took 1.7 s" in compared.stdout
    assert "plan: colocated: generation tp1, training tp1 dp1" in compared.stdout
    assert "outside of any plan (evaluation, checkpoints, tools): 5.0 s" in compared.stdout
    assert "in no phase: 0.099 s" in compared.stdout
    replanned = plaudit("--from", run, "--hardware", "1x1xH100", "--hardware-file", out, "--json")
    rows = {row["name"]: row for row in json.loads(replanned.stdout)["phases"]}
    for name in ("generation", "scoring"):
        assert rows[name]["planned"] == pytest.approx(rows[name]["measured"], rel=0.03)


def test_invalid_comparisons_are_rejected(tmp_path: Path) -> None:
    short, log = our_run(tmp_path / "short", 3), verl_file(tmp_path / "log")
    other = tmp_path / "other.log"
    other.write_text("step 1 loss 0.3\n")
    cases = [
        (("--from", short, "--hardware", "1x1xH100"), "3 steps, of which the first warms up; a comparison takes 4"),
        (("--from", short), "say on what it ran with --hardware"),
        (("--from", our_run(tmp_path / "run", STEPS), "--hardware", "1x8xH100"), "took 1: give --hardware 1x1xH100"),
        (("--from", other, *WORDS), "no line has timing_s/step or timing/train/total_step_time"),
        (("--from", tmp_path / "none", *WORDS), "neither a run directory with events.jsonl nor a log file"),
        (("--from", log, "--hardware", "1x8xH100"), "verl's log does not name the model: give --model"),
        (("--from", log, *WORDS, "--out", tmp_path / "x.toml"), "--generation-layout and --training-layout"),
        (("--from", log, *WORDS[:3], "2x8xH100", *WORDS[4:]), "by its throughput the run of"),
        (("--from", log, *WORDS, *LAYOUTS[:2], "--training-layout", "tq8"), "'tq8' is none of tpN"),
        (("--model", "llama-3.1-8b", *LAYOUTS), "set the run with --from"),
    ]  # fmt: skip
    for words, message in cases:
        run = plaudit(*words)
        assert run.returncode, words
        assert message in run.stderr.replace("\n", " "), (words, run.stderr)


def test_waiting_time_of_an_async_run_is_not_used_as_generation_time(tmp_path: Path) -> None:
    """one-step-off: `gen` is the time the trainer waits, so that no constant of generation is fitted to it."""
    words = ("--model", "llama-3.1-8b", "--hardware", "1x8xH100", "--placement", "async", "--samples", "8",
             "--generation-layout", "tp1", "--training-layout", "dp4 fsdp", "--json")  # fmt: skip
    run = plaudit("--from", verl_file(tmp_path / "log"), *words)
    assert run.returncode == 0, run.stderr
    data = json.loads(run.stdout)
    assert {row["name"]: row["measured"] for row in data["phases"]}["generation"] is None
    assert data["seconds_waiting"] == pytest.approx(as_measured(planned())["generation"])
    assert "layer_seconds" not in data["constants"]


def test_printed_layouts_can_be_parsed() -> None:
    for layout in (Engines(4, 2), Engines(2, 1, 8)):
        assert Engines.parse(str(layout)) == layout
    for cut in (TrainingLayout(2, 4, 8, zero=1), TrainingLayout(dp=8, zero=3, recompute="full", park=True),
                TrainingLayout(4, 2, 2, 8, 2, offload_optimizer=True, recompute="full")):  # fmt: skip
        assert TrainingLayout.parse(str(cut), cut.micro_tokens) == cut


@pytest.mark.slow
def test_a_real_run_is_planned_accurately_after_the_refit(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "own.toml"
    trained = plaudit_here("train", "sums-grpo", "--set", "train.steps=6", "--set", "data.eval_items=4", "--set",
                           "train.prompts_per_step=16", "--out", str(run))  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    machine = tmp_path / "machine.toml"
    # A custom slow accelerator, closer to a CPU than any in the catalogue.
    machine.write_text("[accelerator.slow]\nmemory_gb = 16.0\nbandwidth_gb_s = 10.0\nbf16_tflops = 0.1\n")
    words = ("--from", run, "--hardware", "1x1xslow", "--hardware-file")
    assert plaudit(*words, machine, "--out", out).returncode == 0
    data = json.loads(plaudit(*words, out, "--json").stdout)
    for row in data["phases"]:
        if row["name"] in ("generation", "scoring", "training"):
            assert row["planned"] == pytest.approx(row["measured"], rel=0.05), row
