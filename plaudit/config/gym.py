"""reasoning-gym tasks whose scorers execute code contained in a response or a dataset item. They run in the sandbox,
with one process per response, and are refused without it. The list is for reasoning-gym 0.1.25;
`tests/train/test_gym.py` compares it with the installed version."""

from __future__ import annotations

EVALUATE = {
    "binary_matrix": "eval of the answer",
    "bitwise_arithmetic": "eval of the item's problem",
    "composite": "it passes answers to any other task",
    "countdown": "sympy's parse_expr, which is eval, of the answer",
    "intermediate_integration": "sympy's parse_expr, which is eval, of the answer and the item's integrand",
    "n_queens": "eval of the answer",
    "number_sorting": "eval of the item's answer",
    "polynomial_multiplication": "sympy's parse_expr, which is eval, of both answers",
    "puzzle24": "sympy's parse_expr, which is eval, of the answer",
    "simple_integration": "sympy's parse_expr, which is eval, of the answer and the item's integrand",
    "spiral_matrix": "eval of the answer",
    "string_insertion": "eval of the answer",
}


def refusal(task: str) -> str:
    """Return why a task is refused, or "" if it is allowed."""
    if task not in EVALUATE:
        return ""
    return (
        f"the gym task {task!r} is refused: its scorer would execute code from a response or an item "
        f"({EVALUATE[task]}), and this rule runs without a sandbox; remove sandbox = false, or choose another task"
    )
