"""What fits, how long it takes, what it costs. Imports no torch."""

from plaudit.plan.model_shape import ModelShape

__all__ = ["ModelShape"]
