"""HTTP connections of a client: over TCP, TLS, a unix socket or gRPC, depending on the URL."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from plaudit.client.grpc_transport import SCHEMES, GrpcTransport
from plaudit.errors import ConfigError, RewardUnavailable

UNIX = "unix:"
StrPath = str | Path


class Network:
    """ca_file      PEM of the CA of https servers, instead of the public ones; default: PLAUDIT_CA_FILE
    client_cert  PEM with a certificate and its key, for servers that require one; default: PLAUDIT_CLIENT_CERT
    """

    def __init__(
        self, urls: Sequence[str], headers: Mapping[str, str], connections: int, ca_file: StrPath | None,
        client_cert: StrPath | None, transport: httpx.AsyncBaseTransport | None,
    ) -> None:  # fmt: skip
        # including health checks
        limits = httpx.Limits(max_connections=2 * connections, max_keepalive_connections=connections)
        ca_file = ca_file or os.environ.get("PLAUDIT_CA_FILE")
        client_cert = client_cert or os.environ.get("PLAUDIT_CLIENT_CERT")
        verify = _context(ca_file, client_cert)

        def opened(transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
            # Only the given addresses: redirects are not followed, proxy variables are ignored.
            return httpx.AsyncClient(
                headers=headers, limits=limits, transport=transport, verify=verify, follow_redirects=False,
                trust_env=False,
            )  # fmt: skip

        shared = opened(transport)

        def reached(url: str) -> httpx.AsyncClient:
            if _is_unix(url):
                return opened(httpx.AsyncHTTPTransport(uds=url.removeprefix(UNIX), limits=limits))
            if url.startswith(SCHEMES):
                files = (None if file is None else str(file) for file in (ca_file, client_cert))
                return opened(GrpcTransport(url, *files))
            return shared

        self._clients = {url: reached(url) for url in urls}

    async def send(self, method: str, url: str, path: str, **options: Any) -> httpx.Response:
        """Raises httpx.RequestError if there is no reply, RewardUnavailable if a retry cannot succeed."""
        try:
            base = "http://localhost" if _is_unix(url) or url.startswith(SCHEMES) else url
            return await self._clients[url].request(method, f"{base}{path}", **options)
        except httpx.RequestError as error:
            if _untrusted(error):
                cure = "set its CA file as ca_file, or in PLAUDIT_CA_FILE"
                raise RewardUnavailable(f"{url} has a certificate that is not trusted ({error}): {cure}") from None
            raise

    async def close(self) -> None:
        for client in set(self._clients.values()):
            await client.aclose()


def _is_unix(url: str) -> bool:
    return url.startswith(UNIX)


def _context(ca_file: StrPath | None, client_cert: StrPath | None) -> ssl.SSLContext | bool:
    if ca_file is None and client_cert is None:
        return True
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
