"""The file that persists swaps across restarts: for each name the current and previous directory, and its canary."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec

from plaudit.config.serve import ServeTable
from plaudit.errors import ConfigError, StorageError, one_line
from plaudit.output import write_atomically
from plaudit.serve.swaps import ModelRoot, swapped_table
from plaudit.serve.version import Table


class ModelState(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Directories. `configured` is the one in the configuration, used to detect a changed configuration."""

    configured: str
    path: str
    previous: str | None = None
    canary: str | None = None
    share: float = 0.0


class StateFile:
    """Without a file, swaps are lost at exit."""

    def __init__(self, file: str | None) -> None:
        self.file = None if file is None else Path(file)
        self._writing = asyncio.Lock()
        self.models: Mapping[str, ModelState] = {} if self.file is None else _read(self.file)

    async def keep(self, name: str, state: ModelState) -> None:
        async with self._writing:
            models = {**self.models, name: state}
            if self.file is not None:
                text = msgspec.json.format(msgspec.json.encode(models), indent=2).decode() + "\n"
                try:
                    await asyncio.to_thread(write_atomically, self.file, text)
                except OSError as error:
                    raise StorageError(f"cannot write state_file {self.file}: {error.strerror}") from None
            self.models = models


class Restored:
    """The tables of a model that was swapped by a previous server."""

    def __init__(self, table: ServeTable, name: str, state: ModelState, source: str) -> None:
        self._source, self._name, self._entry = source, name, table.models[name]
        self._explicit = table.explicit(name)
        self._root = ModelRoot(table.model_root)
        self.state = state
        self.main = self.directory(state.path)
        self.previous = None if state.previous is None else self.directory(state.previous)
        self.canary = None if state.canary is None else self.directory(state.canary)

    def directory(self, path: str) -> Table:
        """The table for a directory, as a new server would read it, with the operator's settings for this name."""
        if path == self.state.configured:
            assert isinstance(self._entry, Table)
            return self._entry
        try:
            directory = self._root.holds(path)
            return swapped_table(self._name, self._entry.kind, {**self._explicit, "path": str(directory)})
        except ConfigError as error:
            raise ConfigError(
                f"{self._source}: {self._name} serves {path}: {one_line(error)}; restore it, or delete the "
                "state file to serve the configured model"
            ) from None


def restored(table: ServeTable) -> tuple[dict[str, Restored], list[str]]:
    """The stored states by name, and the names whose state is ignored because the configuration has changed."""
    models, vain = {}, []
    for name, state in StateFile(table.state_file).models.items():
        if getattr(table.models.get(name), "path", None) == state.configured:
            models[name] = Restored(table, name, state, f"state_file {table.state_file}")
        else:
            vain.append(name)
    return models, vain


def _read(file: Path) -> dict[str, ModelState]:
    if not file.exists():
        if not file.parent.is_dir():
            raise ConfigError(f"state_file {file}: the directory {file.parent} does not exist; create it")
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, ModelState])
    except OSError as error:
        raise ConfigError(f"cannot read state_file {file}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"state_file {file}: {one_line(error, 200)}; delete it to serve the configured models"
        ) from None
