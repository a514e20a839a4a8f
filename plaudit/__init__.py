"""Plaudit: one RLHF system that a person can read."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plaudit.core import Engine, SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

# The library's names load torch; the planner and `--help` must not. So they are imported when first asked for.
_HOMES = {"Engine": "plaudit.core", "SamplingParams": "plaudit.core"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'plaudit' has no attribute {name!r}")
