"""The conformance page matches its table; its tests exist and its versions are the installed ones."""

from __future__ import annotations

import ast
import re

import pytest

from tests.interop.conformance import CLIENTS, HOWS, PAGE, ROOT, Client, page


def test_conformance_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.interop.conformance"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: f"{client.project}-{client.function}")
def test_row_has_an_existing_test_page_and_pinned_version(client: Client) -> None:
    file, name = client.test.split("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert (PAGE.parent / f"{client.page}.md").is_file()
    assert client.how in HOWS
    assert bool(client.version) == bool(client.package)
    if client.package:
        assert f"{client.package}=={client.version}" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert client.how not in ("package", "server") or client.package


@pytest.mark.parametrize(
    "client", [client for client in CLIENTS if client.needs], ids=lambda client: f"{client.project}-{client.function}"
)
def test_required_settings_are_in_the_opening_of_the_clients_page(client: Client) -> None:
    """The opening ends before the first table or heading."""
    text = (PAGE.parent / f"{client.page}.md").read_text(encoding="utf-8")
    opening = re.split(r"^(?:## |\|)", text, maxsplit=1, flags=re.MULTILINE)[0]
    for name in re.findall(r"`([^`]+)`", client.needs):
        assert name.removeprefix("/") in opening, name
