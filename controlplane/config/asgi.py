"""The web process as one ASGI application: HTTP to Django, websockets to Channels."""

import os
from typing import Any

from django.core.asgi import get_asgi_application


def application() -> Any:
    """Imports only after ``get_asgi_application`` has loaded the apps, whose models they need."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
    http = get_asgi_application()

    from channels.routing import ProtocolTypeRouter
    from django.conf import settings

    from controlplane.entrypoints.live import routing
    from controlplane.entrypoints.live.hub import process_hub
    from controlplane.entrypoints.rest.edge import EdgeGuard

    hub = process_hub()
    router = ProtocolTypeRouter({"http": http, "websocket": routing.application(hub)})

    async def hearing(scope: Any, receive: Any, send: Any) -> None:
        hub.hear()  # needs the running loop, which there is from the first request on
        await router(scope, receive, send)

    return EdgeGuard(hearing, settings.ALLOWED_HOSTS)


web = application()
