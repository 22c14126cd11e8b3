"""JSON out: compact, UTF-8, and no NaN, which is not JSON."""

from collections.abc import Mapping
from typing import Any

import msgspec
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.renderers import BaseRenderer

_encoder = msgspec.json.Encoder()


class JSONRenderer(BaseRenderer):
    """Serves every ``Accept`` header: there is nothing else to choose from."""

    media_type = "application/json"
    format = "json"
    charset = None

    def render(
        self,
        data: Any,
        accepted_media_type: str | None = None,
        renderer_context: Mapping[str, Any] | None = None,
    ) -> bytes:
        return b"" if data is None else _encoder.encode(data)


class AnyAccept(DefaultContentNegotiation):
    """Answer in JSON whatever ``Accept`` says: a refusal must reach a client that sent none."""

    def select_renderer(self, request: Any, renderers: Any, format_suffix: Any = None) -> Any:
        return renderers[0], renderers[0].media_type
