"""Debian's Chromium through playwright, for the tests of pages. If either is missing, they are skipped with a message.

playwright is imported only when a test needs a browser, so that all tests can be collected without it.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
WINDOWS = ((1280, 720, "light"), (390, 844, "dark"), (1280, 720, "dark"), (390, 844, "light"))
PATIENCE = 30_000  # milliseconds; only a page that hangs reaches this timeout
MISSING = (
    "no playwright for the tests of pages: pip install playwright" if importlib.util.find_spec("playwright") is None
    else "no chromium for the tests of pages: apt install chromium" if CHROMIUM is None
    else ""
)  # fmt: skip
in_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import expect as expects
    from playwright.sync_api import sync_playwright

    expects.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def expect(what: Any) -> Any:
    from playwright.sync_api import expect as expects

    return expects(what)


def layout_faults(page: Page) -> list[str]:
    """The layout faults of a page in its window: overlapping texts, horizontal overflow, a first screen without
    a headline or a picture."""
    page.evaluate("scrollTo(0, 0)")
    faults: list[str] = page.evaluate(Path(__file__).with_name("layout.js").read_text(encoding="utf-8"))
    return faults


def faults_in_windows(page: Page) -> dict[str, list[str]]:
    """The faults of each window that has any: on a screen and on a phone, in light and in dark mode."""
    faults_by_window = {}
    for width, height, scheme in WINDOWS:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.evaluate("new Promise(requestAnimationFrame)")
        faults_by_window[f"{width}, {scheme}"] = layout_faults(page)
    return {window: faults for window, faults in faults_by_window.items() if faults}
