"""The documentation as a site: every page is in it, and no link or reference is broken (`mkdocs build --strict`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.environments import ROOT, run_module

pytestmark = pytest.mark.interop


def test_site_builds_with_all_pages(tmp_path: Path) -> None:
    run_module(".venv-docs", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"), seconds=600)
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    missing = [
        page
        for page in pages
        if not (tmp_path / "site" / page.with_name(page.name.replace("README", "index"))).exists()
    ]
    assert not missing
    api = (tmp_path / "site" / "reference" / "api.html").read_text()
    for name in ("plaudit.api.train", "plaudit.core.engine.Engine", "plaudit.client.client.RewardClient"):
        assert f'id="{name}"' in api
    assert "max_tokens" in api
    assert not list((tmp_path / "site").rglob("*.py"))
