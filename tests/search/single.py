"""One search in a directory, as `plaudit search` runs it, without a progress bar."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from plaudit.config.search import SearchRecipe
from plaudit.search.search import run_searches


def run_search(recipe: SearchRecipe, directory: Path, *, resume: bool = False) -> dict[str, Any]:
    [(_, figures)] = run_searches({directory: recipe}, lambda _: nullcontext(lambda done, of: None), resume=resume)
    return figures
