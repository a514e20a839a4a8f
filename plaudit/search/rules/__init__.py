"""Rules: pure functions from a frontier to child counts, independent of models."""

from __future__ import annotations

from collections.abc import Callable

from plaudit.search.tree.frontier import Choice, Frontier

Rule = Callable[[Frontier], Choice]
