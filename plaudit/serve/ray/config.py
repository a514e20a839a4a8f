"""`plaudit deploy`: writes a server's models as a Ray Serve configuration for `serve deploy`. Does not need Ray."""

from __future__ import annotations

from typing import Any

import yaml

from plaudit.config.reward import EmbeddingTable, JudgeTable, ReadByEngine
from plaudit.config.serve import ServeTable
from plaudit.errors import ConfigError

QUIET = {
    "OMP_WAIT_POLICY": "passive",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
BUILD = "plaudit.serve.ray.replica:build"
HEAD = """\
# One application per model. serve deploy FILE, then on a machine of the cluster, with the same models:
#   plaudit serve --ray auto ...
# which connects to them and serves HTTP. Models must be at the same path on every node.
"""


def application_name(name: str, number: int) -> str:
    return f"plaudit-{name}-{number}"


def serve_config(table: ServeTable) -> str:
    applications: list[dict[str, Any]] = []
    for name, entry in table.models.items():
        if not isinstance(entry, ReadByEngine | EmbeddingTable | JudgeTable) or entry.path is None:
            continue  # rules, blends and external judges have no worker
        arguments = {
            "table": entry.model_dump(mode="json", exclude_none=True),
            "environment": dict(QUIET),
            "load_seconds": table.limits.load_seconds,
        }
        applications.append(
            {"name": application_name(name, 0), "route_prefix": None, "import_path": BUILD, "args": arguments}
        )  # fmt: skip
    if not applications:
        raise ConfigError("none of the models has a worker that Ray Serve could run")
    tree = {"proxy_location": "Disabled", "applications": applications}
    return HEAD + str(yaml.safe_dump(tree, sort_keys=False, default_flow_style=False))
