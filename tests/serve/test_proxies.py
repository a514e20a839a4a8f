"""Request smuggling through real proxies: nginx, haproxy, Apache httpd and varnish, each in front of the listener.

A proxy refuses a route and shares its connections to the listener among clients. Attackers send requests whose bodies
contain a request for that route, framed in every way that two parsers may read differently; meanwhile other clients
check that every reply they get is their own. A proxy that is not installed is skipped.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.serve.process import free_port
from tests.serve.raw_cases import ABC, MANY, OFFER, PROBE, Recorder, executed, head, table
from tests.serve.test_listener import SECONDS, serving

DENIED = b"GET /denied HTTP/1.1\r\nHost: h\r\n\r\n"
ATTACKERS, INNOCENT = 8, 4
WAIT = 0.3  # for a reply to an attack: a proxy may wait for the rest of it
LENGTHS = ("Content-Length: {n}", "Content-Length: 0", "Content-Length: 3", "Content-Length: +{n}")
CODINGS = (
    "Transfer-Encoding: chunked", "Transfer-Encoding: xchunked", "Transfer-Encoding : chunked",
    "Transfer-Encoding:\x0bchunked", "Transfer-Encoding: chunked, identity", "Transfer-Encoding: identity",
    "X: a\r\n Transfer-Encoding: chunked", "Transfer-Encoding:\r\n chunked", "X: a\nTransfer-Encoding: chunked",
    "Transfer_Encoding: chunked",
)  # fmt: skip


def attacks() -> list[bytes]:
    length, chunk = LENGTHS[0], b"%x\r\n%b\r\n0\r\n\r\n" % (len(DENIED), DENIED)
    bodies = (DENIED, ABC + DENIED, b"0\r\n\r\n" + DENIED, chunk, b"0\n\r\n" + DENIED, b"3;\n" + ABC + DENIED)
    framings: list[tuple[str, ...]] = [(each,) for each in (*LENGTHS, *CODINGS)]
    framings += [(length, each) for each in CODINGS] + [(each, length) for each in CODINGS[:4]]
    framings += [(length, other) for other in LENGTHS[1:]]
    offers: tuple[tuple[str, ...], ...] = (
        (), OFFER, (*MANY, *OFFER), (*OFFER, *MANY), ("Connection: Upgrade", "Upgrade: websocket"),
        ("Connection: close, Upgrade", "Upgrade: h2c"), ("Connection: Content-Length",), ("Expect: 100-continue",),
    )  # fmt: skip
    found = []
    for framing in framings:
        for offer in offers:
            for body in bodies if not offer else bodies[:4]:
                lines = [line.format(n=len(body)) for line in (*offer, *framing)]
                found.append(head("POST /a HTTP/1.1", *lines) + body)
                if len(framing) == 1 and len(offer) < 4:
                    found.append(head("GET /a HTTP/1.0", "Connection: keep-alive", *lines) + body)
    return found + [case.data.replace(b"/smuggled", b"/denied") for case in table() if len(case.data) < 20_000]


# The proxies: a configuration for a port, the listener's port and a folder, and the command


def nginx(port: int, behind: int, folder: Path) -> list[str]:
    (folder / "nginx.conf").write_text(
        f"""
        daemon off; master_process off; pid {folder}/pid; error_log {folder}/log;
        events {{ worker_connections 256; }}
        http {{
          access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
          fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
          large_client_header_buffers 8 16k;
          map $http_upgrade $offer {{ default upgrade; "" ""; }}
          upstream behind {{ server 127.0.0.1:{behind}; keepalive 2; }}
          server {{
            listen 127.0.0.1:{port};
            location /denied {{ return 403; }}
            location / {{
              proxy_pass http://behind; proxy_http_version 1.1; proxy_read_timeout 3s; proxy_request_buffering off;
              proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $offer;
            }}
          }}
        }}""".replace("underscores_in_headers on;\n", "\n")
    )
    return ["nginx", "-c", f"{folder}/nginx.conf", "-e", f"{folder}/log"]


def haproxy(port: int, behind: int, folder: Path) -> list[str]:
    (folder / "haproxy.cfg").write_text(f"""
global
    tune.http.maxhdr 1000
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
    http-reuse always
frontend front
    bind 127.0.0.1:{port}
    http-request deny if {{ path_beg /denied }}
    default_backend back
backend back
    server one 127.0.0.1:{behind} pool-max-conn 2
""")
    return ["haproxy", "-db", "-f", f"{folder}/haproxy.cfg"]


def apache2(port: int, behind: int, folder: Path) -> list[str]:
    modules = Path("/usr/lib/apache2/modules")
    names = ("mpm_event", "authz_core", "unixd", "proxy", "proxy_http")
    files = [(name, modules / f"mod_{name}.so") for name in names]
    loaded = "\n".join(f"LoadModule {name}_module {file}" for name, file in files if file.exists())  # or built in
    user = "User nobody\nGroup nogroup" if os.geteuid() == 0 else ""
    (folder / "apache.conf").write_text(f"""
{loaded}
{user}
ServerName h
ServerRoot {folder}
DefaultRuntimeDir {folder}
PidFile {folder}/pid
ErrorLog {folder}/log
Listen 127.0.0.1:{port}
LimitRequestFields 1000
ThreadsPerChild 25
ProxyTimeout 3
<LocationMatch "^/denied">
  Require all denied
</LocationMatch>
ProxyPass "/" "http://127.0.0.1:{behind}/" upgrade=ANY max=2 keepalive=On
ProxyPreserveHost On
""")
    return ["apache2", "-X", "-f", f"{folder}/apache.conf"]


def varnishd(port: int, behind: int, folder: Path) -> list[str]:
    (folder / "varnish.vcl").write_text(f"""
vcl 4.1;
backend default {{ .host = "127.0.0.1"; .port = "{behind}"; .first_byte_timeout = 3s; }}
sub vcl_recv {{
  if (req.url ~ "^/denied") {{ return (synth(403)); }}
  return (pass);
}}
""")
    words = ["-F", "-n", f"{folder}/work", "-f", f"{folder}/varnish.vcl", "-a", f"127.0.0.1:{port}"]
    return ["varnishd", *words, "-p", "http_max_hdr=512", "-j", "none"]


@contextmanager
def proxied(proxy: Callable[[int, int, Path], list[str]], behind: int, folder: Path) -> Iterator[int]:
    port = free_port()
    folder.chmod(0o755)
    command = proxy(port, behind, folder)
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            end = time.monotonic() + SECONDS
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                failed = process.poll() is not None or time.monotonic() > end
                assert not failed, (folder / "output").read_text()
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
            process.kill()
            process.wait()


def get(sock: socket.socket, target: str) -> bytes:
    """The body of the reply on a connection that stays open."""
    sock.sendall(f"GET {target} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(sock)
    start, _, body = data.partition(b"\r\n\r\n")
    lines = (line.partition(b":") for line in start.lower().split(b"\r\n"))
    length = next(int(value) for name, _, value in lines if name == b"content-length")
    while len(body) < length:
        body += received(sock)
    return body


def received(sock: socket.socket) -> bytes:
    data = sock.recv(1 << 16)
    if not data:
        raise ConnectionError("closed")
    return data


@pytest.mark.slow
@pytest.mark.parametrize("proxy", [nginx, haproxy, apache2, varnishd], ids=lambda proxy: proxy.__name__)
def test_no_request_is_smuggled_through_a_proxy(
    proxy: Callable[[int, int, Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/usr/sbin")
    if shutil.which(proxy.__name__) is None:
        pytest.skip(f"NOT TESTED: {proxy.__name__} is not installed")
    foreign: list[tuple[str, bytes]] = []
    checked = [0] * INNOCENT
    done = threading.Event()

    def innocent(which: int, port: int) -> None:
        while not done.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as sock:
                for number in range(50):
                    target = f"/innocent/{which}/{number}"
                    reply = get(sock, target)
                    checked[which] += 1
                    if reply.startswith(b"<"):
                        break  # the proxy's own error page: the listener refused an attack on a shared connection
                    if reply != f"GET {target}".encode():
                        foreign.append((target, reply))

    every = attacks()

    def attacker(which: int, port: int) -> None:
        for data in every[which::ATTACKERS]:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=WAIT) as sock:
                sock.sendall(data + PROBE)
                while sock.recv(1 << 16):
                    pass

    with serving(Recorder()) as behind, proxied(proxy, behind, tmp_path) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as sock:
            assert b"denied" not in get(sock, "/denied")
        clients = [threading.Thread(target=innocent, args=(n, port)) for n in range(INNOCENT)]
        attackers = [threading.Thread(target=attacker, args=(n, port)) for n in range(ATTACKERS)]
        for thread in (*clients, *attackers):
            thread.start()
        for thread in attackers:
            thread.join()
        done.set()
        for thread in clients:
            thread.join()
        found = executed(behind)
    assert [each for each in found if each.split()[1].startswith("/denied")] == []
    assert foreign == []
    assert min(checked) > 0
    assert sum("/denied" in each for each in found) > 20, "attacks that the proxy forwards as bodies"
    print(f"{proxy.__name__}: {len(every)} attacks, {len(found)} requests executed, {sum(checked)} innocent replies")
