"""Plain HTTP for what a proper client would never send, and a reader of server-sent events."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

CLIENT = httpx.Client(verify=False, timeout=30)
HELLO = [{"role": "user", "content": "Hello"}]


def post(
    stack: Any,
    path: str,
    body: Any = None,
    *,
    key: str = "",
    content: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """POST to the gateway; ``content`` is sent as it is, ``body`` as JSON."""
    sent = {"Content-Type": "application/json"}
    if key:
        sent["Authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode() if content is None else content
    return CLIENT.post(stack.gateway.url + path, content=data, headers=sent | (headers or {}))


def events(text: str) -> list[Any]:
    """The data of each server-sent event; ``"[DONE]"`` stays a string."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def stream(stack: Any, key: str, path: str, body: dict[str, Any]) -> list[Any]:
    answer = post(stack, path, body | {"stream": True}, key=key)
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def deltas(chunks: list[Any]) -> Iterator[dict[str, Any]]:
    for chunk in chunks:
        if chunk != "[DONE]":
            yield from (choice["delta"] for choice in chunk["choices"])
