"""The planner compared with published measurements: error by target, by metric and by group.

    python benchmarks/planner_validation.py [--csv FILE] [--folds 5] [--shipped] [--rows METRIC]

Rows are split by the column `group` (system × model): constants are fitted on the other groups and tested on the
held-out ones, so that no row is predicted with constants fitted on its group. A file with groups that the shipped
constants were not fitted on is predicted with the shipped constants, as is any file with --shipped; nothing is fitted
to it. Rows with usable = 0 are predicted and shown on a separate line, never scored. Rows that cannot be planned are
listed with the reason. Writes benchmarks/results/planner_validation.json for the default file, and its residuals into
the package, where every plan shows those of its kind (plaudit/plan/residuals.py).
"""

from __future__ import annotations

import argparse
import collections
import csv
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path

from planner.fit import BOUNDS, fit
from planner.row import COLUMNS, Answer, Row, Unplannable, gpu_name, shape, whole
from planner.rows import answer

from plaudit.plan import Accelerator, Constants, accelerator, residuals

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data" / "validation.csv"
RESULTS = ROOT / "benchmarks" / "results" / "planner_validation.json"


@dataclass(frozen=True, slots=True)
class Scored:
    row: Row
    answer: Answer

    @property
    def error(self) -> float:
        return self.answer.predicted / self.answer.measured - 1


TARGETS = (
    # target, description, limit, how it is computed from the scored rows
    ("step time", "median error", 0.25, lambda found: statistics.median(abs(s.error) for s in found)),
    ("TPOT, dense", "MAPE", 0.15, lambda found: statistics.fmean(abs(s.error) for s in found)),
    ("TPOT, experts", "MAPE", 0.30, lambda found: statistics.fmean(abs(s.error) for s in found)),
    ("training", "median error", 0.15, lambda found: statistics.median(abs(s.error) for s in found)),
    ("weight sync", "share within 2×", 0.80, lambda found: statistics.fmean(0.5 <= 1 + s.error <= 2 for s in found)),
    ("memory", "MAPE", 0.10, lambda found: statistics.fmean(abs(s.error) for s in found)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=DATA)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--shipped", action="store_true", help="predict with the package's constants without fitting")
    parser.add_argument("--rows", metavar="METRIC", help="print every scored row of one metric or target")
    options = parser.parse_args()
    rows = read(options.csv)
    usable = [row for row in rows if row["usable"] == "1"]
    began = time.perf_counter()
    shipped = options.shipped or not {row["group"] for row in usable} <= known_groups()
    if shipped:
        print("with the constants of the package")
        scored, refused = predict(usable, Constants())
    else:
        scored, refused = cross_validated(usable, options.folds)
    aside, _ = predict([row for row in rows if row["usable"] != "1"], Constants())
    summary = report(scored, refused, aside, options.rows)
    print(f"\n{len(rows)} rows in {time.perf_counter() - began:.0f} s")
    if options.csv == DATA and not shipped:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
        fitted = asdict(fit(usable))
        kept = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit, "folds": options.folds,
                **summary, "residuals": write_residuals(scored),
                "fitted on all": {name: float(f"{fitted[name]:.4g}") for name in BOUNDS}}  # fmt: skip
        RESULTS.write_text(json.dumps(kept, indent=2) + "\n")
        print(f"kept in {RESULTS.relative_to(ROOT)}")


def write_residuals(scored: Sequence[Scored]) -> list[str]:
    """Writes the residuals into the package; returns the lines of that file."""
    found = sorted(astuple(r) for s in scored if (r := residual(s)) is not None)
    lines = [",".join(map(str, row)) for row in found]
    residuals.DATA.write_text("\n".join([",".join(residuals.COLUMNS), *lines]) + "\n", encoding="utf-8")
    return lines


def residual(scored: Scored) -> residuals.Residual | None:
    """The error as one of time, also where the source reports a rate; None for rows that match no value of a plan."""
    row, found = scored.row, scored.answer
    kinds = {"step time": "step", "training": "training", "weight sync": "weights", "memory": "memory"}
    kind = kinds.get(found.target, "generation" if row["metric"] in GENERATION else "")
    if not kind:
        return None
    ratio = found.predicted / found.measured
    error = (1 / ratio if row["metric"] in RATES else ratio) - 1
    apart = "disaggregated" in row["architecture"] or "async" in row["architecture"]
    placement = residuals.placement_class(not apart) if kind == "step" else ""
    return residuals.Residual(kind, *classes(row), placement, round(error, 4))


def classes(row: Row) -> tuple[str, str]:
    """Classes of accelerator and model; `other` where the catalogue lacks the one in the source, or the source names
    none."""
    named = []
    for read in (lambda: residuals.family(accelerator(gpu_name(row))), lambda: residuals.model_class(shape(row))):
        try:
            named.append(read())
        except Unplannable:
            named.append("other")
    return named[0], named[1]


def read(path: Path) -> list[Row]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            if missing := [name for name in ("metric", "value", "model") if name not in (table.fieldnames or [])]:
                raise SystemExit(f"{path} has no column {missing[0]!r}; the columns are {', '.join(COLUMNS)}")
            return [whole(row) for row in table]
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"cannot read {path}: {error}") from None


def known_groups() -> set[str]:
    """Groups that the shipped constants were fitted on."""
    return {row["group"] for row in read(DATA)}


def predict(rows: Iterable[Row], constants: Constants) -> tuple[list[Scored], list[tuple[Row, str]]]:
    scored, refused = [], []
    for row in rows:
        try:
            scored.append(Scored(row, answer(row, constants)))
        except Unplannable as reason:
            refused.append((row, str(reason)))
    return scored, refused


def cross_validated(rows: Sequence[Row], folds: int) -> tuple[list[Scored], list[tuple[Row, str]]]:
    groups = sorted({row["group"] for row in rows})
    scored: list[Scored] = []
    refused: list[tuple[Row, str]] = []
    for fold in range(folds):
        held = set(groups[fold::folds])
        constants = fit([row for row in rows if row["group"] not in held])
        more, without = predict([row for row in rows if row["group"] in held], constants)
        scored, refused = scored + more, refused + without
        print(f"fold {fold + 1} of {folds}: {len(held)} groups held out, {len(more)} rows predicted", flush=True)
    return scored, refused


def ordered_pairs(scored: Sequence[Scored]) -> tuple[int, int]:
    """(pairs ordered as measured, pairs): colocated and async runs of one system and model, by step time."""
    steps = [s for s in scored if s.row["metric"] == "step_time" and s.answer.target == "step time"]
    kinds: dict[tuple[str, str, str], tuple[list[Scored], list[Scored]]] = {}
    for s in steps:
        asynchronous = "async" in s.row["architecture"] or "one-step-off" in s.row["architecture"]
        key = (s.row["system"], s.row["model"], s.row["dtype"])
        kinds.setdefault(key, ([], []))[asynchronous].append(s)
    right = total = 0
    for together, apart in kinds.values():
        for a in together:
            for b in apart:
                total += 1
                right += (a.answer.predicted > b.answer.predicted) == (a.answer.measured > b.answer.measured)
    return right, total


RATES = ("train_throughput", "generation_throughput", "throughput")
TIMES = ("step_time", "tpot")
GENERATION = ("tpot", "itl", "generation_throughput")


def sheet(chip: Accelerator) -> tuple[float, ...]:
    return chip.bf16, chip.fp4, chip.bandwidth, chip.memory


def speedups(scored: Sequence[Scored]) -> list[float]:
    """Planned over measured speedup, minus one, for each pair of accelerators that ran the same workload: the faster
    over the slower by data sheet. Above zero, the planner overestimates the faster chip."""
    alike: dict[tuple[str, ...], list[Scored]] = {}
    for s in scored:
        row = s.row
        if row["metric"] in RATES + TIMES:
            names = ("system", "model", "architecture", "metric", "n_gpus", "prompt_len", "response_len", "batch",
                     "dtype", "gen_tp")  # fmt: skip
            alike.setdefault(tuple(row[name] for name in names), []).append(s)
    errors = []
    for same in alike.values():
        for a, b in itertools.combinations(same, 2):
            slow, fast = sorted((a, b), key=lambda s: sheet(accelerator(gpu_name(s.row))))
            if gpu_name(slow.row) != gpu_name(fast.row):
                gain = (fast.answer.predicted / slow.answer.predicted) / (fast.answer.measured / slow.answer.measured)
                errors.append((gain if a.row["metric"] in RATES else 1 / gain) - 1)
    return errors


def report(
    scored: Sequence[Scored], refused: Sequence[tuple[Row, str]], aside: Sequence[Scored], wanted: str | None
) -> dict[str, object]:
    if wanted:
        for s in scored:
            if wanted in (s.row["metric"], s.answer.target):
                row, found = s.row, s.answer
                print(f"{row['system'][:24]:24} {row['model'][:20]:20} {row['gpu'][:8]:8} {row['n_gpus'][:5]:>5} "
                      f"{row['architecture'][:20]:20} {found.measured:10.4g} {found.predicted:10.4g} "
                      f"{s.error:+.0%}")  # fmt: skip
    targets = {}
    print(f"\n{'target':16} {'measure':18} {'limit':>8} {'reached':>8} {'rows':>5}  {'bias':>6} {'p90':>6}")
    for name, measure, limit, read in TARGETS:
        found = [s for s in scored if s.answer.target == name]
        if not found:
            print(f"{name:16} {measure:18} {limit:8.0%} {'no rows':>8}")
            continue
        reached, good = read(found), None
        good = reached >= limit if measure.startswith("share") else reached <= limit
        targets[name] = {
            "measure": measure,
            "limit": limit,
            "reached": round(reached, 4),
            "rows": len(found),
            **spread(found),
        }
        print(f"{name:16} {measure:18} {limit:8.0%} {reached:8.1%} {len(found):5}  {targets[name]['bias']:+6.0%} "
              f"{targets[name]['p90']:6.0%}{'' if good else '   MISSED'}")  # fmt: skip
    right, pairs = ordered_pairs(scored)
    if pairs:
        print(f"{'order':16} {'co-located/async':18} {0.9:8.0%} {right / pairs:8.1%} {pairs:5}"
              f"{'' if right / pairs >= 0.9 else '   MISSED'}")  # fmt: skip
        targets["order"] = {
            "measure": "pairs ordered as measured",
            "limit": 0.9,
            "reached": right / pairs,
            "rows": pairs,
        }
    if gains := speedups(scored):
        reached, bias = statistics.median(map(abs, gains)), statistics.fmean(gains)
        print(f"{'speed-up':16} {'pairs of chips':18} {0.15:8.0%} {reached:8.1%} {len(gains):5}  {bias:+6.0%}"
              f"{'' if reached <= 0.15 else '   MISSED'}")  # fmt: skip
        targets["speed-up"] = {
            "measure": "median error of the gain of a faster accelerator", "limit": 0.15,
            "reached": round(reached, 4), "rows": len(gains), "bias": round(bias, 4),
        }  # fmt: skip
    metrics = table("metric", scored, lambda s: s.row["metric"])
    groups = table("group", scored, lambda s: f"{s.row['group'][:42]} · {s.row['metric'][:16]}")
    if aside:
        print("\nrows with usable = 0, predicted with the shipped constants, not scored")
        table("metric", aside, lambda s: s.row["metric"])
    reasons = collections.Counter((row["metric"], why) for row, why in refused)
    print(f"\ncould not be planned: {len(refused)} rows")
    for (metric, why), count in reasons.most_common():
        print(f"  {count:4}  {metric}: {why}")
    return {"targets": targets, "metrics": metrics, "groups": groups,
            "could not be planned": [
                {"metric": m, "why": w, "rows": n} for (m, w), n in reasons.most_common()]}  # fmt: skip


def spread(found: Sequence[Scored]) -> dict[str, float]:
    errors = sorted(abs(s.error) for s in found)
    return {
        "mape": round(statistics.fmean(errors), 4), "median": round(statistics.median(errors), 4),
        "bias": round(statistics.fmean(s.error for s in found), 4),
        "p90": round(errors[int(0.9 * (len(errors) - 1))], 4),
    }  # fmt: skip


def table(title: str, scored: Sequence[Scored], key: object) -> dict[str, dict[str, float]]:
    named: dict[str, list[Scored]] = {}
    for s in scored:
        named.setdefault(key(s), []).append(s)  # type: ignore[operator]
    print(f"\n{title:60} {'rows':>5} {'MAPE':>7} {'median':>7} {'bias':>7} {'p90':>7}")
    kept = {}
    for name, found in sorted(named.items()):
        figures = spread(found)
        kept[name] = {"rows": len(found), **figures}
        print(f"{name:60} {len(found):5} " + " ".join(f"{figures[k]:7.1%}" for k in ("mape", "median", "bias", "p90")))
    return kept


if __name__ == "__main__":
    main()
