"""The lines that are cut: silent in each direction, and whole again afterwards."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.crash.links import Drops, Links

SILENCE_S = 0.4


def means() -> list[bool]:
    """Bytes held back, which any machine can do; and packets dropped, where they can be."""
    drops = Drops()
    if not drops.open():
        return [False]
    drops.close()
    return [False, True]


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that says again whatever it hears."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer, args=(server,), daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def _answer(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed: the test is over
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(1024):
                    connection.sendall(data)


def is_silent(line: socket.socket) -> bool:
    """Neither bytes nor an end."""
    line.settimeout(SILENCE_S)
    try:
        line.recv(16)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("direction", ["up", "down", "both"])
@pytest.mark.parametrize("may_drop", means())
def test_a_cut_is_silent_and_what_was_said_comes_after_it(
    echo: int, direction: str, may_drop: bool
) -> None:
    """No error, no end, no answer; the other agent's line is as before; healed, nothing is lost."""
    with Links(2, lambda: echo, may_drop) as links:
        first = socket.create_connection(("127.0.1.1", links.port), 5)
        second = socket.create_connection(("127.0.1.2", links.port), 5)
        with first, second:
            first.sendall(b"a")
            assert first.recv(16) == b"a"
            links.cut(1, direction)
            first.sendall(b"b")
            assert is_silent(first)
            links.heal()
            first.settimeout(5)
            assert first.recv(16) == b"b"
            first.shutdown(socket.SHUT_WR)
            assert first.recv(16) == b""
            links.cut(1, "both")
            second.sendall(b"c")
            second.settimeout(5)
            assert second.recv(16) == b"c"
