import socket
import threading

import pytest

from plaudit.errors import ReceiverLost
from plaudit.place.workers.callback import CallbackListener, dial


def test_only_a_connection_with_the_token_is_admitted() -> None:
    listener = CallbackListener("127.0.0.1")
    wrong = dial(listener.address, b"x" * 32)
    short = socket.create_connection(listener.address)
    short.sendall(listener.token[:31])
    short.close()
    right = dial(listener.address, listener.token)
    with listener.admit("a worker", 30) as connection:
        right.sendall(b"hello")
        assert connection.recv(5) == b"hello"
    assert wrong.recv(1) == b"", "it was sent away"
    with pytest.raises(OSError, match="refused"):
        dial(listener.address, listener.token)
    wrong.close()
    right.close()


def test_admit_fails_at_the_timeout() -> None:
    listener = CallbackListener("127.0.0.1")
    with pytest.raises(ReceiverLost, match=r"a worker did not connect to 127\.0\.0\.1:\d+ within 0.2 s"):
        listener.admit("a worker", 0.2)


def test_each_listener_has_its_own_token() -> None:
    listeners = [CallbackListener("127.0.0.1") for _ in range(2)]
    errors: list[Exception] = []

    def admit() -> None:
        try:
            listeners[1].admit("a worker", 0.5)
        except ReceiverLost as error:
            errors.append(error)

    thread = threading.Thread(target=admit)
    thread.start()
    with dial(listeners[1].address, listeners[0].token):
        thread.join(30)
    listeners[0].close()
    assert errors
