"""`plaudit critic`: a critic that is trained with NeMo-Aligner's protocol. This process listens; its worker
computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plaudit.config.critic import CriticServerTable, parse_critic
from plaudit.config.table import read_toml
from plaudit.critic.host import CriticHost
from plaudit.critic.routes import PROTOCOLS, WRITING, CriticRoutes
from plaudit.errors import ConfigError, nearest
from plaudit.serve.http.app import Admission
from plaudit.serve.http.message import Routes
from plaudit.serve.logs import Log
from plaudit.serve.metrics import Metrics
from plaudit.serve.options import named_keys, split_names
from plaudit.serve.server import ServerBackend, run_server

WORKER = "plaudit.critic.worker"


def critic_table(
    config: Path | None = None, api_keys: Sequence[str] = (), allow_open: str | None = None, **flags: Any
) -> CriticServerTable:
    """Flags override the file; None for those not given."""
    tree: dict[str, Any] = {} if config is None else read_toml(config, "critic configuration")
    tree |= {key: str(v) if isinstance(v, Path) else v for key, v in flags.items() if v is not None}
    if api_keys:
        tree["api_keys"] = named_keys(api_keys)
    if allow_open is not None:
        tree["allow_open"] = split_names(allow_open)
    return parse_critic(tree, "plaudit critic" if config is None else str(config))


def serve_critic(table: CriticServerTable) -> int:
    """Serves until a signal, or until the critic has failed permanently; returns the exit code."""
    for name in table.allow_open:
        if name not in PROTOCOLS:
            raise ConfigError(f"allow_open names {name!r}; {nearest(name, PROTOCOLS)}")
    if not table.resume and any(Path(table.save_dir).glob("step-*")):
        raise ConfigError(
            f"{table.save_dir} already has saves of a critic: --resume continues from the newest, --save-dir sets "
            "another directory"
        )

    def build(admission: Admission, metrics: Metrics, log: Log) -> tuple[ServerBackend, Routes]:
        host = CriticHost(table, WORKER, admission, metrics, log)
        # On a loopback address, or if configured so, every caller may also train.
        trusted = WRITING in table.allow_open or (
            table.private and table.admin_key is None and table.api_key_file is None
        )
        return host, CriticRoutes(host, guarded=not trusted).routes()

    return run_server(table, build, "critic", f"critic_infer, critic_train, critic_save; saves in {table.save_dir}")
