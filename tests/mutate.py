"""Mutation tests: puts one small fault at a time into the product and runs its tests: `python -m tests.mutate`.

A fault flips a comparison, swaps plus and minus or `and` and `or`, drops a `not`, turns a constant, or removes a
statement. A seed selects the faults, so that a run can be repeated. Faults that no test detects are printed: each is a
gap in the tests or a change without effect. Faults are put into a copy of the tree; each runs in a fork that has the
libraries already imported.

    python -m tests.mutate                  three faults in every module below
    python -m tests.mutate algo/gae.py      all of one module
"""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 240  # a fault that makes the tests hang counts as detected
BROKEN = 99
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins that the parent has imported
MODULES = {
    "algo/aggregate.py": "algo/test_aggregate.py",
    "algo/correction.py": "algo/test_correction.py",
    "algo/gae.py": "algo/test_gae.py",
    "algo/kl.py": "algo/test_kl.py",
    "algo/methods/grpo.py": "algo/test_groups.py algo/test_policy_losses.py",
    "algo/methods/ppo.py": "algo/test_policy_losses.py",
    "algo/methods/rloo.py": "algo/test_groups.py",
    "core/kv/blocks.py": "core/test_prefix.py core/test_scheduler.py",
    "core/kv/prefix.py": "core/test_prefix.py",
    "core/sampling/sampler.py": "core/test_sampler.py",
    "core/scheduler.py": "core/test_scheduler.py core/test_prefix.py core/test_pressure.py",
    "events.py": "test_events.py",
    "models/saving.py": "models/test_saving.py",
    "output.py": "test_output.py",
    "place/channels/weights.py": "place/test_weights.py",
    "place/memory/ledger.py": "place/test_ledger.py",
    "place/workers/pool.py": "place/test_pool.py",
    "plan/cost/memory.py": "plan/test_memory.py",
    "process/framing.py": "serve/test_parts.py",
    "report/diagnosis.py": "report/test_diagnosis.py",
    "reward/blend.py": "reward/test_blend.py",
    "search/rules/ets.py": "search/test_rules.py",
    "search/rules/rebase.py": "search/test_rules.py",
    "serve/workers/cache.py": "serve/test_parts.py serve/test_deployment.py",
    "serve/workers/queue.py": "serve/test_queue.py",
    "serve/workers/routing.py": "serve/test_replicas.py",
    "train/data/prompts.py": "train/test_prompts.py",
    "train/data/rows.py": "train/test_rows.py",
    "train/rollouts/pairs.py": "train/test_pairs.py",
    "train/run/checkpoint.py": "train/test_checkpoint.py",
    "worlds/sums.py": "worlds/test_sums.py",
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    module: str
    line: int
    before: str
    after: str
    source: str


def places(tree: ast.Module) -> list[int]:
    """Indices in `ast.walk` of the nodes that can be changed: those outside of messages, checks and signatures."""
    excluded = {
        id(each)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.Raise | ast.Assert | ast.arguments | ast.JoinedStr | ast.AnnAssign)
        for each in ast.walk(outer)
    }
    return [n for n, node in enumerate(ast.walk(tree)) if id(node) not in excluded and _change(copy.copy(node))]


def put(module: str, place: int) -> Fault:
    tree = ast.parse((ROOT / "plaudit" / module).read_text())
    node = next(each for n, each in enumerate(ast.walk(tree)) if n == place)
    before = ast.unparse(node)
    _change(node)
    source = ast.unparse(ast.fix_missing_locations(tree))
    return Fault(module, getattr(node, "lineno", 0), before, ast.unparse(node), source)


def _change(node: ast.AST) -> bool:
    match node:
        case ast.Compare() if type(node.ops[0]) in COMPARISONS:
            node.ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        case ast.BinOp() if type(node.op) in OPERATORS and not _is_text(node):
            node.op = OPERATORS[type(node.op)]()
        case ast.AugAssign() if type(node.op) in OPERATORS:
            node.op = OPERATORS[type(node.op)]()
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            node.op = ast.UAdd()
            node.operand = ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int() | float()):
            node.value = node.value + 1
        case ast.Expr(value=ast.Call()):
            node.value = ast.Constant(None)
        case _:
            return False
    return True


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
               for each in (node.left, node.right))  # fmt: skip


def noticed(fault: Fault, tree: Path) -> bool:
    """Run the module's tests on the copy in `tree` in a fork; returns whether they detect the fault."""
    (tree / "plaudit" / fault.module).write_text(fault.source)
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            os._exit(_test(tree, MODULES[fault.module].split()))
        finally:
            traceback.print_exc()
            os._exit(BROKEN)
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                assert os.waitstatus_to_exitcode(status) != BROKEN, "the fork itself failed"
                return status != 0
            time.sleep(0.02)
        return True
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        shutil.copy(ROOT / "plaudit" / fault.module, tree / "plaudit" / fault.module)


def _test(tree: Path, files: list[str]) -> int:
    import pytest

    os.chdir(tree)
    sys.path[:] = [str(tree), *(each for each in sys.path if Path(each or ".").resolve() != ROOT)]
    os.environ["PYTHONPATH"] = str(tree)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    arguments = [*(f"tests/{file}" for file in files), "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *QUIET]
    return int(pytest.main([*arguments, "-m", "not slow and not interop and not gpu"]))


def main(modules: list[str], each: int = 3) -> None:
    import torch  # noqa: F401 (imported once, for all forks)
    import transformers  # noqa: F401

    assert not any(name.split(".")[0] == "plaudit" for name in sys.modules), "forks import the copy"
    survivors, total = [], 0
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        for name in ("plaudit", "tests", "docs", "benchmarks", "pyproject.toml", "README.md"):
            source = ROOT / name
            shutil.copytree(source, tree / name) if source.is_dir() else shutil.copy(source, tree / name)
        for module in modules or MODULES:
            original = (ROOT / "plaudit" / module).read_text()
            assert not noticed(Fault(module, 0, "", "", original), tree), f"{MODULES[module]} fails without any fault"
            candidates = places(ast.parse(original))
            chosen = candidates if modules else random.Random(module).sample(candidates, min(each, len(candidates)))
            for index in chosen:
                fault, total = put(module, index), total + 1
                ok = noticed(fault, tree)
                print(f"{'noticed ' if ok else 'SURVIVED'} {module}:{fault.line}  {fault.before}  ->  {fault.after}")
                sys.stdout.flush()
                if not ok:
                    survivors.append(fault)
    share = len(survivors) / max(total, 1)
    print(f"{total} faults, {total - len(survivors)} noticed, {len(survivors)} survived ({share:.0%})")
    print(json.dumps([[each.module, each.line, each.before, each.after] for each in survivors]))


if __name__ == "__main__":
    main(sys.argv[1:])
