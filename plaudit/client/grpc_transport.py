"""The client's requests over gRPC, with replies converted to those of HTTP, so that other code is the same for both.

A call carries the body of /v1/rewards unchanged. Errors have HTTP's status, type and `Retry-After` in the trailing
metadata. Only `grpcio` is needed (`pip install grpcio`), and only for a grpc URL.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import httpx

from plaudit.errors import ConfigError

SCHEMES = ("grpc://", "grpcs://")
METHODS = {"/v1/rewards": "/plaudit.Rewards/Score", "/health/live": "/plaudit.Rewards/Live"}
CARRIED = ("authorization", "x-deadline", "x-route-key", "x-request-id", "traceparent", "tracestate")
OPTIONS = (
    ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 5000),  # also the timeout of a connection attempt
)  # fmt: skip


def require_grpc(url: str) -> Any:
    try:
        import grpc
    except ImportError:
        raise ConfigError(f"{url} needs gRPC, which is not installed: pip install grpcio") from None
    return grpc


class GrpcTransport(httpx.AsyncBaseTransport):
    """Transport to one server. `ca_file` and `client_cert` are PEM files, as over HTTP."""

    def __init__(self, url: str, ca_file: str | None, client_cert: str | None) -> None:
        self._grpc = grpc = require_grpc(url)
        scheme, _, address = url.partition("://")
        if scheme == "grpc":
            self._channel = grpc.insecure_channel(address, OPTIONS)
        else:
            roots, pair = (None if file is None else Path(file).read_bytes() for file in (ca_file, client_cert))
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(roots, pair, pair), OPTIONS)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """gRPC uses its own threads, so this works with any event loop."""
        call = self._channel.unary_unary(METHODS[request.url.path])
        metadata = [(name, request.headers[name]) for name in CARRIED if name in request.headers]
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        running = call.future(await request.aread(), metadata=metadata)
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(_settle, done))
        try:
            await done
        except asyncio.CancelledError:
            running.cancel()
            raise
        try:
            return httpx.Response(200, content=running.result())
        except self._grpc.RpcError as error:
            return self._failed(error)

    def _failed(self, error: Any) -> httpx.Response:
        """The reply that the same request would get over HTTP, or httpx's error if there would be none."""
        trailing = dict(error.trailing_metadata() or ())
        status, kind, message = trailing.get("x-status"), trailing.get("x-error-type", ""), error.details() or ""
        codes = self._grpc.StatusCode
        if status is None:
            if error.code() == codes.RESOURCE_EXHAUSTED and "larger than max" in message:
                status, kind = "413", "too_large"
            elif error.code() == codes.UNIMPLEMENTED:
                status, kind, message = "404", "not_found", "this is not the gRPC port of plaudit serve"
            else:
                lost = httpx.ConnectError(f"{error.code().name}: {message}")
                if "CERTIFICATE_VERIFY_FAILED" in message:
                    raise lost from ssl.SSLCertVerificationError(message)
                raise lost
        headers = {"retry-after": trailing["retry-after"]} if "retry-after" in trailing else {}
        content = json.dumps({"error": {"type": kind, "message": message}}).encode()
        return httpx.Response(int(status), headers=headers, content=content)

    async def aclose(self) -> None:
        self._channel.close()


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
