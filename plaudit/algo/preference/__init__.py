"""Preference methods by name, one file each: its paper, its default settings and its loss."""

from __future__ import annotations

from plaudit.algo.preference import dpo, ipo, kto, orpo, simpo
from plaudit.algo.preference.method import PreferenceMethod

PREFERENCE_METHODS: dict[str, PreferenceMethod] = {
    "dpo": dpo.METHOD,
    "ipo": ipo.METHOD,
    "kto": kto.METHOD,
    "orpo": orpo.METHOD,
    "simpo": simpo.METHOD,
}
