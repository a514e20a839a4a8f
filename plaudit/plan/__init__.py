"""What fits, how long it takes, what it costs. Imports no torch."""

from plaudit.plan.constants import Constants
from plaudit.plan.hardware import Accelerator, Cluster, accelerator, cluster
from plaudit.plan.layouts import GenerationLayout, TrainingLayout
from plaudit.plan.model_shape import ModelShape
from plaudit.plan.plans import Plan
from plaudit.plan.prediction import Prediction, predict
from plaudit.plan.workload import Workload

__all__ = [
    "Accelerator", "Cluster", "Constants", "GenerationLayout", "ModelShape", "Plan", "Prediction", "TrainingLayout",
    "Workload", "accelerator", "cluster", "predict",
]  # fmt: skip
