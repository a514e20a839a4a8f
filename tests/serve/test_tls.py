"""TLS, mutual TLS and unix sockets: real servers, with certificates generated here."""

from __future__ import annotations

import signal
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from plaudit.client.client import RewardClient
from plaudit.errors import ConfigError, RewardUnavailable
from tests.command import plaudit_here

from .hostile import KNOWN, read_answer
from .process import ServerProcess

ITEM = (KNOWN["prompt"], KNOWN["responses"])
RULE: dict[str, Any] = {"models": {"rule": {"kind": "rule", "rule": "regex", "pattern": "#12$"}}}


class Authority:
    """A CA that issues certificates."""

    def __init__(self, place: Path, name: str) -> None:
        self.place = place
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.file = place / f"{name}.pem"
        self.file.write_bytes(self._signed(self.name, self.key, None).public_bytes(serialization.Encoding.PEM))

    def give(self, name: str, usage: x509.ObjectIdentifier) -> tuple[Path, Path]:
        """Issue a certificate for this machine; return the files of the certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._signed(subject, key, usage)
        cert, file = self.place / f"{name}.crt", self.place / f"{name}.key"
        cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        )  # fmt: skip
        return cert, file

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, usage: x509.ObjectIdentifier | None
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=usage is None, path_length=None), critical=True)
        )  # fmt: skip
        if usage is not None:
            names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        return builder.sign(self.key, hashes.SHA256())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ca")


@pytest.fixture(scope="module")
def files(authority: Authority) -> tuple[Path, Path]:
    return authority.give("server", ExtendedKeyUsageOID.SERVER_AUTH)


@pytest.fixture(scope="module")
def client_file(authority: Authority) -> Path:
    cert, key = authority.give("trainer", ExtendedKeyUsageOID.CLIENT_AUTH)
    both = authority.place / "trainer.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    return both


class TlsProcess(ServerProcess):
    """A server with TLS; `http` trusts its CA."""

    authority: Authority
    certificate: Path | None = None

    def begin(self, *arguments: Any) -> None:
        *others, wait = arguments
        super().begin(*others, False)
        self.url = self.url.replace("http:", "https:")
        context = ssl.create_default_context(cafile=str(self.authority.file))
        if self.certificate is not None:
            context.load_cert_chain(self.certificate)
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=context)
        if wait:
            self.wait_ready()


@pytest.fixture(scope="module")
def server(authority: Authority, files: tuple[Path, Path], client_file: Path) -> Iterator[ServerProcess]:
    """A server that requires client certificates."""
    kind = type("Mutual", (TlsProcess,), {"authority": authority, "certificate": client_file})
    flags = ("--tls-cert", str(files[0]), "--tls-key", str(files[1]), "--tls-ca", str(authority.file))
    with kind({**RULE, "limits": {"header_seconds": 1.0}}, *flags) as server:
        yield server


def until(what: str, condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not {what} within {seconds} s"
        time.sleep(0.05)


def test_a_client_with_a_certificate_is_served(
    server: ServerProcess, authority: Authority, client_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.rewards([KNOWN], "rule").json()["items"][0]["scores"] == [1.0]
    assert f"https://127.0.0.1:{server.port}" in server.log()
    with RewardClient(server.url, model="rule", ca_file=authority.file, client_cert=client_file) as client:
        assert client.score([ITEM])[0].value == 1.0
    monkeypatch.setenv("PLAUDIT_CA_FILE", str(authority.file))
    monkeypatch.setenv("PLAUDIT_CLIENT_CERT", str(client_file))
    with RewardClient(server.url, model="rule") as client:
        assert client.score([ITEM])[0].value == 1.0


def test_clients_without_a_valid_certificate_are_rejected(
    server: ServerProcess, authority: Authority, tmp_path: Path, client_file: Path
) -> None:
    """Without a certificate, with another CA's, with an old TLS version, without TLS."""
    untrusted = Authority(tmp_path, "stranger").give("nobody", ExtendedKeyUsageOID.CLIENT_AUTH)
    trusting = ssl.create_default_context(cafile=str(authority.file))
    wrong = ssl.create_default_context(cafile=str(authority.file))
    wrong.load_cert_chain(*untrusted)
    old = ssl.create_default_context(cafile=str(authority.file))
    old.load_cert_chain(client_file)
    with pytest.deprecated_call():
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    for context in (trusting, wrong, old):
        with httpx.Client(verify=context, timeout=20) as client, pytest.raises(httpx.TransportError):
            client.get(f"{server.url}/health/live")
    with httpx.Client(timeout=20) as client, pytest.raises(httpx.TransportError):
        client.get(f"http://127.0.0.1:{server.port}/health/live")
    assert server.ready()


def test_an_unfinished_handshake_is_closed(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(b"\x16\x03\x01")
        assert sock.recv(100) == b"", "closed after header_seconds"


def test_an_untrusted_server_certificate_is_not_retried(server: ServerProcess) -> None:
    with (
        RewardClient(server.url, model="rule", retries=1000) as client,
        pytest.raises(RewardUnavailable, match="ca_file"),
    ):
        client.score([ITEM])
    for arguments, words in (({"ca_file": "/no/such"}, "/no/such"), ({"client_cert": __file__}, "test_tls.py")):
        with pytest.raises(ConfigError, match=words):
            RewardClient(server.url, **arguments)


def test_a_renewed_certificate_is_loaded_and_a_broken_one_is_not(
    server: ServerProcess, authority: Authority, files: tuple[Path, Path], client_file: Path
) -> None:
    def served() -> int:
        context = ssl.create_default_context(cafile=str(authority.file))
        context.load_cert_chain(client_file)
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock,
            context.wrap_socket(sock, server_hostname="localhost") as wrapped,
        ):
            der = wrapped.getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(der or b"").serial_number

    before = served()
    events = lambda name: [each for each in server.events() if each["event"] == name]  # noqa: E731
    content = files[0].read_bytes()
    files[0].write_bytes(b"not a certificate")
    server.process.send_signal(signal.SIGHUP)
    until("refused", lambda: bool(events("tls_refused")))
    assert served() == before
    files[0].write_bytes(content)
    authority.give("server", ExtendedKeyUsageOID.SERVER_AUTH)
    until("renewed", lambda: served() != before)
    assert server.rewards([KNOWN], "rule").status_code == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tls-cert", "{cert}"), "tls_key"),
        (("--tls-cert", "{cert}", "--tls-key", "/no/key"), "--tls-key /no/key cannot be read"),
        (("--tls-cert", "{key}", "--tls-key", "{key}"), "must be a certificate and its unencrypted key"),
        (("--tls-cert", "{cert}", "--tls-key", "{other}"), "must be a certificate and its unencrypted key"),
        (("--tls-cert", "{cert}", "--tls-key", "{key}", "--tls-ca", "{key}"), "--tls-ca"),
        (("--tls-ca", "{cert}"), "tls_cert"),
        (("--tls-cert", "{cert}", "--tls-key", "{key}", "--uds", "/tmp/x"), "uds"),
        (("--uds", "/no/such/place/socket"), "cannot listen on /no/such/place/socket"),
        (("--uds", "/tmp/" + "x" * 200), "too long"),
    ],
)
def test_bad_tls_and_socket_options_are_reported_at_startup(
    authority: Authority, flags: tuple[str, ...], message: str
) -> None:
    cert, key = authority.give("checked", ExtendedKeyUsageOID.SERVER_AUTH)
    _, other = authority.give("other", ExtendedKeyUsageOID.SERVER_AUTH)
    arguments = [flag.format(cert=cert, key=key, other=other) for flag in flags]
    result = plaudit_here("serve", "--port", "0", *arguments)
    assert result.returncode == 2
    assert message in result.stdout + result.stderr


class UnixProcess(ServerProcess):
    """A server on a unix socket."""

    def __init__(self, tree: dict[str, Any], path: Path) -> None:
        self.path = path
        super().__init__(tree, "--uds", str(path), wait=False)
        self.http = httpx.Client(
            base_url="http://localhost", timeout=60, transport=httpx.HTTPTransport(uds=str(path))
        )  # fmt: skip
        until("listening", self.listens)
        self.wait_ready()

    def listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(str(self.path)) == 0


def test_a_unix_socket_is_private_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    """Without keys only its owner may connect; the socket of a dead server is replaced, that of a live one is not."""
    path = tmp_path / "plaudit.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with UnixProcess(RULE, path) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with RewardClient(f"unix:{path}", model="rule") as client:
            assert client.score([ITEM, ("3+4=", ["#8"])])[1].value == 0.0
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(20)
            sock.connect(str(path))
            sock.sendall(b"GET /health/live HTTP/1.1\r\nHost: evil.example\r\n\r\n")
            assert read_answer(sock).status == 403
        result = plaudit_here("serve", "--uds", str(path))
        assert result.returncode == 2
        assert f"cannot listen on {path}" in result.stdout + result.stderr
        assert server.ready()
        reply = server.http.post("/get_worker_address", json={"model": "rule"})
        assert (reply.status_code, "unix socket" in reply.text) == (422, True)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)
        assert server.stop() == 0
        assert not path.exists()
    assert list(tmp_path.iterdir()) == []
