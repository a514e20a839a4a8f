"""A vLLM server, started in its own environment."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plaudit
from plaudit.place.engines.engine_server import EngineServer, free_port

MODEL = "policy"  # the name under which it serves the model
EXTENSION = "plaudit.place.engines.vllm_extension.WorkerExtension"
# Options that every server must have been started with.
REQUIRED = ("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION)


class VllmServer(EngineServer):
    """Started without waiting: several servers start in parallel.

    python       the interpreter of an environment that has vLLM
    model        a model directory
    options      further options of vLLM's command line
    environment  further environment variables
    """

    def __init__(
        self, python: str, model: Path, log: Path, *, dtype: str, options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None, cores: Sequence[int] = (),
    ) -> None:  # fmt: skip
        # Its workers import our extension. They must be able to import this package and nothing else of our
        # environment.
        self._path: Any = tempfile.TemporaryDirectory(prefix="plaudit-vllm-")
        (Path(self._path.name) / "plaudit").symlink_to(Path(plaudit.__file__).parent)
        port = free_port()
        command = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", MODEL,
            "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port), *REQUIRED, *options,
        ]  # fmt: skip
        variables = {
            "VLLM_SERVER_DEV_MODE": "1",  # pausing, caches and collective_rpc are available in this mode only
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": self._path.name,
            **(environment or {}),
        }
        super().__init__("vLLM", command, port, log, variables, cores)

    def close(self) -> None:
        super().close()
        self._path.cleanup()
