"""An OpenAI-compatible upstream that costs almost nothing: ``python -m tests.benchmarks.fake_openai
PORT``. It streams ``max_tokens`` words without delay, or returns them at once.
"""

import asyncio
import json
import re
import sys

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_OK = "HTTP/1.1 200 OK\r\n"
_IDENTITY = '"id":"chatcmpl-1","created":1700000000,"model":"fake"'


def _chunk(choice: str, usage: str = "null") -> bytes:
    body = f'data: {{{_IDENTITY},"object":"chat.completion.chunk","choices":[{choice}],'
    return f'{body}"usage":{usage}}}\n\n'.encode()


def _usage(count: int) -> str:
    return f'{{"prompt_tokens":8,"completion_tokens":{count},"total_tokens":{count + 8}}}'


def _delta(delta: str, reason: str) -> str:
    return f'{{"index":0,"delta":{delta},"finish_reason":{reason}}}'


def whole(count: int) -> bytes:
    message = f'{{"role":"assistant","content":"{"tok " * count}"}}'
    choice = f'{{"index":0,"message":{message},"finish_reason":"length"}}'
    body = (
        f'{{{_IDENTITY},"object":"chat.completion","choices":[{choice}],"usage":{_usage(count)}}}'
    )
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


def streamed(count: int) -> list[bytes]:
    """The head, each token, and the end; as separate writes."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    first = _chunk(_delta('{"role":"assistant","content":""}', "null"))
    token = _chunk(_delta('{"content":"tok "}', "null"))
    last = _chunk(_delta("{}", '"length"')) + _chunk("", _usage(count)) + b"data: [DONE]\n\n"
    framed = [b"%x\r\n%b\r\n" % (len(part), part) for part in (first, token, last)]
    return [head + framed[0], *[framed[1]] * count, framed[2] + b"0\r\n\r\n"]


class _Upstream(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._buffer, 0, end)
        size = int(length[1]) if length else 0
        if len(self._buffer) < end + 4 + size:
            return
        body = json.loads(self._buffer[end + 4 : end + 4 + size] or b"{}")
        del self._buffer[: end + 4 + size]
        count = body.get("max_tokens") or body.get("max_completion_tokens") or 1
        if body.get("stream"):
            for part in streamed(count):
                self._transport.write(part)
        else:
            self._transport.write(whole(count))


async def main(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Upstream, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
