"""What fits, how long it takes, what it costs. Imports no torch."""

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
