"""`plaudit plan --sweep nodes` and `--utilisation`: tables whose numbers match single plans."""

import json
import subprocess

import pytest

from plaudit.plan.options import PlanOptions
from plaudit.plan.question import ask
from plaudit.plan.utilisation import loads, utilisations
from tests.command import plaudit_here

WORDS = ("--model", "llama-3.1-8b", "--placement", "hybrid")


def plaudit(*words: str) -> subprocess.CompletedProcess[str]:
    return plaudit_here("plan", *words)


def test_a_sweep_has_the_numbers_of_the_single_plans() -> None:
    run = plaudit(*WORDS, "--sweep", "nodes", "--hardware", "2x8xH100", "--compare", "H100,GB200", "--price", "3yr",
                  "--json")  # fmt: skip
    assert run.returncode == 0, run.stderr
    swept = json.loads(run.stdout)
    rows = {row["hardware"]: row for row in swept["any_software"]}
    # The same number of devices of each: trays of four in pairs.
    assert list(rows) == ["1x8xH100 SXM", "2x8xH100 SXM", "2x4xGB200 NVL72", "4x4xGB200 NVL72"]
    alone = json.loads(plaudit(*WORDS, "--hardware", "2x8xH100", "--price", "3yr", "--json").stdout)
    fastest = min(alone["plans"], key=lambda plan: plan["step_seconds"])
    wide = rows["2x8xH100 SXM"]
    assert wide["step_seconds"] == fastest["step_seconds"]
    assert wide["dollars_per_million_tokens"] == fastest["dollars_per_million_tokens"]["3yr"]
    first = rows["1x8xH100 SXM"]
    assert first["efficiency_per_device"] == 1
    assert wide["efficiency_per_device"] == pytest.approx(first["step_seconds"] / wide["step_seconds"] / 2)
    # The cost of a token follows from the hourly price and the speed.
    tokens = 1024 * 1024
    assert wide["dollars_per_million_tokens"] == pytest.approx(
        wide["dollars_per_hour"] / 3600 * wide["step_seconds"] / tokens * 1e6
    )
    cheapest = min(rows.values(), key=lambda row: row["dollars_per_million_tokens"])
    assert f"Cheapest: {cheapest['hardware']}" in swept["headline"]


def test_the_sweep_table_reports_where_nothing_fits() -> None:
    run = plaudit("--model", "llama-3.1-70b", "--placement", "disaggregated", "--sweep", "nodes", "--hardware",
                  "3x8xH100", "--algorithm", "ppo")  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "nothing fits on 1x8xH100 SXM" in run.stdout
    assert "per device" in run.stdout


def test_cost_per_token_rises_at_partial_load() -> None:
    question = ask(PlanOptions(model="llama-3.1-8b", hardware="1x8xH100", placement=["hybrid"]))
    by_load = loads(question.answer(), (0.25, 0.5, 1.0))
    quarter, half, full = by_load.loads
    assert full.training is not None
    assert full.serving is not None
    (best,) = by_load.trained.values()
    assert full.training == best.cost.million_tokens["mid"].value
    assert (quarter.training, half.training) == pytest.approx((4 * full.training, 2 * full.training))
    assert (quarter.serving, half.serving) == pytest.approx((4 * full.serving, 2 * full.serving))
    (server,) = by_load.served.values()
    assert full.sequences == pytest.approx(server.most)
    for load in by_load.loads:
        assert server.tokens_per_second(load.sequences) == pytest.approx(load.tokens_per_second)
    # Steps with fewer sequences are shorter, so that a quarter of the rate needs less than a quarter of the sequences.
    assert quarter.sequences < full.sequences / 4
    assert quarter.token_seconds < half.token_seconds < full.token_seconds
    # By hand: a step gives every sequence a token, and each token carries its share of the prefill.
    reading = server.replica.prefill_seconds(512) / 1024
    step = server.replica.step_seconds(server.most, 512 + 512)
    assert full.tokens_per_second == pytest.approx(8 * server.most / (step + server.most * reading))


def test_utilisation_is_printed_as_a_table_and_as_json() -> None:
    words = (*WORDS, "--hardware", "1x8xH100", "--utilisation", "0.5,1")
    run = plaudit(*words)
    assert run.returncode == 0, run.stderr
    assert "training $/M tokens" in run.stdout
    assert "50%" in run.stdout
    data = json.loads(plaudit(*words, "--json").stdout)
    assert [load["utilisation"] for load in data["loads"]] == [0.5, 1.0]
    assert data["serving"]["1x8xH100 SXM"]["layout"].startswith("tp")
    assert utilisations("0.2..1.0") == (0.2, 0.4, 0.6, 0.8, 1.0)


def test_invalid_sweep_and_utilisation_options_are_rejected() -> None:
    cases = {
        ("--utilisation", "0"): "--utilisation 0: expected shares above 0 and up to 1",
        ("--utilisation", "0.5..1.2"): "--utilisation 0.5..1.2: expected shares",
        ("--utilisation", "many"): "--utilisation many: expected shares",
        ("--sweep", "node"): "unknown sweep 'node'",
        ("--sweep", "nodes", "--utilisation", "0.5"): "ask for one at a time",
        ("--sweep", "nodes", "--budget", "60/h"): "leave out --budget",
        ("--sweep", "nodes", "--hardware", "1x1xL40S", "--algorithm", "ppo"): "fits on none of L40S",
    }
    for words, message in cases.items():
        run = plaudit(*WORDS, *words)
        assert run.returncode, words
        assert message in run.stderr.replace("\n", " "), (words, run.stderr)
