"""Configuration of a reward server: `serve.toml` and the flags of `plaudit serve`. Imports no torch."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, PrivateAttr, TypeAdapter, field_validator, model_validator

from plaudit.config.reward import KINDS, OneReward
from plaudit.config.search import SearchServiceTable
from plaudit.config.shipped.catalog import find_recipe
from plaudit.config.table import Positive, Table, check, read_toml
from plaudit.errors import ConfigError

Port = Annotated[int, Field(ge=0, le=65535)]
ATTRIBUTES = "/attributes"  # suffix of a model's name in an alias: one value per label
NO_SCORE = ("blend", "logprobs", "embedding")  # kinds that cannot be members of a blend
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"
NAME_CHARACTERS = 100
LAST_PARTS = ("attributes", "config", "stats", "ready", "infer")  # of Triton's paths behind a model's name


class LimitsTable(Table):
    body_bytes: PositiveInt = 64 * 2**20
    """Decompressed size of one request."""
    grpc_message_bytes: PositiveInt = 16 * 2**20
    """Size of one gRPC message, if body_bytes is not less: gRPC hands it over in one piece, which occupies the server's
    event loop for 2 to 3 ms per MiB."""
    buffered_bytes: PositiveInt = 512 * 2**20
    """Total size of all requests in progress."""
    body_seconds: Positive = 30.0
    request_seconds: Positive = 600.0
    """Maximum duration of a request; X-Deadline can only shorten it."""
    items: PositiveInt = 4096
    """Responses in one request."""
    queued_tokens: PositiveInt = 4_000_000
    """Tokens of accepted requests that are not finished."""
    connections: PositiveInt = 4096
    header_bytes: PositiveInt = 64 * 1024
    headers: PositiveInt = 100
    header_seconds: Positive = 10.0
    write_seconds: Positive = 60.0
    """A client that reads no byte of its reply for this long is disconnected."""
    load_seconds: Positive = 1800.0
    cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    """Size of the cache of scores for repeated items; 0: off."""


class ListenTable(Table):
    """Settings of every server: addresses, authentication, limits."""

    host: str = "127.0.0.1"
    port: Port = 5555
    """0: any free port."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead of host and port."""
    tls_cert: str | None = None
    """PEM: the server's certificate and its intermediate certificates."""
    tls_key: str | None = None
    tls_ca: str | None = None
    """PEM: accept only clients with a certificate of this CA (mutual TLS)."""
    grpc_port: Port | None = None
    """A second port for gRPC, on the same host and with the same TLS."""
    health_port: Port | None = None
    """A second port on which a separate thread serves /health/live."""
    api_keys: Mapping[str, str] = {}
    """Client name -> key. The server is shared fairly between clients."""
    api_key_file: str | None = None
    """A TOML file of hashed keys with roles, expiry and quotas; it is reloaded when it changes."""
    admin_key: str | None = None
    allow_open: tuple[str, ...] = ()
    """Protocols that need no key even if the address is not loopback or keys are configured."""
    overload_status: Literal[503, 429] = 503
    listen: Literal["start", "ready"] = "start"
    """When connections are accepted: at once, with 503 until the models are loaded, or when the models are loaded; then
    balancers that know only whether a server accepts connections, and not its health, use it no earlier."""
    drain_delay: Annotated[float, Field(ge=0)] = 0.0
    """Seconds between a termination signal and the drain, in which the server reports not ready and still accepts
    requests, so that load balancers can react."""
    drain_seconds: Positive = 30.0
    log: Literal["errors", "requests"] = "errors"
    limits: LimitsTable = LimitsTable()

    @field_validator("api_keys")
    @classmethod
    def _keys(cls, keys: Mapping[str, str]) -> Mapping[str, str]:
        for holder, key in keys.items():
            checked_key(key, f"the API key of {holder!r}")
        if len(set(keys.values())) < len(keys):
            raise ValueError("two clients have the same API key; give each its own")
        return keys

    @field_validator("admin_key")
    @classmethod
    def _admin(cls, key: str | None) -> str | None:
        return None if key is None else checked_key(key, "the admin key")

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def private(self) -> bool:
        """Whether the server is reachable from this machine only."""
        return self.uds is not None or loopback(self.host)

    def address(self, port: int) -> str:
        if self.uds is not None:
            return f"unix:{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls_cert is None else 'https'}://{host}:{port}"

    @model_validator(mode="after")
    def _tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together; give both")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("tls_ca requires client certificates, which need TLS; give tls_cert and tls_key too")
        if self.uds is not None and self.tls_cert is not None:
            raise ValueError("TLS is for host and port, and uds replaces them; remove tls_cert and tls_key, or uds")
        return self

    @model_validator(mode="after")
    def _separate(self) -> Self:
        if self.admin_key is not None and self.admin_key in self.api_keys.values():
            raise ValueError("the admin key is also an API key; give it a value of its own")
        return self


class ServeTable(ListenTable):
    models: Annotated[
        Mapping[Annotated[str, Field(pattern=NAME, max_length=NAME_CHARACTERS)], OneReward], Field(min_length=1)
    ]
    protocols: tuple[str, ...] | None = None
    """Protocols besides the native one. Default: all."""
    aliases: Mapping[str, str] = {}
    """Alias -> model. Protocols whose requests name no model use `reward_model` or `process_model`. For
    `MODEL/attributes` Triton clients get one column per label instead of one reward."""
    ray: str | None = None
    """Run workers on Ray Serve: "local" starts Ray on this machine; else the address of a cluster, such as "auto"."""
    search: SearchServiceTable = SearchServiceTable()
    """Settings and limits of /v1/search and of chat requests with a search."""
    model_root: str | None = None
    """Models swapped in at run time must be under this directory."""
    state_file: str | None = None
    """File that keeps swaps across restarts. Default: a restarted server serves its configuration."""
    _explicit: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)

    def explicit(self, name: str) -> dict[str, Any]:
        """Return the keys of a model that the operator set, in the file or by flags. The rest of its table comes from
        the model's directory, and is replaced when another model is swapped in."""
        return dict(self._explicit.get(name, {}))

    @model_validator(mode="after")
    def _names(self) -> Self:
        for name in self.models:
            *before, last = name.split("/")
            if before and (last in LAST_PARTS or "versions" in before):
                raise ValueError(f"models.{name} ends like a path of Triton's protocol; give it another name")
        return self

    @model_validator(mode="after")
    def _aliases(self) -> Self:
        for alias, name in self.aliases.items():
            if alias in self.models or name.removesuffix(ATTRIBUTES) not in self.models:
                raise ValueError(
                    f"aliases: {alias} = {name!r} must be a new name for a served model: {', '.join(self.models)}"
                )
        return self

    @model_validator(mode="after")
    def _fractions(self) -> Self:
        parts: dict[str, float] = {}
        for table in self.models.values():
            fraction = getattr(table, "memory_fraction", None)
            if fraction is not None:
                device = str(getattr(table, "device", "auto"))
                parts[device] = parts.get(device, 0.0) + fraction * getattr(table, "replicas", 1)
        for device, whole in parts.items():
            if whole > 1 + 1e-9:
                raise ValueError(f"the memory_fractions on device {device!r} add up to {whole:g}, more than 1")
        return self

    @model_validator(mode="after")
    def _members(self) -> Self:
        for name, table in self.models.items():
            for member in getattr(table, "members", ()):
                if member == name or member not in self.models or self.models[member].kind in NO_SCORE:
                    raise ValueError(f"models.{name} blends {member!r}, not another model here that has a score")
        return self


def loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_key(key: str, what: str) -> str:
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{what} must be at least 8 printable ASCII characters without spaces")
    return key


_SERVE: TypeAdapter[ServeTable] = TypeAdapter(ServeTable)


def parse_serve(
    tree: Mapping[str, Any], source: str, explicit: Mapping[str, Mapping[str, Any]] | None = None
) -> ServeTable:
    """Validate a server configuration. `explicit` gives the keys per model that the operator set, if the tree contains
    more; by default those of the tree."""
    table: ServeTable = check(_SERVE, tree, source, ServeTable, KINDS)
    entries = tree["models"] if explicit is None else explicit
    table._explicit.update({name: dict(entry) for name, entry in entries.items()})
    return table


def read_serve(path: Path) -> dict[str, Any]:
    tree = read_toml(find_recipe(path, "server configuration"), "server configuration")
    if not isinstance(tree.get("models", {}), dict):
        raise ConfigError(f"{path}: models must be tables, such as [models.sums]")
    return tree
