"""HTTP connections of a client: over TCP, TLS, a unix socket or gRPC, depending on the URL."""

from __future__ import annotations

import asyncio
import importlib
import os
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from plaudit.client.grpc_transport import SCHEMES, GrpcTransport, require_grpc
from plaudit.errors import ConfigError, RewardUnavailable

UNIX = "unix:"
# httpx imports these with its first connection. If another thread forks meanwhile, the child finds their import locks
# held by a thread that it does not have, and hangs.
for _module in ("certifi", "h11", "httpcore", "httpcore._backends.anyio", "anyio._backends._asyncio", "sniffio"):
    with suppress(ImportError):
        importlib.import_module(_module)
StrPath = str | Path


class Network:
    """Connections belong to an event loop: each loop has its own, opened by its first request.

    ca_file      PEM of the CA of https servers, instead of the public ones; default: PLAUDIT_CA_FILE
    client_cert  PEM with a certificate and its key, for servers that require one; default: PLAUDIT_CLIENT_CERT
    """

    def __init__(
        self, urls: Sequence[str], headers: Mapping[str, str], connections: int, ca_file: StrPath | None,
        client_cert: StrPath | None, transport: httpx.AsyncBaseTransport | None,
    ) -> None:  # fmt: skip
        self._urls = urls
        self._headers = headers
        self._connections = connections
        self._ca_file = ca_file or os.environ.get("PLAUDIT_CA_FILE")
        self._client_cert = client_cert or os.environ.get("PLAUDIT_CLIENT_CERT")
        self._verify = _context(self._ca_file, self._client_cert)
        self._transport = transport
        self._process = os.getpid()
        self._open: dict[asyncio.AbstractEventLoop, _Connections] = {}
        for url in urls:
            if url.startswith(SCHEMES):
                require_grpc(url)

    async def free(self) -> asyncio.Semaphore:
        """The connections that are not in use, of the running event loop."""
        return (await self._of_this_loop()).free

    async def _of_this_loop(self) -> _Connections:
        loop = asyncio.get_running_loop()
        if (found := self._open.get(loop)) is None:
            self._open = {each: opened for each, opened in self._open.items() if not each.is_closed()}
            found = self._open[loop] = self._connect()
            await anext(found.lifetime)
        return found

    def _connect(self) -> _Connections:
        # including health checks
        limits = httpx.Limits(max_connections=2 * self._connections, max_keepalive_connections=self._connections)

        def opened(transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
            # Only the given addresses: redirects are not followed, proxy variables are ignored.
            return httpx.AsyncClient(
                headers=self._headers, limits=limits, transport=transport, verify=self._verify, follow_redirects=False,
                trust_env=False,
            )  # fmt: skip

        shared = opened(self._transport)

        def reached(url: str) -> httpx.AsyncClient:
            if _is_unix(url):
                return opened(httpx.AsyncHTTPTransport(uds=url.removeprefix(UNIX), limits=limits))
            if url.startswith(SCHEMES):
                if os.getpid() != self._process:
                    raise ConfigError(
                        f"{url}: gRPC does not survive os.fork(), and this client was created before it; create it in "
                        "the new process, start that by spawn, or use the server's http address"
                    )
                files = (None if file is None else str(file) for file in (self._ca_file, self._client_cert))
                return opened(GrpcTransport(url, *files))
            return shared

        clients = {url: reached(url) for url in self._urls}
        return _Connections(clients, asyncio.Semaphore(self._connections), _lifetime(clients))

    async def send(self, method: str, url: str, path: str, **options: Any) -> httpx.Response:
        """Raises httpx.RequestError if there is no reply, RewardUnavailable if a retry cannot succeed."""
        try:
            base = "http://localhost" if _is_unix(url) or url.startswith(SCHEMES) else url
            return await (await self._of_this_loop()).clients[url].request(method, f"{base}{path}", **options)
        except httpx.RequestError as error:
            if _untrusted(error):
                cure = "set its CA file as ca_file, or in PLAUDIT_CA_FILE"
                raise RewardUnavailable(f"{url} has a certificate that is not trusted ({error}): {cure}") from None
            raise

    async def close(self) -> None:
        """Closes the connections of the running event loop. A later request opens new ones."""
        if (opened := self._open.pop(asyncio.get_running_loop(), None)) is not None:
            await opened.lifetime.aclose()


@dataclass(frozen=True, slots=True)
class _Connections:
    clients: dict[str, httpx.AsyncClient]
    free: asyncio.Semaphore
    lifetime: AsyncGenerator[None, None]


async def _lifetime(clients: Mapping[str, httpx.AsyncClient]) -> AsyncGenerator[None, None]:
    """asyncio.run closes the generators of its loop, and this one the connections, if the caller has not."""
    try:
        yield
    finally:
        for client in set(clients.values()):
            await client.aclose()


def _is_unix(url: str) -> bool:
    return url.startswith(UNIX)


def _context(ca_file: StrPath | None, client_cert: StrPath | None) -> ssl.SSLContext:
    if ca_file is None and client_cert is None:
        return httpx.create_ssl_context(trust_env=False)
    files = f"ca_file {ca_file}" if client_cert is None else f"ca_file {ca_file}, client_cert {client_cert}"
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        if client_cert is not None:
            context.load_cert_chain(client_cert)
    except (OSError, ValueError) as error:  # includes SSLError
        raise ConfigError(f"{files} cannot be used: {error}; expected PEM files") from None
    return context


def _untrusted(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None
