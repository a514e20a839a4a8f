"""Runs a notebook without Jupyter: its code cells in order, in one namespace and in a running event loop.

python -m tests.notebook examples/first_run.ipynb   runs it and stores the outputs of its cells
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

Output = dict[str, Any]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_notebook(path: Path) -> list[list[Output]]:
    """The outputs of each code cell: its printed text and the value of its last expression."""
    cells = code_cells(json.loads(path.read_text(encoding="utf-8")))
    namespace: dict[str, Any] = {"__name__": "__main__"}

    async def run() -> list[list[Output]]:
        return [_run_cell("".join(cell["source"]), f"{path.name}[{n}]", namespace) for n, cell in enumerate(cells)]

    return asyncio.run(run())


def _run_cell(source: str, name: str, namespace: dict[str, Any]) -> list[Output]:
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs: list[Output] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        outputs.append(
            {"data": _shown(value), "execution_count": None, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def _shown(value: Any) -> dict[str, list[str]]:
    text = {"text/plain": repr(value).splitlines(True)}
    picture = getattr(value, "_repr_svg_", None)
    return text if picture is None else {"image/svg+xml": picture().splitlines(True), **text}


def store(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        outputs = run_notebook(path)
    for cell, cell_outputs in zip(code_cells(notebook), outputs, strict=True):
        cell["outputs"] = cell_outputs
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    store(Path(sys.argv[1]).resolve())
