"""When a server accepts connections, and what it does with those that have begun when it stops."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable

import pytest

from plaudit.config.serve import ListenTable
from plaudit.serve.http.address import begin_no_connection, listen

from .faults import Faults
from .process import ServerProcess

PATIENCE = 60.0


def until(what: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_loading_server_listens_at_once_and_answers_503() -> None:
    faults = Faults()
    faults.set("hold")  # the model does not get through its warm-up
    tree = {"models": {"sums": {"path": "sums"}}, "listen": "start"}
    with ServerProcess(tree, environment=faults.environment, wait=False) as server:
        until("listening", lambda: connects(server.port))
        assert server.http.get("/health/live").status_code == 200
        for path in ("/health/ready", "/v2/health/ready"):
            loading = server.http.get(path)
            assert (loading.status_code, loading.headers["retry-after"]) == (503, "1")
        refused = server.rewards([{"text": "1+2="}])
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["type"] == "not_ready"
        faults.clear()


def test_a_server_that_listens_when_ready_refuses_connections_before() -> None:
    tree = {"models": {"sums": {"path": "sums"}}, "listen": "ready"}
    with ServerProcess(tree, wait=False) as server:
        assert not connects(server.port)
        until("listening", lambda: connects(server.port))
        assert server.ready()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a socket filter")
def test_connections_that_have_begun_are_still_accepted_and_later_ones_refused() -> None:
    sock = listen(ListenTable(port=0))
    address = sock.getsockname()
    with socket.create_connection(address) as begun, socket.socket() as late:
        begin_no_connection(sock)
        late.setblocking(False)
        with pytest.raises(BlockingIOError):
            late.connect(address)
        sock.setblocking(True)
        accepted, peer = sock.accept()
        assert peer == begun.getsockname()
        accepted.sendall(b"hello")
        assert begun.recv(5) == b"hello"
        begun.sendall(b"bye")
        assert accepted.recv(3) == b"bye"
        sock.close()
        late.setblocking(True)
        late.settimeout(PATIENCE)
        end = time.monotonic() + PATIENCE
        error = 0
        while not error and time.monotonic() < end:
            time.sleep(0.1)
            error = late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        assert error  # refused: its SYN was sent again
        accepted.close()
