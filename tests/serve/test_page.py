"""The live page in a real browser against a real server that requires a key."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import MISSING, PATIENCE, chromium, expect, faults_in_windows
from tests.serve.process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

KEY = "a-key-for-tests"
RIGHT, WRONG = "3+4=7;7+5=12;#12", "3+4=9;9+5=14;#14"
MARKUP = "<img src=x onerror=\"document.title='run'\">"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(None, "--api-key", KEY) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class Seen:
    """The hosts that a page requested and the errors that it logged."""

    def __init__(self, page: Page) -> None:
        self.hosts: set[str] = set()
        self.complaints: list[str] = []
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))


@pytest.fixture(scope="module")
def opened(server: ServerProcess, browser: Browser) -> Iterator[tuple[Page, Seen]]:
    """The page with the key entered; it must log no errors in any of the tests."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    seen = Seen(page)
    page.goto(server.url)
    page.get_by_label("API key").fill("not-the-key")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_text("That key is not accepted.")).to_be_visible()
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator(".model")).to_have_count(2)
    assert len(seen.complaints) == 2
    assert all("401" in complaint for complaint in seen.complaints)
    seen.complaints.clear()
    yield page, seen
    assert seen.hosts == {f"127.0.0.1:{server.port}"}


@pytest.fixture
def page(opened: tuple[Page, Seen]) -> Iterator[Page]:
    page, seen = opened
    yield page
    assert seen.complaints == []
    assert page.title() == "Plaudit"


def score(page: Page, model: str, prompt: str, *responses: str) -> Locator:
    page.get_by_label("Model", exact=True).select_option(model)
    page.get_by_label("Prompt").fill(prompt)
    for number, response in enumerate(responses):
        if number == page.get_by_label("Response").count():
            page.get_by_role("button", name="Another response").click()
        page.get_by_label("Response").nth(number).fill(response)
    page.locator("#results").evaluate("node => node.replaceChildren()")
    page.get_by_role("button", name="Score").click()
    expect(page.locator("#results > *").first).to_be_visible()
    return page.locator("#results")


def formatted(numbers: list[float]) -> list[str]:
    return [f"{number:.4f}".replace("-", "\u2212") for number in numbers]


def test_every_model_is_shown_with_its_state_and_version(server: ServerProcess, page: Page) -> None:
    expect(page.get_by_role("status")).to_have_text("2 models ready")
    for row, model in zip(page.locator(".model").all(), server.http.get("/stats").json()["models"], strict=True):
        expect(row.get_by_role("heading")).to_have_text(model["name"])
        for text in (model["kind"], "ready", model["version"]):
            expect(row.get_by_text(text, exact=True)).to_be_visible()


def test_scores_and_steps_are_those_of_the_api(server: ServerProcess, page: Page) -> None:
    item = {"prompt": "3+4+5=", "responses": [RIGHT, WRONG]}
    expected = server.rewards([item], "sums-steps", steps=True).json()
    results = score(page, "sums-steps", "3+4+5=", RIGHT, WRONG)
    expect(results.locator(".result > b")).to_have_text(formatted(expected["items"][0]["scores"]))
    numbers = formatted([step for steps in expected["items"][0]["steps"] for step in steps])
    texts = ["3+4=7;", "7+5=12;", "#12", "3+4=9;", "9+5=14;", "#14"]
    expect(results.locator(".step")).to_have_text([t + n for t, n in zip(texts, numbers, strict=True)])
    expect(results.get_by_text(expected["version"])).to_contain_text("ms")
    outcome = server.rewards([item], "sums").json()["items"][0]["scores"]
    results = score(page, "sums", "3+4+5=", RIGHT, WRONG)
    expect(results.locator(".result > b")).to_have_text(formatted(outcome))
    expect(results.locator(".step")).to_have_count(0)
    expect(page.get_by_label("every step")).to_be_hidden()
    page.get_by_role("button", name="Remove").click()


def test_the_page_fits_desktop_and_phone_screens(page: Page) -> None:
    """With scores shown, the widest content of the page."""
    results = score(page, "sums-steps", "3+4+5=", RIGHT, WRONG)
    expect(results.locator(".result")).to_have_count(2)
    assert faults_in_windows(page) == {}
    page.set_viewport_size({"width": 1280, "height": 720})
    page.get_by_role("button", name="Remove").click()


def test_markup_is_shown_as_text(server: ServerProcess, page: Page) -> None:
    results = score(page, "sums-steps", MARKUP, MARKUP + ";")
    expect(results).to_contain_text(MARKUP)
    assert server.rewards([{"text": "1+2="}], MARKUP).status_code == 404
    expect(page.get_by_role("region", name="Last errors")).to_contain_text("onerror")
    assert page.locator("img").count() == 0


def test_errors_are_shown_with_their_message_and_type(server: ServerProcess, page: Page) -> None:
    refused = server.rewards([{"prompt": "1+2=", "responses": [""]}], "sums-steps", steps=True).json()
    results = score(page, "sums-steps", "1+2=", "")
    expect(results).to_have_text(refused["items"][0]["error"]["message"])
    expect(page.get_by_role("region", name="Last errors")).to_contain_text(refused["items"][0]["error"]["type"])


def test_numbers_and_charts_follow_the_load(server: ServerProcess, page: Page) -> None:
    row = page.locator(".model").first
    before = server.http.get("/stats").json()["models"][0]["items"]
    items = [{"prompt": f"{a}+{b}+1=", "responses": ["#7", "#8"]} for a in range(10) for b in range(10)]
    assert server.rewards(items).status_code == 200
    expect(row.locator("[data-of=items]")).to_have_text(f"{before + 200:,}")
    expect(row.get_by_role("img", name=f"Histogram of the last {before + 200} scores")).to_be_visible()
    peak = page.locator("#charts svg").first
    page.wait_for_function("svg => parseInt(svg.ariaLabel.split('at most ')[1]) >= 50", arg=peak.element_handle())
    page.get_by_role("group", name="Charts").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#when")).not_to_have_text("now")


def test_a_narrow_window_needs_no_sideways_scrolling(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.set_viewport_size({"width": 1280, "height": 800})


def test_a_draining_and_an_unreachable_server_are_shown(server: ServerProcess, opened: tuple[Page, Seen]) -> None:
    page, _ = opened  # the browser logs errors for an unreachable server
    status = page.get_by_role("status")
    with socket.create_connection(("127.0.0.1", server.port)) as unfinished:
        head = f"POST /v1/rewards HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 9\r\n\r\n"
        unfinished.sendall(head.encode())
        expect(page.locator("#load")).to_contain_text("1 request open")
        server.process.send_signal(signal.SIGTERM)
        expect(status).to_contain_text("Draining")
    server.process.wait(30)
    expect(status).to_contain_text("No response from the server since")
