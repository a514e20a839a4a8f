"""Debian's Chromium through playwright, for the tests of pages. Where either is missing they are skipped, loudly.

Nothing here imports playwright before a test asks for a browser: the other tests are collected without it.
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
PATIENCE = 30_000  # milliseconds; only a page that hangs takes as long
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
    """What is wrong with a page in its window: texts over each other, more width than there is, a first screen without
    its headline or without a picture."""
    page.evaluate("scrollTo(0, 0)")
    faults: list[str] = page.evaluate(Path(__file__).with_name("layout.js").read_text(encoding="utf-8"))
    return faults


def faults_in_windows(page: Page) -> dict[str, list[str]]:
    """The faults on a screen and on a phone, in light and in dark, of the windows that have any."""
    found = {}
    for width, height, scheme in WINDOWS:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.evaluate("new Promise(requestAnimationFrame)")
        found[f"{width}, {scheme}"] = layout_faults(page)
    return {window: faults for window, faults in found.items() if faults}
