"""`plaudit verify`: whether what a run delivers is what its recipe makes.

The verdict says what was recomputed (steps, weights, files), what was only compared with hashes, which whoever changes
the files can change as well, and what is not there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from plaudit.config import RlRecipe
from plaudit.errors import DataError, PlauditError, RunError
from plaudit.events import VERIFIED
from plaudit.models import resolve
from plaudit.models.digest import tensors_digest
from plaudit.output import write_atomically
from plaudit.rl.evidence import Different, Evidence, Missing, parts_of
from plaudit.rl.recomputation import CLOSE, Recomputation
from plaudit.train.run.checkpoint import sha256
from plaudit.train.run.manifest import first_change, read_manifest
from plaudit.train.run.signals import Interrupted

RECOMPUTED, NOT_EQUAL, COMPARED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Certificate:
    """code   RECOMPUTED: what the run delivers is equal to what was recomputed; NOT_EQUAL: something is different,
    damaged or missing; COMPARED: all that was checked is intact, and not all of it was recomputed"""

    code: int
    text: str


def verify(directory: Path, out: Path, step: int | None = None, from_start: bool = False) -> Certificate:
    """Recompute up to `step` (default: the run's last one) in the working directory `out`, and compare. `from_start`:
    all steps, not those since the last checkpoint."""
    try:
        evidence = Evidence(directory)
        if not isinstance(evidence.recipe, RlRecipe):
            raise RunError(f"{directory} is a run of task = {evidence.recipe.task!r}; verify is for rl")
        return _verify(evidence, evidence.recipe, out, step, from_start)
    except Different as difference:
        return Certificate(NOT_EQUAL, str(difference))
    except Missing as missing:
        return Certificate(NOT_EQUAL, f"cannot be verified: {missing}")
    except DataError as error:  # of its dump
        return Certificate(NOT_EQUAL, str(error))


def check_delivered(model: Path, manifest: Path) -> Certificate:
    """Compare the files of a model, or of a run's final model, with a manifest."""
    tree = read_manifest(manifest)
    if not (model / "config.json").is_file() and (model / "final").is_dir():
        model = model / "final"
    if change := first_change(tree, model):
        return Certificate(NOT_EQUAL, change)
    return Certificate(
        RECOMPUTED,
        f"{len(tree['files'])} files are those of the manifest, whose SHA-256 is {sha256(manifest)}; only compared: "
        "whether its recipe makes these weights is verified with the run",
    )


def keep(verdict: Certificate, directory: Path) -> None:
    """Write the verdict to the run directory, for its report."""
    kept = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "code": verdict.code, "text": verdict.text}
    write_atomically(directory / VERIFIED, json.dumps(kept, indent=1) + "\n")


def _verify(evidence: Evidence, recipe: RlRecipe, out: Path, step: int | None, from_start: bool) -> Certificate:
    directory, last = evidence.directory, evidence.last
    target = last if step is None else step
    if last and not 1 <= target <= last:
        raise RunError(f"{directory} has steps 1 to {last}; there is no step {target} to verify")
    why = _irreproducible(evidence, recipe)
    start = None if from_start else evidence.checkpoint_before(target)
    evidence.check_log(() if why else range(1 if start is None else start + 1, target + 1))
    absent = evidence.check_files(evidence.finished)
    if not evidence.finished and step is None:
        raise Missing(
            f"{directory} has {last} of {recipe.train.steps} steps, and with them no final model; --step {last} "
            "verifies the steps"
        )
    if why:
        return Certificate(
            COMPARED,
            f"files intact, training not recomputed: {why}; only compared with their hashes: steps 1 to {last}"
            f"{', final/, summary' if evidence.finished else ''}, checkpoints and recipe",
        )
    if from_start and evidence.changes:
        number, key = evidence.changes[0]
        raise Missing(
            f"the run was resumed with another {key} at step {number}, so no one recipe makes all steps; without "
            "--from-start the steps since a checkpoint are recomputed"
        )
    checkpoint = None if start is None else evidence.checkpoints.named(f"step-{start:06d}")
    work = Recomputation(evidence, recipe, checkpoint, target, out)
    try:
        work.compute()
    except Interrupted:
        raise
    except PlauditError as error:
        raise Missing(f"its steps cannot be computed again: {error}") from error
    return _equal(evidence, work, absent)


def _irreproducible(evidence: Evidence, recipe: RlRecipe) -> str | None:
    """Why the bits of a run cannot be computed again."""
    placement = recipe.placement
    if any("samples" in hashes for hashes in evidence.starts.values()):
        return "it was trained on the samples of another run"
    if recipe.resources.ranks > 1:
        return f"it is over {recipe.resources.ranks} ranks, whose summation order differs"
    if placement.name == "async" and placement.staleness > 0:
        return (
            f"its placement is async with staleness = {placement.staleness}: which weights a sample saw depends on time"
        )
    if recipe.engine.name != "core":
        return f"its engine is {recipe.engine.name}, whose summation order differs"
    if recipe.critic is not None and recipe.critic.url is not None:
        return "its critic is behind a URL"
    return None


def _equal(evidence: Evidence, work: Recomputation, absent: list[str]) -> Certificate:
    start, first, target = work.start, work.first, work.target
    span = _steps(first, target)
    origin = "the start" if start is None else start.path.name
    made = [*parts_of(evidence.steps[target]), f"{work.numbers} numbers"]
    made += [f"checkpoint {name}" for name in work.checkpoints]
    if any(step in evidence.dump.steps() for step in range(first, target + 1)):
        close = "" if work.exact else f", rewards to {CLOSE:g}, as models compute them"
        made.append(f"dumps{close}" if work.recorded is None else "dumps but for rewards")
    if work.finishes:
        layouts = ["adapter"] if (evidence.directory / "final" / "adapter").is_dir() else []
        made.append(f"final/ ({', '.join(['weights', *layouts, 'config', 'tokenizer and template'])})")
        made += ["evaluation"] if work.recorded is None else []
    compared = [] if first == 1 else [_steps(1, first - 1)]
    compared += [name for name in evidence.checkpoints.names() if name not in work.checkpoints]
    if work.recorded is not None:
        compared.append(f"rewards and evaluation ({work.recorded})")
    if target < evidence.last:
        compared.append(_steps(target + 1, evidence.last) + (", final/" if evidence.finished else ""))
    text = f"equal to the bit: {span}, recomputed from {origin}: {', '.join(made)}"
    if start is None:
        source = work.recipe.model.path
        assert source is not None
        name = f"{source} (SHA-256 of its tensors {tensors_digest(resolve(source))})"
        whole = "these weights come from this recipe" if work.finishes else "these steps come from this recipe"
        rewards = "" if work.recorded is None else " and the recorded rewards"
        text = f"{whole}{rewards}: {text.replace('recomputed from the start', f'recomputed from the start, {name}')}"
    if compared:
        text += f"; only compared with their hashes: {', '.join(compared)}"
    if absent:
        text += f"; not there: {', '.join(absent)}"
    complete = work.finishes and work.recorded is None
    return Certificate(RECOMPUTED if complete else COMPARED, f"{text}; {work.by}")


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
