"""Servers of the S3 protocol: moto's, a line to it that can be cut, and one that lies.

::

    store  <---  Line (counts bytes, ends after so many)  <---  moto
    store  <---  Liar (lists what no honest server would)
"""

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

import httpx
from moto.server import ThreadedMotoServer

KEY, SECRET = "AKIDEXAMPLE0KEY", "example/secret+of+nobody"
SIGNED = {  # as far as this server looks
    "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
}


class Server:
    """Moto's, with one bucket named ``models``, and what a test puts into it."""

    def __init__(self) -> None:
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._moto.start()
        host, port = self._moto.get_host_and_port()
        self.address = host, port
        self.url = f"http://{host}:{port}"

    def stop(self) -> None:
        self._moto.stop()

    def reset(self) -> None:
        self.is_open_to_all(True)
        httpx.post(f"{self.url}/moto-api/reset").raise_for_status()
        self._asked("PUT", "/models", b"")

    def put(self, prefix: str, files: Mapping[str, bytes], is_public: bool = False) -> None:
        """Store objects, which without ``is_public`` are given to nobody without a signature."""
        for name, content in files.items():
            key = f"{prefix}/{name}".lstrip("/")
            acl = "public-read" if is_public else "private"
            self._asked("PUT", f"/models/{key}", content, {**SIGNED, "x-amz-acl": acl})

    def is_open_to_all(self, value: bool) -> None:
        """Whether a request needs no key that the server knows."""
        body = b"inf" if value else b"0"
        httpx.post(f"{self.url}/moto-api/reset-auth", content=body).raise_for_status()

    def _asked(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] = SIGNED
    ) -> None:
        answer = httpx.request(method, self.url + path, content=body, headers=headers, timeout=60)
        answer.raise_for_status()


class Line:
    """A port before a server: counts what the server says, and is dead after ``limit`` bytes."""

    def __init__(self, server: tuple[str, int], limit: float = float("inf")) -> None:
        self._server, self._limit, self.num_bytes = server, limit, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                if self.num_bytes >= self._limit:
                    ours.close()
                    continue
                theirs = socket.create_connection(self._server)
                for pair, counts in (((ours, theirs), False), ((theirs, ours), True)):
                    args = (*pair, counts)
                    threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counts:
                    data = data[: max(0, int(min(self._limit - self.num_bytes, len(data))))]
                    self.num_bytes += len(data)
                if not data:
                    break
                target.sendall(data)
        for one in (source, target):  # what waits in the other direction is to end too
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class Liar(BaseHTTPRequestHandler):
    """Lists ``objects`` (key -> bytes it claims), and gives 3 bytes of each."""

    objects: Mapping[str, int]
    etag = "&quot;tag&quot;"

    def do_GET(self) -> None:
        listing = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>{self.etag}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size in self.objects.items()
        )
        is_listing = "list-type" in self.path
        text = f"<ListBucketResult>{listing}<IsTruncated>false</IsTruncated></ListBucketResult>"
        body = text.encode() if is_listing else b"abc"
        self.send_response(200)
        for name, value in {
            "ETag": '"tag"',
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        }.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@contextmanager
def liar(objects: Mapping[str, int]) -> Iterator[str]:
    handler = type("Handler", (Liar,), {"objects": objects})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def environment(url: str, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """What an agent is given to read a bucket with."""
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret} if key else {}
    return {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1", **keys}


def aws_names() -> list[str]:
    return [name for name in os.environ if name.startswith("AWS_")]
