"""Shapes that many endpoints share. Times are Unix seconds (UTC), memory is in bytes."""

from typing import Any

from rest_framework import serializers

from controlplane.entrypoints.rest.fields import (
    Query,
    QueryInteger,
    Text,
    limit_field,
    position_field,
)


class FieldErrorSerializer(serializers.Serializer[Any]):
    pointer = serializers.CharField(help_text="JSON pointer into the body.")
    detail = serializers.CharField()
    code = serializers.CharField()


class ProblemSerializer(serializers.Serializer[Any]):
    """RFC 9457, with a stable code."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    code = serializers.CharField()
    detail = serializers.CharField()
    request_id = serializers.CharField()
    errors = FieldErrorSerializer(many=True)  # type: ignore[assignment]  # hides DRF's own


class WouldBeEventSerializer(serializers.Serializer[Any]):
    type = serializers.CharField()
    data = serializers.DictField()  # type: ignore[assignment]  # hides DRF's own


class ReceiptSerializer(serializers.Serializer[Any]):
    """What a write did. ``position`` is in ``X-Log-Position``; read with ``?min_position=`` of it.

    With ``?dry_run=true`` nothing was done and ``events`` is what would have been appended.
    """

    id = serializers.CharField()
    version = serializers.IntegerField(help_text="Of the aggregate; send it as If-Match.")
    changed = serializers.BooleanField(help_text="False if it was so already.")
    dry_run = serializers.BooleanField()
    events = WouldBeEventSerializer(many=True)


def as_of_field() -> Text:
    return Text(
        required=False,
        max_length=40,
        help_text="Time travel: a log position, or an ISO 8601 time with its offset.",
    )


class ReadQuery(Query):
    """Every read of the read model can wait for a position, or go back to one."""

    min_position = position_field(
        code="invalid_position", help_text="Wait up to 2 s until the read model is here."
    )
    as_of = as_of_field()


class ListQuery(ReadQuery):
    limit = limit_field()
    offset = QueryInteger("invalid_offset", 0, 1_000_000, required=False, default=0)
