"""Tree search with step rewards. `plaudit.search(...)` is a search; the package is also what it is made of.

Names resolve on first use: trees and rules need no torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Search(ModuleType):
    """The package can be called, so that the verb and the part have one name."""

    def __call__(self, *questions: Any, **options: Any) -> Any:
        from plaudit.search.api import search

        return search(*questions, **options)


sys.modules[__name__].__class__ = _Search
