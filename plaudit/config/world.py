"""The names of the built-in worlds; a recipe with any other name is rejected when it is parsed."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from plaudit.errors import nearest

WORLDS = ("sums", "sums-hard")


def _built_in(name: str) -> str:
    if name not in WORLDS:
        raise ValueError(f"unknown world {name!r}; {nearest(name, WORLDS)}")
    return name


World = Annotated[str, AfterValidator(_built_in)]
