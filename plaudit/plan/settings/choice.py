"""The fastest plan that a project supports, as its settings."""

from __future__ import annotations

from plaudit.errors import ConfigError, nearest
from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.question import Question
from plaudit.plan.settings.project import Project
from plaudit.plan.settings.servers import SGLANG, VLLM
from plaudit.plan.settings.trainers import NEMO, OPENRLHF, SLIME, TRL, VERL

PROJECTS = {project.name: project for project in (VERL, OPENRLHF, SLIME, NEMO, TRL, VLLM, SGLANG)}


def find_project(name: str) -> Project:
    if name not in PROJECTS:
        raise ConfigError(f"unknown project {name!r} for --settings; {nearest(name, PROJECTS)}")
    return PROJECTS[name]


def settings_for(project: Project, question: Question) -> tuple[str, Prediction]:
    """Choose among all plans that fit, by measurements of published runs. If none fits, raise as for any plan."""
    plans = [p for place in question.clusters for p in question.plans_of_others(place).plans]
    plans.sort(key=lambda p: p.step.value)
    if not plans:
        question.answer()
        raise ConfigError(f"--settings {project.name}: only Plaudit's own trainer has a plan that fits here")
    chosen = next((p for p in plans if not project.missing(p)), None)
    if chosen is None:
        lacks = ", ".join(project.missing(plans[0]))
        raise ConfigError(f"--settings {project.name}: none of {len(plans)} plans can be expressed in its settings; "
                          f"the fastest needs {lacks}; --placement or another --algorithm may give one")  # fmt: skip
    note = [
        f"Planned: {chosen.plan}", f"{chosen.step.value:.3g} s a step on {chosen.plan.hardware}, by measurements of "
        f"published runs; MODEL is {chosen.workload.model.name}", f"{project.checked}",
        "The longest prompt is taken as twice the mean. Data, reward, learning rate and steps are yours to set.",
    ]  # fmt: skip
    return "".join(f"# {line}\n" for line in note) + project.render(chosen), chosen
