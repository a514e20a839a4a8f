"""The rules of the source tree: layers, no import cycles, packages that load no torch, one meaning per class name in a
package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "plaudit"

# Lower layers never import higher ones, and packages of one layer do not import each other.
LAYERS = [
    {"errors", "records", "prefix", "collector", "algo"},
    {"config", "events", "metrics", "output", "process"},
    {"models", "worlds", "plan", "report"},
    {"core"},
    {"reward"},
    {"serve"},
    {"client"},
    {"train", "integrations"},
    {"search"},
    {"place", "critic", "generate", "score", "heap", "doctor", "launch"},
    {"rl", "bench", "calibrate", "judge_check"},
    {"api"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
REPORT_MAY_USE = {"events", "records", "errors", "report"}

# Imports inside functions: only for optional packages and to shorten the start of commands.
LAZY = {
    "cli": "commands start without torch",
    "score": "`plaudit score --url` starts without torch",
    "search": "the package is callable and starts without torch",
    "algo.tokens.logprobs": "needs Triton",
    "algo.tokens.products": "needs Triton",
    "core.device.choose": "the CUDA back end needs Triton",
    "doctor.probe": "most checks start without torch",
    "core.engine": "models are found by name only where one is loaded by name",
    "core.model.fused": "needs Triton",
    "core.model.latent": "needs Triton",
    "core.model.varlen": "needs Triton",
    "core.proof.trial": "needs Triton",
    "judge_check.judge": "`plaudit judge-check --url` starts without torch",
    "models.catalog": "GGUF files need the package gguf",
    "place.ray.rollouts": "runs inside Ray's actor",
    "reward.judges.backends": "a judge over HTTP starts without torch",
    "reward.rules.rule_worker": "reasoning-gym is optional, and the worker starts without this package",
    "serve.model": "Ray Serve is optional",
    "serve.registry": "Ray Serve is optional",
    "serve.server": "gRPC is optional",
    "serve.ray.router": "runs inside Ray Serve's proxy",
    "serve.workers.launched": "ranks other than 0 start no server",
}


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    in_function: bool


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    """Parsed when a test first needs them, not by every process that collects this file."""
    return {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def _imports(name: str, node: ast.AST, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module:
            assert child.level == 0, f"{name}: relative imports hide the direction"
            for alias in child.names:
                full_name = f"{child.module}.{alias.name}"
                yield Import(name, full_name if full_name in FILES else child.module, in_function)
        elif isinstance(child, ast.Import):
            yield from (Import(name, alias.name, in_function) for alias in child.names)
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(name, child, inside)


@cache
def imports() -> list[Import]:
    return [each for name, tree in trees().items() for each in _imports(name, tree, False) if each.imported in FILES]


def part(module: str) -> str:
    """The package or file right under plaudit/."""
    return module.split(".")[1] if "." in module else ""


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            start = stack.index(node)
            if len(stack) - start > 1:
                components.append(sorted(stack[start:]))
            del stack[start:]

    for node in graph:
        if node not in index:
            visit(node)
    return components


def test_imports_follow_the_layers() -> None:
    wrong = sorted(
        f"{each.importer} imports {each.imported}"
        for each in imports()
        if part(each.importer) and part(each.imported) and part(each.importer) != part(each.imported)
        and LEVEL[part(each.imported)] >= LEVEL[part(each.importer)]
    )  # fmt: skip
    assert not wrong, "against the layers above: " + "; ".join(wrong)


def test_modules_have_no_import_cycles() -> None:
    """Imports inside functions and for type checking count too, except those of `plaudit` itself, which imports names
    on first use."""
    graph: dict[str, set[str]] = defaultdict(set)
    for each in imports():
        if each.importer != "plaudit":
            graph[each.importer].add(each.imported)
    assert not circles(graph)


def test_sub_packages_have_no_import_cycles() -> None:
    """A folder may import from its parent folders; other folders must not import each other in a cycle."""
    graph: dict[str, set[str]] = defaultdict(set)
    for each in imports():
        a, b = (module_name(FILES[m].parent / "__init__.py") for m in (each.importer, each.imported))
        if not (f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")):
            graph[a].add(b)
    assert not circles(graph)


def test_imports_inside_functions_have_a_reason() -> None:
    lazy = {
        each.importer.removeprefix("plaudit.") for each in imports() if each.in_function and each.importer != "plaudit"
    }
    unlisted = {m for m in lazy if m not in LAZY and m.split(".")[0] not in ("cli", "search")}
    assert not unlisted, "import at the top of the file, or give the reason in LAZY"
    assert set(LAZY) <= {*lazy, "search"}, "listed without need"


def test_report_imports_only_the_event_log_and_only_the_cli_imports_report() -> None:
    wrong = [
        f"{each.importer} imports {each.imported}"
        for each in imports()
        if (part(each.importer) == "report" and part(each.imported) not in REPORT_MAY_USE)
        or (part(each.imported) == "report" and part(each.importer) not in ("report", "cli"))
    ]
    assert not wrong, "; ".join(wrong)


def test_light_modules_load_without_torch() -> None:
    """All modules are imported in one process, one after another; the first that loads torch is named."""
    modules = [
        "plaudit.plan", "plaudit.config", "plaudit.records", "plaudit.events", "plaudit.cli", "plaudit.score",
        "plaudit.client.client", "plaudit.integrations.trl", "plaudit.integrations.openrlhf",
        "plaudit.integrations.verl", "plaudit.integrations.slime", "plaudit.search.tree.tree",
        "plaudit.search.drivers.methods", "plaudit.search.rules.ets", "plaudit.train.rollouts.pairs",
        "plaudit.judge_check.check",
    ]  # fmt: skip
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if {'torch', 'transformers'} & set(sys.modules):\n"
        "        sys.exit(name)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, *modules], timeout=120, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_file_has_a_docstring() -> None:
    assert not [name for name, tree in trees().items() if not ast.get_docstring(tree)]


def test_class_names_are_unique_in_a_package() -> None:
    modules_by_class: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules_by_class[part(name), node.name].append(name)
    assert not {key[1]: names for key, names in modules_by_class.items() if len(names) > 1}


def test_every_module_has_a_caller_in_the_product() -> None:
    """A caller imports the module or names it: as a process to start, for another program to import, or in a recipe."""
    imported = {each.imported for each in imports() if each.importer != each.imported}
    strings = " ".join(
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    strings += " ".join(path.read_text() for path in (PACKAGE / "recipes").glob("*.toml"))
    entry = {"plaudit", "plaudit.__main__", "plaudit.cli"}
    unused = [
        name
        for name, path in FILES.items()
        if name not in imported and name not in entry and path.name != "__init__.py"
        and f"{name}" not in strings and path.name not in strings and part(name) != "integrations"
    ]  # fmt: skip
    assert not unused


def test_no_file_has_a_generic_name() -> None:
    generic_names = {"utils.py", "helpers.py", "misc.py", "common.py"}
    assert not [path for path in FILES.values() if path.name in generic_names]


def test_no_pickle_and_no_remote_code() -> None:
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {a.name for a in node.names} & {"pickle", "cloudpickle", "dill"}, name
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("pickle", "cloudpickle", "dill"), name
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), name
                assert node.value.value is False, name


def test_slow_list_is_sorted_and_names_existing_tests() -> None:
    lines = [line for line in (ROOT / "tests" / "slow.txt").read_text().splitlines() if not line.startswith("#")]
    named = [line.partition("[")[0].split("::") for line in lines]
    assert [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []
    assert lines == sorted(set(lines))
