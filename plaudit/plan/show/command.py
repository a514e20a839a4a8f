"""`plaudit plan`: from command-line options to output and files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from plaudit.errors import ConfigError
from plaudit.output import check_writable, written
from plaudit.plan.capacity import demand
from plaudit.plan.market import market
from plaudit.plan.observed.comparison import compare, hardware_file
from plaudit.plan.options import PlanOptions
from plaudit.plan.pools import plan_pools
from plaudit.plan.question import NothingFits, Outcome, Question, ask
from plaudit.plan.recipes import read_recipe, recipe_for, workload_of
from plaudit.plan.settings.choice import find_project, settings_for
from plaudit.plan.shape.hardware import Overrides
from plaudit.plan.show.as_data import outcome_data
from plaudit.plan.show.choice import choice_data, print_choice
from plaudit.plan.show.explain import explain
from plaudit.plan.show.listing import print_outcome
from plaudit.plan.show.measured import comparison_data, print_comparison
from plaudit.plan.show.page import render_page
from plaudit.plan.show.pools import pools_data, print_pools
from plaudit.plan.show.service import print_service, service_data
from plaudit.plan.show.tables import loads_data, print_loads, print_sweep, sweep_data
from plaudit.plan.sweep import check_sweep, sweep
from plaudit.plan.utilisation import loads, utilisations

MANY_DEVICES = 256
"""From this size on a search takes seconds and shows its progress."""


def run_plan(options: PlanOptions, resolve: Callable[[str], Path], measure: Callable[[], str]) -> None:
    """`resolve` returns a model's directory, `measure` measures this machine: both import what the planner does not."""
    if options.top < 1:
        raise ConfigError(f"top = {options.top}: expected one plan or more")
    for path in (options.page, options.out, options.calibrate):
        if path is not None:
            check_writable(path)
    if options.calibrate is not None:
        options = _calibrated(options, options.calibrate, measure)
        if options.model is None and options.recipe is None:
            return
    if options.from_run is not None:
        _compare(options, resolve)
        return
    for name in ("generation_layout", "training_layout"):
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')} is the layout of a measured run: set the run with --from")
    if options.serve is not None:
        _serve(options)
        return
    if options.rate is not None or options.p99 is not None:
        raise ConfigError("--rate and --p99 are targets of a reward service: set its model with --serve")
    if options.settings is not None and (options.recipe or options.as_json or options.explain or options.page):
        raise ConfigError("--settings writes only settings: remove --for, --json, --explain and --page")
    if options.sweep is not None or options.utilisation is not None:
        _tables(options, resolve)
        return
    if options.pools is not None:
        _pools(options, resolve)
        return
    if options.budget or options.deadline or options.goal:
        _choose(options, resolve)
        return
    project = find_project(options.settings) if options.settings else None
    question = _question(options, resolve)
    try:
        if project is not None:
            _put(settings_for(project, question)[0], options.out, "settings")
            return
        _show(_answer(question), options)
    except NothingFits as refused:  # the numbers that it asks about, and then the line that says no
        if refused.outcome.nearest is not None:
            _show(refused.outcome, replace(options, recipe=None))
        raise


def _compare(options: PlanOptions, resolve: Callable[[str], Path]) -> None:
    """Compare a run with its plan; with --out also write the refitted constants."""
    comparison = compare(options, resolve)
    if options.out is not None and not comparison.as_run:
        raise ConfigError("--out: constants are refitted to the plan that ran; set it with --placement, "
                          "--generation-layout and --training-layout")  # fmt: skip
    if options.as_json:
        print(json.dumps(comparison_data(comparison), indent=2))
    else:
        print_comparison(comparison)
    if options.out is not None:
        known = Overrides.read(options.hardware_file) if options.hardware_file else None
        with written(options.out) as file:
            file.write(hardware_file(comparison, known))
        print(f"hardware file: {options.out}", file=sys.stderr)


def _serve(options: PlanOptions) -> None:
    query = demand(options)
    services, refused = query.answer()
    if options.as_json:
        print(json.dumps(service_data(query, services, refused), indent=2))
    else:
        print_service(query, services, refused, options.top)


def _tables(options: PlanOptions, resolve: Callable[[str], Path]) -> None:
    """Over numbers of nodes, or over utilisations."""
    check_sweep(options)
    shares = utilisations(options.utilisation) if options.utilisation else ()
    question = _question(options, resolve)
    if options.sweep is not None:
        swept = sweep(question, options.hardware)
        print(json.dumps(sweep_data(swept), indent=2)) if options.as_json else print_sweep(swept)
        return
    loaded = loads(_answer(question), shares)
    print(json.dumps(loads_data(loaded), indent=2)) if options.as_json else print_loads(loaded)


def _pools(options: PlanOptions, resolve: Callable[[str], Path]) -> None:
    _check_model(options)
    plan = plan_pools(options, lambda of: replace(of, question=_planned(of.question, options, resolve)))
    print(json.dumps(pools_data(plan), indent=2)) if options.as_json else print_pools(plan)


def _choose(options: PlanOptions, resolve: Callable[[str], Path]) -> None:
    """Print what to rent; formulas, page and recipe are those of the first offer."""
    _check_model(options)
    query = market(options)
    choice = replace(query, question=_planned(query.question, options, resolve)).answer()
    if options.as_json:
        print(json.dumps(choice_data(choice), indent=2))
        _write_page(choice.outcome, options)
        return
    print_choice(choice, options.top)
    if options.explain or options.page or options.recipe:
        _show(choice.outcome, options)


def _show(outcome: Outcome, options: PlanOptions) -> None:
    _write_page(outcome, options)
    if options.as_json:
        json.dump(outcome_data(outcome), sys.stdout, indent=2)
        print()
    elif options.explain is not None:
        explanation = explain(outcome.best, options.explain)
        print(f"{outcome.headline}\n{outcome.best.plan}\n{explanation}")
    else:
        print_outcome(outcome, options.top)
    if options.recipe is not None and not options.as_json:
        _print_recipe(options, outcome)
    if options.page is not None and not options.as_json:
        print(f"page: {options.page}")


def _write_page(outcome: Outcome, options: PlanOptions) -> None:
    if options.page is not None:
        with written(options.page) as file:
            file.write(render_page(outcome))


def _calibrated(options: PlanOptions, path: Path, measure: Callable[[], str]) -> PlanOptions:
    with written(path) as file:
        file.write(measure())
    print(f"measured: {path}", file=sys.stderr)
    return replace(options, hardware_file=path, hardware="1x1xthis-machine")


def _question(options: PlanOptions, resolve: Callable[[str], Path]) -> Question:
    _check_model(options)
    return _planned(ask(options), options, resolve)


def _check_model(options: PlanOptions) -> None:
    if options.model is None and options.recipe is None:
        raise ConfigError("no model: give --model, such as --model llama-3.1-70b, or --for with a recipe")


def _planned(question: Question, options: PlanOptions, resolve: Callable[[str], Path]) -> Question:
    """Use the recipe's workload, if there is a recipe."""
    if options.recipe is None:
        return question
    work = workload_of(read_recipe(options.recipe), resolve, options.prompt, options.response)
    return replace(question, workload=work)


def _answer(question: Question) -> Outcome:
    if max(cluster.devices for cluster in question.clusters) < MANY_DEVICES:
        return question.answer()
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task("searching")
        return question.answer(lambda done, total: progress.update(task, completed=done, total=total))


def _print_recipe(options: PlanOptions, outcome: Outcome) -> None:
    assert options.recipe is not None
    text, _ = recipe_for(read_recipe(options.recipe), outcome)
    _put(text, options.out, "recipe")


def _put(text: str, out: Path | None, what: str) -> None:
    if out is None:
        print(text, end="")
        return
    with written(out) as file:
        file.write(text)
    print(f"{what}: {out}")
