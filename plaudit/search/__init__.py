"""Tree search with step rewards. `plaudit.search(...)` runs a search; the package also contains its components.

Names are imported on first use: trees and rules need no torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Search(ModuleType):
    """A callable package, so that `plaudit.search` is both the function and the package."""

    def __call__(self, *questions: Any, **options: Any) -> Any:
        from plaudit.search.api import search

        return search(*questions, **options)


sys.modules[__name__].__class__ = _Search
