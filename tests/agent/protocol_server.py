"""A server that speaks as vLLM's does, for what a real one cannot be made to do on demand.

Run as vLLM is: ``--uds PATH --behaviour NAME ...``; the rest is read past. Its next token is a
function of all tokens before it (``next_token``), so what it ought to say is known. Behaviours: ok,
slow (a tenth of a second a token), drop (the connection, after two tokens), error (500), garbage,
nonsense (a token below 0), aborts (at once), miscount (one token too few in ``usage``), silent (no
token ever), fails (ends before it is ready), mute (is never ready).
"""

import argparse
import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

BLOCK_SIZE = 128
NUM_BLOCKS = 64
EOS = 258
running: set[str] = set()
num_tokens = 0


def next_token(tokens: Sequence[int]) -> int:
    """A letter, or the end of the sequence after 'z'."""
    last = tokens[-1]
    return EOS if last == ord("z") - 33 else (7 * last + len(tokens)) % 26 + ord("a") - 33


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--behaviour", default="ok")
    return parser.parse_known_args()[0]


def event(value: Any) -> bytes:
    line = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
    return f"{len(line):x}\r\n".encode() + line + b"\r\n"


def logprobs(token: int, count: int | None) -> dict[str, Any] | None:
    if count is None:
        return None
    top = {f"token_id:{token + n}": -0.5 - n for n in range(count + 1)}
    return {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5], "top_logprobs": [top]}


async def completion(order: dict[str, Any], behaviour: str) -> AsyncIterator[bytes]:
    """The events of one request's answer."""
    global num_tokens
    tokens, produced, reason = list(order["prompt"]), 0, None
    while reason is None:
        if behaviour == "slow":
            await asyncio.sleep(0.1)
        if behaviour == "silent":
            await asyncio.sleep(3600)
        if behaviour == "drop" and produced == 2:
            return
        token = next_token(tokens)
        tokens.append(token)
        produced, num_tokens = produced + 1, num_tokens + 1
        is_stop = token in order["stop_token_ids"]
        reason = "stop" if is_stop else "length" if produced >= order["max_tokens"] else None
        token = -5 if behaviour == "nonsense" else token
        reason = "abort" if behaviour == "aborts" else reason
        choice = {"index": 0, "text": "?", "token_ids": [token], "finish_reason": reason}
        choice["logprobs"] = logprobs(token, order.get("logprobs"))
        yield event({"choices": [choice]})
        if behaviour == "garbage":
            yield event("{never JSON")
    details = {"cached_tokens": 2}
    counted = produced - (behaviour == "miscount")
    usage = {"prompt_tokens": len(order["prompt"]), "completion_tokens": counted}
    yield event({"choices": [], "usage": {**usage, "prompt_tokens_details": details}})
    yield event("[DONE]") + b"0\r\n\r\n"


def metrics() -> str:
    labels = '{engine="0"}'
    config = f'{{block_size="{BLOCK_SIZE}",num_gpu_blocks="{NUM_BLOCKS}"}}'
    return (
        f"vllm:num_requests_running{labels} {len(running)}\nvllm:num_requests_waiting{labels} 0\n"
        f"vllm:kv_cache_usage_perc{labels} {len(running) / NUM_BLOCKS}\n"
        f"vllm:generation_tokens_total{labels} {num_tokens}\n"
        f"vllm:num_preemptions_total{labels} 0\nvllm:cache_config_info{config} 1\n"
    )


def answer(status: int, body: str, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, behaviour: str) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
    if head.startswith("GET /health"):
        writer.write(answer(503 if behaviour == "mute" else 200, ""))
    elif head.startswith("GET /metrics"):
        writer.write(answer(200, metrics(), "text/plain"))
    elif fields["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
        writer.write(answer(401, '{"error": "Unauthorized"}'))
    else:
        order = json.loads(await reader.readexactly(int(fields["Content-Length"])))
        await stream(reader, writer, order, behaviour)
    writer.close()


async def stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, order: Any, behaviour: str
) -> None:
    """Until it has ended, or whoever asked for it hangs up."""
    if behaviour == "error":
        writer.write(answer(500, '{"error": {"message": "of prompt", "type": "Internal"}}'))
        return
    if order["temperature"] > 2:
        error = {"message": "of prompt", "type": "BadRequestError", "param": "temperature"}
        writer.write(answer(400, json.dumps({"error": error})))
        return
    name = os.urandom(8).hex()
    running.add(name)
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    telling = asyncio.create_task(tell(writer, order, behaviour))
    leaving = asyncio.create_task(reader.read())
    await asyncio.wait([telling, leaving], return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    leaving.cancel()
    running.discard(name)


async def tell(writer: asyncio.StreamWriter, order: Any, behaviour: str) -> None:
    async for part in completion(order, behaviour):
        writer.write(part)
        await writer.drain()


async def main() -> None:
    options = arguments()
    if options.behaviour == "fails":
        sys.exit("ValueError: no such model\nRuntimeError: Engine core initialization failed")
    assert stat.S_IMODE(os.stat(os.path.dirname(options.uds)).st_mode) == 0o700
    server = await asyncio.start_unix_server(
        lambda reader, writer: serve(reader, writer, options.behaviour), options.uds
    )
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
