"""The report page in a real browser, opened from a file, without network requests."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plaudit.events import EventLog
from plaudit.report.history import history_of, read_history
from plaudit.report.page import MOST_POINTS, MOST_SAMPLE_TOKENS, render_page
from tests.browser import PATIENCE, chromium, expect, in_browser
from tests.report.made_up import ASYNCHRONOUS, CRITIC, HEALTHY, HOSTILE, write_examples, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

HACKED = {
    **HEALTHY,
    **CRITIC,
    **ASYNCHRONOUS,
    "reward/mean": lambda x: -2 + 5 * x,
    "accuracy": lambda x: 0.3 + 0.9 * x - 1.1 * x * x,
}


def data_of(page: str) -> dict[str, list[dict[str, object]]]:
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data: dict[str, list[dict[str, object]]] = json.loads(embedded)
    return data


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "grpo")


@pytest.fixture(scope="module")
def two(one: Path) -> Path:
    return write_run(one.parent / "ppo", HACKED, steps=90, seed=1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[object]:
    """Opens the page of runs. It must log nothing to the console and make no network requests."""
    opened: list[Page] = []
    complaints: list[str] = []
    requested: list[str] = []

    def show(*runs: Path, scheme: str = "light", width: int = 1280, height: int = 900) -> Page:
        file = tmp_path / "report.html"
        file.write_text(render_page([read_history(run) for run in runs]), encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.set_default_timeout(PATIENCE)
        page.goto(file.as_uri())
        opened.append(page)
        return page

    yield show
    for page in opened:
        page.close()
    assert complaints == []
    assert {url.partition(":")[0] for url in requested} <= {"file", "data"}
    assert len([url for url in requested if url.startswith("file:")]) == len(opened)


@in_browser
def test_curves_are_drawn_and_show_their_values_on_hover(open_page, one: Path) -> None:  # type: ignore[no-untyped-def]
    page = open_page(one)
    expect(page.locator(".verdict")).to_contain_text("Healthy. Reward 0.3")
    expect(page).to_have_title("grpo – Plaudit report")
    for title in ("Reward and truth", "KL to the reference", "Entropy", "Length of samples", "Samples cut off",
                  "Gradient norm", "Trainer against engine", "Rewards one by one"):  # fmt: skip
        figure = page.locator("figure", has=page.get_by_role("heading", name=title, exact=True))
        drawn = [path for path in figure.locator("path.curve").all() if (path.get_attribute("d") or "").count("L") > 50]
        assert drawn, title
    first = page.locator("figure").first
    assert first.locator("svg[role=img] circle").count() == 14  # seven evaluations, reward and truth
    expect(page.get_by_text("The same at every step: policy/loss 0", exact=False)).to_be_visible()
    before = first.locator(".key b").first.inner_text()
    first.locator("svg[role=img]").hover(position={"x": 100, "y": 100})
    expect(page.locator(".at").first).to_contain_text("step ")
    assert first.locator(".key b").first.inner_text() != before
    first.locator("svg[role=img]").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".at").first).to_have_text(re.compile(r"step \d+"))
    page.mouse.move(5, 5)
    smooth = first.locator("path.raw").count()
    page.get_by_label("smoothed").uncheck()
    assert first.locator("path.raw").count() < smooth


@in_browser
def test_the_csv_download_has_every_value(open_page, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """One value per line for every run; a name with a comma or a quotation mark stays one field."""
    runs = [write_run(tmp_path / 'a, "b"', steps=12), write_run(tmp_path / "plain", steps=9, seed=1)]
    page = open_page(*runs)
    with page.expect_download() as download:
        page.get_by_text("CSV", exact=True).click()
    file = tmp_path / "saved.csv"
    download.value.save_as(file)
    with file.open(encoding="utf-8", newline="") as lines:
        head, *rows = csv.reader(lines)
    assert head == ["run", "metric", "step", "value"]
    assert download.value.suggested_filename.endswith(".csv")
    curves = {
        (str(run["name"]), metric, step): value
        for run in data_of(render_page([read_history(run) for run in runs]))["runs"]
        for metric, (steps, values) in run["curves"].items()  # type: ignore[attr-defined]
        for step, value in zip(steps, values, strict=True)
    }
    assert {run for run, *_ in rows} == {'a, "b"', "plain"}
    from_csv = {(run, metric, int(step)): value for run, metric, step, value in rows}
    assert len(rows) == len(from_csv) == len(curves)
    assert {key: None if value == "" else float(value) for key, value in from_csv.items()} == curves


@in_browser
def test_the_page_shows_diagnosis_times_and_memory(open_page, two: Path) -> None:  # type: ignore[no-untyped-def]
    page = open_page(two)
    expect(page.locator(".verdict")).to_contain_text("Not well: over-optimisation")
    expect(page.locator(".diagnosis > .finding").first).to_contain_text("the truth falls")
    onset = re.search(r"Since step (\d+)", page.locator(".diagnosis > .finding").first.inner_text())
    assert onset is not None
    expect(page.locator("figure path.begins")).to_have_count(1)  # the start of it in the plot of the reward
    expect(page.locator("figure").first).to_contain_text(f"over-optimisation from step {onset[1]}")
    page.locator(".diagnosis summary").click()
    expect(page.locator(".diagnosis details .finding").first).to_be_visible()
    expect(page.get_by_role("heading", name="Explained variance")).to_be_visible()
    expect(page.get_by_role("heading", name="Staleness")).to_be_visible()
    assert page.locator(".time path.layer").count() == 7
    expect(page.locator(".time tbody tr").first).to_contain_text("generate")
    assert page.locator(".memory path.layer").count() == 10  # of one step and of the whole run
    expect(page.locator(".memory .about")).to_contain_text("Memory is fullest in update of step 1: 53.4 MiB. Largest:")
    expect(page.locator(".memory figure").first).to_contain_text("peak 53.4 MiB")
    expect(page.locator(".memory figure").first.locator("svg[role=img]")).to_contain_text("generateupdate")
    expect(page.locator(".memory tbody")).to_contain_text("update53.4 MiB")
    page.locator(".memory svg[role=img]").first.hover(position={"x": 900, "y": 100})
    expect(page.locator(".memory .key").first).to_contain_text("update at its fullest")
    expect(page.locator(".memory label")).to_be_hidden()
    page.locator(".time svg[role=img]").hover()
    expect(page.locator(".time .key")).to_contain_text("step ")


@in_browser
def test_samples_are_shown_by_step_and_coloured_by_token_values(open_page, one: Path) -> None:  # type: ignore[no-untyped-def]
    page = open_page(one)
    tokens = page.locator(".response .token")
    expect(page.get_by_label("Step", exact=True)).to_have_value("111")
    expect(page.locator(".facts")).to_contain_text("reward 1truth rightended by the token limit")
    assert tokens.count() == 16
    advantage = tokens.first.evaluate("node => getComputedStyle(node).backgroundColor")
    for what in ("token_rewards", "kl", "logprobs"):
        page.get_by_label("Coloured by").select_option(what)
        expect(page.locator(".scale i")).to_be_visible()
        assert tokens.first.evaluate("node => getComputedStyle(node).backgroundColor") != advantage
    tokens.nth(4).hover()
    expect(page.locator(".numbers")).to_contain_text('token 5 "15" · advantage 0.6')
    expect(page.locator(".numbers")).to_contain_text("probability")
    page.get_by_role("button", name="Earlier step").click()
    expect(page.get_by_label("Step", exact=True)).to_have_value("101")
    expect(page.locator(".facts")).to_contain_text("policy version 100")
    page.locator(".choice button").nth(1).click()
    assert page.locator(".token.masked").count() == 3
    page.get_by_label("Coloured by").select_option("kl")
    expect(page.locator(".scale")).to_contain_text("no KL to the reference")
    page.locator(".choice button").nth(2).click()
    expect(page.locator(".facts")).to_contain_text("timeout: no answer")
    page.get_by_label("Step", exact=True).select_option("11")
    expect(page.locator(".choice button[aria-pressed=true]")).to_contain_text("0.2")


@in_browser
def test_hostile_text_is_escaped(open_page, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = write_run(tmp_path / "<img src=x onerror=alert(1)>", steps=12)
    log = EventLog(run)
    log.metric({f"reward/{HOSTILE}": 1.0, f"heldout/{HOSTILE}": 0.5, f"time/{HOSTILE}": 1.0}, step=12)
    log.write("memory", step=12, phase=HOSTILE, bytes={HOSTILE: 5})
    log.close()
    page = open_page(run)
    page.get_by_label("Step", exact=True).select_option("1")
    page.locator(".choice button").nth(3).click()
    expect(page.locator(".prompt")).to_have_text(f"7+8+4= {HOSTILE}")
    expect(page.locator(".response .token").first).to_have_text(HOSTILE)
    page.locator(".response .token").last.hover()
    expect(page.locator(".numbers")).to_contain_text("<b>bold</b>")
    page.locator(".choice button").nth(2).click()
    expect(page.locator(".facts")).to_contain_text(HOSTILE)
    assert page.locator("img, b b, main script").count() == 0
    assert page.title() == "<img src=x onerror=alert(1)> – Plaudit report"
    assert page.locator("script").count() == 2


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_several_runs_are_overlaid_and_fit_a_phone(open_page, one: Path, two: Path, scheme: str) -> None:  # type: ignore[no-untyped-def]
    page = open_page(one, two, scheme=scheme, width=400)
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.locator(".verdict").count() == 2
    expect(page.locator("figure").first.locator(".key")).to_contain_text("held-out reward 0.75 3")
    page.get_by_label("Run", exact=True).select_option("1")
    expect(page.get_by_label("Step", exact=True)).to_have_value("81")
    page.set_viewport_size({"width": 1100, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 1100
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", paper)[0]) > 128) == (scheme == "light")


# The page that `make run` produces: four kinds of runs with very different lengths


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    runs = tmp_path_factory.mktemp("make-run")
    return [
        write_run(runs / "sums-ppo", {**HEALTHY, **CRITIC}, steps=70, algorithm="ppo"),
        write_examples(runs / "sums-sft", "sft", 1300, "accuracy/sums/sampled"),
        write_examples(runs / "sums-prm", "prm", 1800, "step_auc"),
        write_examples(runs / "sums-reward", "reward", 450, "pair_accuracy"),
    ]


def box(part: Locator) -> tuple[float, float, float, float]:
    """Left, top, right, bottom, in pixels of the window."""
    bounds = part.bounding_box()
    assert bounds is not None
    return bounds["x"], bounds["y"], bounds["x"] + bounds["width"], bounds["y"] + bounds["height"]


@in_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_the_first_screen_shows_the_headline_and_its_curve(
    open_page, four: list[Path], width: int, height: int
) -> None:  # type: ignore[no-untyped-def]
    page = open_page(*four, width=width, height=height)
    headline, plot = page.locator(".headline").first, page.locator("figure").first.locator("svg[role=img]")
    expect(headline).to_have_text(
        "Before training 28 % of its answers to new problems were right; after 70 steps of PPO 73 % are."
    )
    assert (
        page.locator("figure").first.locator("svg[role=img] circle").count() == 10
    )  # five evaluations, reward and truth
    for part in (headline, plot):
        left, top, right, bottom = box(part)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
    assert page.evaluate("document.documentElement.scrollWidth") == width


@in_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_every_curve_fills_the_width_of_its_plot(open_page, four: list[Path], width: int) -> None:  # type: ignore[no-untyped-def]
    page = open_page(*four, width=width)
    figures = page.locator("article > .lead figure, .curves > .plots > figure").all()
    assert len(figures) > 20
    for figure in figures:
        left, _, right, _ = box(figure.locator("svg[role=img]"))
        curves = [box(curve) for curve in figure.locator("svg[role=img] path.curve").all()]
        spread = max(curve[2] for curve in curves) - min(curve[0] for curve in curves)
        # The rest are axis labels: 46 pixels, and 40 for a second axis.
        assert spread >= right - left - 92, figure.inner_text()


@in_browser
def test_each_kind_of_run_has_its_own_section(open_page, four: list[Path]) -> None:  # type: ignore[no-untyped-def]
    page = open_page(*four)
    expect(page.locator("article .kind")).to_have_text(
        ["Reinforcement learning", "Supervised fine-tuning", "Process reward model", "Reward model"]
    )
    for article, run in zip(page.locator("article").all(), four, strict=True):
        expect(article.locator("h1")).to_contain_text(f"{run.name} · ")
        expect(article.locator(".verdict")).to_contain_text("Healthy. ")
        cells = article.locator(".figures td").all_inner_texts()
        assert cells
        assert "–" not in cells
    page.get_by_role("link", name="sums-prm").click()
    assert box(page.locator("article").nth(2))[1] < 100
    # Hovering over one kind does not affect the others: their steps are unrelated.
    page.locator("article").nth(2).locator("svg[role=img]").first.hover()
    expect(page.locator("article").nth(2).locator(".at").first).to_have_text(re.compile(r"step \d+"))
    expect(page.locator("article").first.locator(".at").first).to_have_text("")
    # Runs of one kind are still overlaid.
    assert open_page(four[0], four[0]).locator("article").count() == 1


@in_browser
def test_pages_of_an_empty_and_of_a_supervised_run(open_page, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    log = EventLog(tmp_path)
    page = open_page(tmp_path)
    expect(page.locator(".verdict")).to_contain_text("Too little was logged")
    for step in range(1, 61):
        log.metric({"loss": 1 / step, "grad_norm": 1.0 + step % 3, "lr": 1e-3, "tokens": 100.0}, step=step)
        if step % 20 == 0:
            log.metric({"heldout/heldout_loss": 1 / step, "heldout/accuracy/sums/greedy": step / 60}, step=step)
    log.metric({"loss": float("nan")}, step=61)
    log.close()
    page = open_page(tmp_path)
    expect(page.locator(".verdict")).to_contain_text("Not well: a number that is none")
    expect(page.locator(".figures tbody")).to_contain_text("answers right, greedy0.3331")
    # Three evaluations: the loss and, on a second axis, the headline metric.
    assert page.locator("figure").first.locator("svg[role=img] circle").count() == 6
    expect(page.get_by_role("heading", name="answers right, greedy")).to_be_visible()


@in_browser
def test_a_log_with_missing_fields_is_shown_without_errors(open_page, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    log = EventLog(tmp_path)
    log.write("sample", prompt=[{"role": "user", "content": "hello"}], response="no tokens")
    log.write("sample", step=3, prompt="p", response="abc", tokens=["a", "b", "c"], mask=[1], reward=float("nan"),
              kl=[0.1], advantages=[], logprobs=None)  # fmt: skip
    log.metric({"elsewhere": 1.0})
    log.metric({"reward/mean": float("nan"), "accuracy": float("inf"), "time/step": 0.0, "length/mean": 3.0}, step=1)
    log.write("memory", phase="empty", bytes={})
    log.close()
    page = open_page(tmp_path)
    expect(page.locator(".response")).to_have_text("abc")
    page.locator(".response .token").last.hover()
    page.get_by_role("button", name="Earlier step").click()
    expect(page.locator(".response")).to_have_text("no tokens")
    page.locator(".response .token").hover()
    expect(page.locator(".prompt")).to_contain_text("hello")


def test_a_long_run_gives_a_page_of_bounded_size() -> None:
    events: list[dict[str, object]] = [{"kind": "note", "text": "start", "wall": 0.0}]
    for step in range(20_000):
        events.append(
            {"kind": "metric", "step": step, "wall": step, "values": {"reward/mean": "nan", "time/update": 1}}
        )
        tokens = ["x"] * 100
        events.append({"kind": "sample", "step": step, "wall": step, "tokens": tokens, "kl": ["inf"] * 100})
        events.append({"kind": "memory", "step": step, "wall": step, "phase": "p", "bytes": {"a": step}})
    (run,) = data_of(render_page([history_of("long", events)]))["runs"]
    assert len(run["curves"]["reward/mean"][0]) <= MOST_POINTS  # type: ignore[index]
    samples = run["samples"]
    assert isinstance(samples, list)
    assert sum(len(sample["tokens"]) for sample in samples) <= MOST_SAMPLE_TOKENS
    assert (samples[0]["step"], samples[-1]["step"]) == (0, 19_999)
    assert samples[0]["kl"] == [None] * 100
    (memory,) = run["memory"]  # type: ignore[misc]
    assert memory["moments"][-1]["bytes"] == {"a": 19_999}
    assert len(memory["moments"]) == 600


@in_browser
def test_program_memory_is_mentioned_and_drawn_on_request(open_page, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    log = EventLog(tmp_path)
    by_owner = {"program": 500 << 20, "policy weights": 2 << 20, "KV": 1 << 20, "activations": 3 << 20}
    for step in (1, 2):
        log.write("memory", step=step, phase="generate", device="cpu", bytes=by_owner, start={"activations": 0}, end={})
        log.write("memory", step=step, phase="update", device="cpu", bytes={**by_owner, "KV": 0}, start={}, end={})
    log.close()
    page = open_page(tmp_path)
    expect(page.locator(".memory .about")).to_contain_text("Largest: activations 3 MiB, policy weights 2 MiB")
    expect(page.locator(".memory .about")).to_contain_text("500 MiB are the program itself")
    expect(page.locator(".memory figure").first).to_contain_text("peak 6 MiB")
    assert page.locator(".memory path.layer").count() == 6
    page.get_by_label("with the program").check()
    expect(page.locator(".memory figure").first).to_contain_text("peak 506 MiB")
    assert page.locator(".memory path.layer").count() == 8


def test_text_cannot_break_out_of_the_json_data(tmp_path: Path) -> None:
    page = render_page([read_history(write_run(tmp_path / "run", steps=2))])
    assert page.count("</script>") == 2
    assert page.count("<script") == 2
    assert 'onerror="document' not in page
    assert HOSTILE in json.dumps(data_of(page), ensure_ascii=False).replace('\\"', '"')
