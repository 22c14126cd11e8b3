"""Clients that say nothing, or not enough, and wait to be shown out.

They begin with the stack, so that the other tests run while they wait; whoever asks for a result
waits for the rest.
"""

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect


class Idlers:
    """Each result is what was received and after how many seconds it was over."""

    def __init__(self, port: int) -> None:
        self._port = port
        pool = ThreadPoolExecutor(2)
        self.half_head: Future[tuple[bytes, float]] = pool.submit(self._half_head)
        self.silent_websocket: Future[tuple[int, float]] = pool.submit(self._silent_websocket)
        pool.shutdown(wait=False)

    def _half_head(self) -> tuple[bytes, float]:
        """Never finishes its headers; the bytes of the answer."""
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", self._port), timeout=30) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: ")
            return raw.recv(65536), time.monotonic() - began

    def _silent_websocket(self) -> tuple[int, float]:
        """Never authenticates; the close code."""
        began = time.monotonic()
        with connect(f"ws://127.0.0.1:{self._port}/ws/v1/stream", proxy=None) as client:
            try:
                while True:
                    client.recv(timeout=30)
            except ConnectionClosed as closed:
                assert closed.rcvd is not None
                return closed.rcvd.code, time.monotonic() - began
