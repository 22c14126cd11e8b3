"""The gateway's ASGI application: exact routes, default-deny, every error in one envelope.

A route is chosen by the decoded path, character by character: ``/V1/models``, ``//v1/models`` and
``/v1/../admin`` are simply other paths and not found. ``RULES`` says who may call what: probes are
open, everything else asks for a token before it reads a body. ``/metrics`` counts every tenant's
tokens on the port that all of them reach, so it asks for a token too.
"""

from collections.abc import Awaitable, Callable, Sequence

import msgspec
import structlog

from controlplane.application.refused import Refused
from controlplane.domain.policy import OPEN, READ, USE_MODEL, Rule
from controlplane.entrypoints.openai.handlers import Inference, limit_headers
from controlplane.entrypoints.openai.metrics import CONTENT_TYPE, GatewayMetrics
from controlplane.entrypoints.openai.model_list import Models
from controlplane.entrypoints.openai.orders import new_request_id
from controlplane.entrypoints.openai.request import (
    ClientGone,
    Message,
    Receive,
    Request,
    Scope,
    Send,
    host_is_allowed,
)
from controlplane.entrypoints.openai.websocket import PATH as WEBSOCKET_PATH
from controlplane.entrypoints.openai.websocket import WebSockets

MODEL_PREFIX = "/v1/models/"
PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-allow-headers", b"*, authorization, content-type"),
    (b"access-control-max-age", b"86400"),
]

MAX_MODEL_CHARS = 255

# Every path, and what its caller must be allowed; a path without a rule is not served.
RULES: dict[str, Rule | None] = {
    "/v1/chat/completions": USE_MODEL,
    "/v1/completions": USE_MODEL,
    "/v1/embeddings": USE_MODEL,
    "/v1/models": USE_MODEL,
    MODEL_PREFIX: USE_MODEL,
    WEBSOCKET_PATH: USE_MODEL,
    "/health": OPEN,
    "/livez": OPEN,
    "/readyz": OPEN,
    "/metrics": Rule(READ, "system"),
}

Endpoint = Callable[[Request], Awaitable[None]]
Health = Callable[[], dict[str, str]]

log = structlog.get_logger("gateway")


class MethodNotAllowed(Refused):
    """``allowed`` is for the Allow header, which such an answer must have (RFC 9110, 15.5.6)."""

    def __init__(self, allowed: str) -> None:
        super().__init__("method_not_allowed", f"This path takes {allowed}.")
        self.allowed = allowed


class GatewayApp:
    """``readiness`` gives what is wrong by part; empty when ready."""

    def __init__(
        self,
        inference: Inference,
        models: Models,
        websockets: WebSockets,
        metrics: GatewayMetrics,
        readiness: Health,
        allowed_hosts: Sequence[str],
    ) -> None:
        self._models, self._websockets, self._metrics = models, websockets, metrics
        self._authenticator = inference.authenticator
        self._readiness, self._allowed_hosts = readiness, allowed_hosts
        self._routes: dict[str, dict[str, Endpoint]] = {
            "/v1/chat/completions": {"POST": inference.chat},
            "/v1/completions": {"POST": inference.completions},
            "/v1/embeddings": {"POST": inference.embeddings},
            "/v1/models": {"GET": models.list},
            "/health": {"GET": self._alive},
            "/livez": {"GET": self._alive},
            "/readyz": {"GET": self._ready},
            "/metrics": {"GET": self._metrics_text},
        }
        without = self._routes.keys() - RULES.keys()
        if without:
            raise ValueError(f"paths without a rule: {sorted(without)}")

    @property
    def paths(self) -> list[str]:
        return [*self._routes, MODEL_PREFIX, WEBSOCKET_PATH]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(Request(scope, receive, send, new_request_id()))
        elif scope["type"] == "websocket":
            await self._websockets.serve(scope, receive, send, self._allowed_hosts)
        else:
            await _lifespan(receive, send)

    async def _http(self, request: Request) -> None:
        try:
            await self._route(request)
        except MethodNotAllowed as error:
            await self._refuse(request, error, [(b"allow", error.allowed.encode())])
        except Refused as error:
            await self._refuse(request, error)
        except ClientGone:
            return
        except Exception:
            log.exception("request failed", request_id=request.request_id, path=request.path[:200])
            text = "The gateway failed; the request id names the case."
            await self._refuse(request, Refused("internal_error", text))

    async def _refuse(
        self, request: Request, error: Refused, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        self._metrics.refused(error.code)
        if not request.started:
            await request.refuse(error, [*limit_headers(error.limits), *headers])

    async def _route(self, request: Request) -> None:
        if request.has_repeated_header:
            raise Refused("repeated_header", "A header that must be single is repeated.")
        if not host_is_allowed(request.headers.get(b"host", b""), self._allowed_hosts):
            raise Refused("bad_host", "The Host header names no host of this service.")
        if request.method == "OPTIONS":
            await request.respond(204, b"", PREFLIGHT)
            return
        methods = self._routes.get(request.path)
        if methods is None:
            await self._model_route(request)
        elif request.method in methods:
            await methods[request.method](request)
        else:
            raise MethodNotAllowed(", ".join(methods))

    async def _model_route(self, request: Request) -> None:
        name = request.path.removeprefix(MODEL_PREFIX)
        if request.path == WEBSOCKET_PATH:
            raise Refused("upgrade_required", "This path takes a websocket handshake, version 13.")
        if name == request.path or not 1 <= len(name) <= MAX_MODEL_CHARS:
            raise Refused("not_found", "There is no such path.")
        if request.method != "GET":
            raise MethodNotAllowed("GET")
        await self._models.get(request, name)

    # --- open endpoints -------------------------------------------------------------------------
    async def _alive(self, request: Request) -> None:
        await request.respond(200, b'{"status":"ok"}')

    async def _ready(self, request: Request) -> None:
        wrong = self._readiness()
        body = msgspec.json.encode({"status": "not ready" if wrong else "ok", "wrong": wrong})
        await request.respond(503 if wrong else 200, body)

    async def _metrics_text(self, request: Request) -> None:
        header, rule = request.headers.get(b"authorization"), RULES["/metrics"]
        assert rule is not None
        await self._authenticator.from_header(header, rule)
        text = self._metrics.exposition()
        await request.respond(200, text, content_type=(b"content-type", CONTENT_TYPE))


async def _lifespan(receive: Receive, send: Send) -> None:
    """The process starts and stops the gateway itself; this only says yes."""
    message: Message = {}
    while message.get("type") != "lifespan.shutdown":
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
