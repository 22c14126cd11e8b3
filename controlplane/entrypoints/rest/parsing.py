"""Bodies: JSON (strict) everywhere, YAML for ``apply/``, nothing else; 1 MiB at most."""

from collections.abc import Mapping
from typing import IO, Any

from rest_framework.parsers import BaseParser

from controlplane.application import strict_json
from controlplane.entrypoints.rest.problems import Problem

MAX_BODY_BYTES = 1024 * 1024


def read_capped(stream: IO[bytes]) -> bytes:
    """The whole body; raises Problem 413 past the limit, whatever Content-Length claims."""
    body = stream.read(MAX_BODY_BYTES + 1)
    if len(body) > MAX_BODY_BYTES:
        raise Problem(413, "body_too_large", f"A body has at most {MAX_BODY_BYTES >> 20} MiB.")
    return body


class StrictJSONParser(BaseParser):
    media_type = "application/json"

    def parse(
        self,
        stream: IO[bytes],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        return strict_json.parse(read_capped(stream))


class YamlTextParser(BaseParser):
    """Hands the text on; ``application.catalog_file`` reads YAML and JSON alike."""

    media_type = "application/yaml"

    def parse(
        self,
        stream: IO[bytes],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            return read_capped(stream).decode("utf-8")
        except UnicodeDecodeError:
            raise Problem(400, "invalid_unicode", "The body is not UTF-8.") from None


class CatalogJSONParser(YamlTextParser):
    """JSON for ``apply/``: checked as strictly as any JSON, then handed on as text."""

    media_type = "application/json"

    def parse(
        self,
        stream: IO[bytes],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        body = read_capped(stream)
        strict_json.parse(body)
        return body.decode("utf-8")
