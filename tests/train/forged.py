"""Manipulations of a finished run, and an editor who makes every hash in it fit again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from plaudit.models.digest import digest
from plaudit.train.rollouts.dump import Dump
from plaudit.train.run.checkpoint import sha256
from plaudit.train.run.proof import batch_proof, linked, metrics_digest, shown_digest, weights_digest

Event = dict[str, Any]
_OF_EVENTS = ("t", "kind", "step", "version")


# What an editor does to files


def lines(path: Path, change: Callable[[Event], Event | None]) -> None:
    """Change lines of JSON, or remove them."""
    kept = [changed for line in path.read_text().splitlines() if (changed := change(json.loads(line))) is not None]
    path.write_text("".join(json.dumps(each) + "\n" for each in kept))


def log(run: Path, change: Callable[[Event], Event | None]) -> None:
    lines(run / "events.jsonl", change)


def drop(run: Path, gone: Callable[[Event], bool]) -> None:
    log(run, lambda event: None if gone(event) else event)


def dump_of(run: Path, step: int, change: Callable[[Event], Event | None]) -> None:
    """Change the first sample."""
    seen = iter((True,))
    lines(Dump(run / "rollouts").path(step), lambda sample: change(sample) if next(seen, False) else sample)


def tree(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def text(path: Path, old: str, new: str) -> None:
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new, 1))


def tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    held = load_file(path)
    change(held)
    save_file(held, path, metadata)


def nudge(held: dict[str, Tensor]) -> None:
    """Change one weight by one unit in the last place."""
    flat = held[min(held)].view(-1)
    flat[0] = torch.nextafter(flat[0], flat[0] + 1)


def into_shards(model: Path, change: Callable[[dict[str, Tensor]], object] = lambda _: None) -> None:
    """Store a model's weights in two files."""
    held = load_file(model / "model.safetensors")
    change(held)
    (model / "model.safetensors").unlink()
    names = sorted(held)
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, part in parts.items():
        save_file({name: held[name] for name in part}, model / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def replace(target: Path, source: Path) -> None:
    shutil.rmtree(target)
    shutil.copytree(source, target)


# What he does to the hashes


def forge(run: Path) -> None:
    """Make every hash in a run fit its files, as far as there are files."""
    for checkpoint in (run / "checkpoints").glob("step-*"):
        manifest = checkpoint / "manifest.json"
        files = (path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path != manifest)
        manifest.write_text(json.dumps({str(path.relative_to(checkpoint)): sha256(path) for path in files}))
    chain = _forge_log(run)
    if not (run / "manifest.json").exists():
        return
    content = digest(run / "final")
    names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    tree(
        run / "manifest.json", chain=chain, recipe=sha256(run / "recipe.toml"), summary=sha256(run / "summary.json"),
        checkpoints={name: sha256(run / "checkpoints" / name / "manifest.json") for name in names},
        tensors=content.tensors, files=content.files,
    )  # fmt: skip


def _forge_log(run: Path) -> str:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    metrics: dict[int, Event] = {}
    heldout: dict[int, Event] = {}
    shown: dict[int, list[Event]] = {}
    for event in events:
        if event["kind"] == "metric":
            for name, value in event["values"].items():
                (heldout if name.startswith("heldout/") else metrics).setdefault(event["step"], {})[name] = value
        if event["kind"] == "sample":
            shown.setdefault(event["step"], []).append({k: v for k, v in event.items() if k not in _OF_EVENTS})
    chain, dump = "", Dump(run / "rollouts")
    for event in events:
        if event["kind"] != "proof":
            continue
        step, hashes = event["step"], event["hashes"]
        if "metrics" in hashes:
            hashes["metrics"] = metrics_digest(metrics[step])
            if dump.path(step).exists():
                hashes |= {**batch_proof(dump.read(step)[0]), "dump": sha256(dump.path(step))}
            else:
                hashes.pop("dump", None)
            if "shown" in hashes:
                hashes["shown"] = shown_digest(shown.get(step, []))
            model = run / "checkpoints" / f"step-{step:06d}" / "model" / "model.safetensors"
            adapter = model.parent.parent / "adapter.safetensors"
            if model.exists() and "weights" in hashes:
                hashes["weights"] = weights_digest(load_file(adapter if adapter.exists() else model).items())
        elif "heldout" in hashes:
            hashes["heldout"] = metrics_digest(heldout.get(step, {}))
        elif "recipe" in hashes:
            hashes["recipe"] = sha256(run / "recipe.toml")
        chain = hashes["chain"] = linked(chain, step, hashes)
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return chain
