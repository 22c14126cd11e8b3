"""The outermost layer of the web process: what Django would only see too late, or never.

A request is refused here by its head alone (method, Host, number and size of headers, encoding),
and its body is counted while it comes, whatever Content-Length claims. The server in front has its
own cap, since Daphne reads a whole body before it calls any application.
"""

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from django.http.request import split_domain_port, validate_host

from controlplane.entrypoints.rest.parsing import MAX_BODY_BYTES
from controlplane.entrypoints.rest.problems import PROBLEM_TYPE, problem_body

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Refusal = tuple[int, str, str]

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
MAX_PATH_BYTES = 4096


class BodyTooLarge(Exception):
    """More came than a body may have."""


class EdgeGuard:
    """An ASGI application around another one; ``hosts`` are the names served here."""

    def __init__(self, application: Application, hosts: list[str]) -> None:
        self._application, self._hosts = application, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._application(scope, receive, send)
        refusal = self.judge(scope)
        if refusal is None and scope["type"] == "http":
            return await self._serve(scope, receive, send)
        if refusal is None:
            return await self._application(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        await answer(send, refusal)

    def judge(self, scope: Scope) -> Refusal | None:
        """Why the request is refused unread, or None."""
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            return 431, "headers_too_large", f"At most {MAX_HEADERS} headers of {MAX_HEADER_BYTES}."
        if scope["type"] == "http" and scope["method"] not in METHODS:
            return 405, "method_not_allowed", "This method is not served."
        if len(scope.get("raw_path") or b"") > MAX_PATH_BYTES or "\x00" in scope["path"]:
            return 400, "bad_path", "This address is not well formed."
        if not self._known_host([value for name, value in headers if name == b"host"]):
            return 400, "bad_host", "This host name is not served here."
        return None

    def _known_host(self, values: list[bytes]) -> bool:
        if len(values) != 1:
            return False
        domain, _ = split_domain_port(values[0].decode("latin-1"))
        return bool(domain) and validate_host(domain, self._hosts)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body; an exception nobody foresaw is a logged 500 in the API's own form."""
        num_bytes, started = 0, False

        async def counted() -> dict[str, Any]:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise BodyTooLarge
            return message

        async def noted(message: dict[str, Any]) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._application(scope, counted, noted)
        except BodyTooLarge:
            await answer(send, TOO_LARGE)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            await answer(send, (500, "internal_error", "Something failed; it is logged."))


TOO_LARGE: Refusal = (413, "body_too_large", f"A body has at most {MAX_BODY_BYTES >> 20} MiB.")


async def answer(send: Send, refusal: Refusal) -> None:
    status, code, detail = refusal
    headers = [
        (b"content-type", PROBLEM_TYPE.encode()),
        (b"connection", b"close"),
        (b"x-content-type-options", b"nosniff"),
    ]
    body = msgspec.json.encode(problem_body(status, code, detail))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
