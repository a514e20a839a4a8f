"""`plaudit train --live` over real HTTP: access, the data sent, and the effect of pause and stop on a real run."""

from __future__ import annotations

import json
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit.events import read_events
from plaudit.report.served import live_page
from plaudit.report.served.live_page import LivePage
from plaudit.train.run.clock import Clock
from tests.browser import PATIENCE, chromium, expect, in_browser, layout_faults
from tests.command import plaudit_here
from tests.report.made_up import HEALTHY, values_at, write_run

SECONDS = 240.0  # reached only if something hangs
SMALL = {
    "sums-sft": ["train.steps=4", "train.batch=4", "data.eval_items=4"],
    "sums-grpo": [
        "train.steps=4", "train.prompts_per_step=2", "train.samples_per_prompt=2", "data.eval_items=4",
        "sampling.max_tokens=16", "model.device=cpu",
    ],
}  # fmt: skip


class Asked:
    """A run that executes every command at once."""

    def __init__(self) -> None:
        self.now = "running"
        self.acts: list[str] = []

    def state(self) -> str:
        return self.now

    def act(self, what: str) -> str | None:
        self.acts.append(what)
        self.now = {"pause": "paused", "continue": "running", "stop": "stopping"}[what]
        return None


class Client:
    def __init__(self, url: str) -> None:
        address, _, token = url.partition("/#")
        self.http = httpx.Client(base_url=address, headers={"authorization": f"Bearer {token}"}, timeout=SECONDS)

    def data(self) -> dict[str, Any]:
        reply = self.http.get("/data")
        assert reply.status_code == 200, reply.text
        content: dict[str, Any] = reply.json()
        return content

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while not condition(data := self.data()):
            assert time.monotonic() < end, data["state"]
            time.sleep(0.05)
        return data


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows for a slow page on a busy machine."""
    monkeypatch.setattr(live_page, "LAST_SECONDS", SECONDS)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "grpo", steps=60, total=200)


@pytest.fixture
def page(run: Path) -> Iterator[LivePage]:
    page = LivePage(run, Asked())
    yield page
    page._last_request = -2 * SECONDS  # no client is connected any more
    page.close()


def test_the_page_has_no_run_data_and_the_data_endpoint_needs_the_token(page: LivePage) -> None:
    client = Client(page.url)
    bare = client.http.get("/", headers={"authorization": ""})
    assert bare.status_code == 200
    assert "grpo" not in bare.text
    assert page.token not in bare.text
    assert "connect-src 'self'" in bare.text
    for path, method in (("/data", "GET"), ("/pause", "POST"), ("/stop", "POST")):
        for wrong in ("", "Bearer", "Bearer x", f"Bearer {page.token}x", page.token[:-1]):
            assert client.http.request(method, path, headers={"authorization": wrong}).status_code == 401
    assert page.control.state() == "running"
    data = client.data()
    assert (data["runs"][0]["name"], data["runs"][0]["steps"], data["runs"][0]["planned"]) == ("grpo", 60, 200)
    assert client.http.get("/events.jsonl").status_code == 404


def test_other_hosts_and_origins_are_rejected_even_with_the_token(page: LivePage) -> None:
    client = Client(page.url)
    for host in ("evil.example", f"evil.example:{page.port}", "127.0.0.1", f"127.0.0.1:{page.port + 1}"):
        assert client.http.get("/", headers={"host": host}).status_code == 421
        assert client.http.post("/stop", headers={"host": host}).status_code == 421
    for origin in ("http://evil.example", "null"):
        assert client.http.post("/stop", headers={"origin": origin}).status_code == 403
    assert page.control.state() == "running"
    assert client.http.post("/pause", headers={"origin": f"http://localhost:{page.port}"}).json() == {"state": "paused"}
    assert page.server.server_address[0] == "127.0.0.1"


def test_an_open_page_gets_the_final_metrics(run: Path) -> None:
    page = LivePage(run, Asked())
    client = Client(page.url)
    assert client.data()["again"] >= 2
    closing = threading.Thread(target=page.close)
    closing.start()
    assert client.until(lambda data: data["state"] == "over")["again"] is None
    closing.join(SECONDS)
    assert not closing.is_alive()
    with pytest.raises(httpx.ConnectError):
        client.data()


def test_pause_time_is_not_part_of_the_step_time() -> None:
    clock = Clock()
    clock.leave_out(1000.0)
    assert clock.split()["time/step"] < -900


def steps(data: dict[str, Any]) -> int:
    return int(data["runs"][0]["steps"])


def trained(recipe: str, out: Path, *words: str) -> Any:
    sets = [word for each in SMALL[recipe] for word in ("--set", each)]
    return plaudit_here("train", recipe, *sets, "--out", str(out), *words)


def curve(run: Path) -> list[Any]:
    events = [event for event in read_events(run) if event["kind"] == "metric"]
    return [
        {name: value for name, value in event["values"].items() if not name.startswith(("time/", "perf/"))}
        for event in events
    ]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SMALL)
def test_a_paused_stopped_and_resumed_run_trains_to_the_same_metrics(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The browser opens before the first step; its commands take effect after that step."""
    monkeypatch.setenv("BROWSER", "any")
    failures: list[BaseException] = []

    def driven(drive: Callable[[Client], None], *words: str) -> Any:
        drivers: list[threading.Thread] = []

        def guarded(client: Client) -> None:
            try:
                drive(client)
                client.until(lambda data: data["again"] is None)
            except BaseException as error:  # reported by the test; exceptions of a thread are not
                failures.append(error)
                client.http.post("/continue")

        def open_page(url: str) -> bool:
            client = Client(url)
            assert client.http.post("/stop").status_code == 409  # there is no state to save yet
            assert client.http.post("/pause").json() == {"state": "pausing"}
            drivers.append(threading.Thread(target=guarded, args=(client,)))
            drivers[0].start()
            return True

        monkeypatch.setattr(webbrowser, "open", open_page)
        done = trained(recipe, tmp_path / "live", "--live", *words)
        drivers[0].join(SECONDS)
        assert failures == []
        return done

    def stop(client: Client) -> None:
        assert steps(client.until(lambda data: data["state"] == "paused" and steps(data) > 0)) == 1
        assert client.http.post("/stop").status_code == 200

    def resume(client: Client) -> None:
        assert steps(client.until(lambda data: data["state"] == "paused" and steps(data) > 1)) == 2
        assert steps(client.data()) == 2
        assert client.http.post("/continue").json() == {"state": "running"}

    done = driven(stop)
    assert done.returncode == 2
    assert "at step 1 of 4, state saved: --resume continues" in done.stderr
    assert done.stderr.count("live page: http://127.0.0.1:") == 1
    token = done.stderr.partition("/#")[2].split()[0]
    resumed = driven(resume, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert token not in (tmp_path / "live" / "events.jsonl").read_text() + resumed.stderr

    plain = trained(recipe, tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    assert "live page" not in plain.stderr
    assert json.dumps(curve(tmp_path / "live")) == json.dumps(curve(tmp_path / "plain"))


def test_without_a_display_the_address_is_printed_and_no_browser_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from plaudit.cli.live import shown_live

    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail(f"a browser for {url}"))
    with shown_live(write_run(tmp_path / "run", steps=2), enabled=True) as begun:
        begun()
    stderr = capsys.readouterr().err
    assert stderr.startswith("live page: http://127.0.0.1:")
    assert "(from another machine: ssh -L " in stderr


@pytest.mark.slow
@in_browser
def test_the_page_updates_itself_and_keeps_the_users_selections(run: Path, page: LivePage) -> None:
    import random

    from plaudit.events import EventLog

    control = page.control
    assert isinstance(control, Asked)
    complaints: list[str] = []
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1280, "height": 720})
        tab.set_default_timeout(PATIENCE)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(page.url)
        status = tab.locator(".live").get_by_role("status")
        expect(status).to_have_text("grpo · step 60 of 200 · running")
        tab.get_by_label("smoothed").uncheck()
        tab.get_by_role("button", name="Earlier step").click()
        step = tab.get_by_label("Step", exact=True).input_value()
        plot = tab.locator("figure").first.locator("svg[role=img]")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box is not None
        tab.mouse.move(box["x"] + 300, box["y"] + 60)
        tab.mouse.down()
        tab.mouse.move(box["x"] + 600, box["y"] + 60)
        tab.mouse.up()
        expect(tab.get_by_role("button", name="All steps")).to_be_visible()
        log = EventLog(run)
        log.metric(values_at(HEALTHY, 0.3, random.Random(1)), step=61)
        log.close()
        expect(status).to_have_text("grpo · step 61 of 200 · running")
        expect(tab.get_by_label("smoothed")).not_to_be_checked()
        expect(tab.get_by_label("Step", exact=True)).to_have_value(step)
        expect(tab.get_by_role("button", name="All steps")).to_be_visible()
        tab.get_by_role("button", name="All steps").click()
        expect(tab.get_by_role("button", name="All steps")).to_be_hidden()
        tab.get_by_role("button", name="Pause").click()
        expect(status).to_contain_text("paused")
        tab.get_by_role("button", name="Continue").click()
        expect(status).to_contain_text("running")
        for width, height, scheme in ((1280, 720, "light"), (390, 844, "dark")):
            tab.set_viewport_size({"width": width, "height": height})
            tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert layout_faults(tab) == []
        tab.get_by_role("button", name="Save and stop").click()
        expect(status).to_contain_text("saves and stops")
        expect(tab.get_by_role("button", name="Save and stop")).to_be_disabled()
    assert control.acts == ["pause", "continue", "stop"]
    assert complaints == []
