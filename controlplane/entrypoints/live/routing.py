"""Every websocket address of the web process. A test fails on one without an access rule."""

from typing import Any

from channels.routing import URLRouter
from channels.sessions import SessionMiddlewareStack
from django.urls import URLPattern, path, re_path

from controlplane.entrypoints.live.consumer import LiveConsumer
from controlplane.entrypoints.live.hub import Hub


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Any other address: closed before it is accepted, which a client sees as 403."""
    await send({"type": "websocket.close", "code": 1008})


def patterns(hub: Hub) -> list[URLPattern]:
    return [
        path("ws/live", LiveConsumer.as_asgi(hub=hub)),
        re_path("", refuse),  # type: ignore[arg-type]  # Channels takes ASGI applications here
    ]


def application(hub: Hub) -> Any:
    """The ASGI application for websockets; the session's cookie is read on the way in."""
    return SessionMiddlewareStack(URLRouter(patterns(hub)))
