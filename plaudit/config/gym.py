"""Tasks of reasoning-gym whose scorers run code that stands in a response or an item. They run in the sandbox, in a
process for each response, and are refused outside it. As of reasoning-gym 0.1.25; `tests/train/test_gym.py` compares
with what is installed."""

from __future__ import annotations

EVALUATE = {
    "binary_matrix": "eval of the answer",
    "bitwise_arithmetic": "eval of the item's problem",
    "composite": "it hands answers to any other task",
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
    """Why a task is refused; "" if it is not."""
    if task not in EVALUATE:
        return ""
    return (
        f"the gym task {task!r} is refused: its scorer would run code that stands in a response or an item "
        f"({EVALUATE[task]}), and this rule has no sandbox; remove sandbox = false, or take another task"
    )
