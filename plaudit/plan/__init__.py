"""Planning: what fits, how long it takes, what it costs. Imports no torch.

Names are resolved on first use: the command line needs only the options until it plans.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plaudit.plan.cost.plans import Plan
    from plaudit.plan.cost.prediction import Prediction, predict
    from plaudit.plan.shape.constants import Constants
    from plaudit.plan.shape.hardware import Accelerator, Cluster, accelerator, cluster
    from plaudit.plan.shape.layouts import GenerationLayout, TrainingLayout
    from plaudit.plan.shape.model_shape import ModelShape
    from plaudit.plan.shape.workload import Workload

__all__ = [
    "Accelerator", "Cluster", "Constants", "GenerationLayout", "ModelShape", "Plan", "Prediction", "TrainingLayout",
    "Workload", "accelerator", "cluster", "predict",
]  # fmt: skip

_HOMES = {
    "cost.plans": ("Plan",),
    "cost.prediction": ("Prediction", "predict"),
    "shape.constants": ("Constants",),
    "shape.hardware": ("Accelerator", "Cluster", "accelerator", "cluster"),
    "shape.layouts": ("GenerationLayout", "TrainingLayout"),
    "shape.model_shape": ("ModelShape",),
    "shape.workload": ("Workload",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"plaudit.plan.{home}"), name)
    raise AttributeError(f"module 'plaudit.plan' has no attribute {name!r}")
