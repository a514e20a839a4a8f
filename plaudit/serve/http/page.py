"""The live page: one file, no framework, nothing from the network."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
