"""The address a server listens on: a port with or without TLS, or a unix socket."""

from __future__ import annotations

import ctypes
import os
import socket
import ssl
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path

from plaudit.config.serve import ListenTable
from plaudit.errors import ConfigError, one_line
from plaudit.serve.http.watch import Watch

BACKLOG = 1024
SO_ATTACH_FILTER = 26  # Linux
# A classic BPF program: drop a TCP segment with SYN and without ACK, which would begin a connection.
NO_SYN = (
    (0x30, 0, 0, 13),  # A = the byte of flags
    (0x54, 0, 0, 0x12),  # A &= SYN | ACK
    (0x15, 0, 1, 0x02),  # if A == SYN
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep
)


def bind(host: str, port: int, setting: str = "--port", *, accept: bool = True) -> socket.socket:
    """`accept`: connections are accepted from now on. Otherwise they are refused until the caller listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        if accept:
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        why = error.strerror or error
        raise ConfigError(f"cannot listen on {host}:{port}: {why}; choose another {setting}") from None
    sock.setblocking(False)
    return sock


def listen(table: ListenTable) -> socket.socket:
    if table.uds is not None:  # without keys the socket's file mode is the only access control
        return bind_unix(Path(table.uds), 0o666 if table.has_keys else 0o600, accept=table.listen == "start")
    return bind(table.host, table.port, accept=table.listen == "start")


def begin_no_connection(sock: socket.socket) -> None:
    """Drop requests for new TCP connections, while those that have begun are still accepted. A socket that is closed
    resets the connections that nobody has accepted yet, with the requests in them; a dropped SYN is sent again, and is
    refused after the socket was closed. Elsewhere than on Linux nothing changes."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in NO_SYN))
    if sys.platform == "linux" and sock.family != socket.AF_UNIX:
        with suppress(OSError):
            value = struct.pack("@HP", len(NO_SYN), ctypes.addressof(program))
            sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, value)


def leave(table: ListenTable) -> None:
    """Remove the unix socket's file, unless another server has created its own there."""
    if table.uds is not None:
        with suppress(OSError):
            if not _answers(Path(table.uds)):
                Path(table.uds).unlink()


def bind_unix(path: Path, mode: int, *, accept: bool = True) -> socket.socket:
    """Binds a unix socket. A stale socket file is replaced; a socket on which a server answers is not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        before = os.umask(0o777 & ~mode)  # restricts the mode from the start, not only after a chmod
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        if accept:
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}; choose another --uds") from None
    sock.setblocking(False)
    return sock


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True


class Tls:
    """The TLS certificates of a server. Renewed files apply to new connections."""

    def __init__(self, cert: str, key: str, ca: str | None) -> None:
        self.files = (Path(cert), Path(key))
        self.ca = ca
        self.watch = Watch(self.files)
        self.context = self.read()
        self.pem = self._pem()

    @classmethod
    def of(cls, table: ListenTable) -> Tls | None:
        if table.tls_cert is None or table.tls_key is None:
            return None
        return cls(table.tls_cert, table.tls_key, table.tls_ca)

    def read(self) -> ssl.SSLContext:
        """Returns a context built from the current files; raises ConfigError if they are invalid."""
        self.watch.read()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        cert, key = self.files
        for flag, file in (("--tls-cert", cert), ("--tls-key", key), ("--tls-ca", self.ca)):
            if file is not None:
                _check_readable(flag, Path(file))
        try:
            # OpenSSL would ask for a password on the terminal, which a server may not have.
            context.load_cert_chain(cert, key, password=lambda: "")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"--tls-cert {cert} and --tls-key {key} must be a certificate and its unencrypted key, both in "
                f"PEM: {one_line(error)}"
            ) from None
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError as error:
                raise ConfigError(f"--tls-ca {self.ca} has no PEM certificate: {one_line(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def use(self) -> None:
        """Use the files that `read` has validated for new connections."""
        self.context.load_cert_chain(*self.files)
        self.pem = self._pem()

    def _pem(self) -> tuple[bytes, bytes]:
        """The certificate and key in use."""
        cert, key = (file.read_bytes() for file in self.files)
        return cert, key


def _check_readable(flag: str, file: Path) -> None:
    try:
        file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {file} cannot be read: {error.strerror}") from None
