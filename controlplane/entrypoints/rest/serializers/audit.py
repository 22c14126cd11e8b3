"""The event log, the inference ledger and their export."""

from typing import Any

from rest_framework import serializers

from controlplane.adapters.export.formats import FORMATS
from controlplane.entrypoints.rest.fields import (
    Choice,
    Query,
    QueryNumber,
    Text,
    limit_field,
    position_field,
)
from controlplane.entrypoints.rest.serializers.common import ReceiptSerializer, as_of_field

AUDIT_OUTCOMES = ("done", "refused")
LATENCY_CLASSES = ("realtime", "standard", "batch")
OUTCOMES = ("running", "ok", "cancelled", "error", "timeout", "unknown")


class EventSerializer(serializers.Serializer[Any]):
    position = serializers.IntegerField()
    stream = serializers.CharField()
    version = serializers.IntegerField()
    type = serializers.CharField()
    data = serializers.DictField()  # type: ignore[assignment]  # hides DRF's own
    actor = serializers.CharField()
    reason = serializers.CharField()
    undoes = serializers.IntegerField(
        allow_null=True, help_text="Position of the event that this one takes back."
    )
    recorded_at = serializers.FloatField()
    hash = serializers.CharField(help_text="SHA-256(previous hash || record), hex.")


class AsOfQuery(Query):
    """For what is read from the log or the ledger itself, which is never behind."""

    as_of = as_of_field()


class EventQuery(AsOfQuery):
    after = position_field(help_text="Positions beyond this one (below it with order=desc).")
    limit = limit_field()
    stream = Text(required=False)
    type = Text(required=False)
    actor = Text(required=False)
    order = Choice(("asc", "desc"), required=False, default="asc")


class AuditEntrySerializer(serializers.Serializer[Any]):
    """One administrative order: who, from where, what it changed, or why it was refused."""

    position = serializers.IntegerField()
    at = serializers.FloatField()
    actor = serializers.CharField()
    address = serializers.CharField()
    action = serializers.CharField(help_text="The event's type, or the refused order's name.")
    target = serializers.CharField()
    outcome = serializers.ChoiceField(AUDIT_OUTCOMES)
    code = serializers.CharField(help_text="Why it was refused; empty if it was done.")
    detail = serializers.CharField()
    reason = serializers.CharField(help_text="What its author gave as the reason.")
    correlation_id = serializers.CharField(help_text="The request id, as in the logs.")
    before = serializers.DictField(
        help_text="By thing, the fields that changed; prices per million tokens."
    )
    after = serializers.DictField()
    asked = serializers.DictField(help_text="What a refused order asked for.")
    undoes = serializers.IntegerField(
        allow_null=True, help_text="Position of the event that it takes back."
    )


class AuditQuery(AsOfQuery):
    """Newest first; ``after`` continues from the last position of the page before."""

    q = Text(required=False, max_length=200, help_text="In any text of the entry.")
    actor = Text(required=False)
    action = Text(required=False)
    target = Text(required=False)
    outcome = Choice(AUDIT_OUTCOMES, required=False)
    code = Text(required=False)
    since = QueryNumber(required=False, help_text="Unix seconds.")
    until = QueryNumber(required=False, help_text="Unix seconds, not included.")
    min_position = position_field(
        code="invalid_position", help_text="Wait up to 2 s until the read model is here."
    )
    after = position_field()
    limit = limit_field()


class CommandSerializer(serializers.Serializer[Any]):
    type = serializers.CharField()
    data = serializers.DictField()  # type: ignore[assignment]  # hides DRF's own


class UndoneSerializer(ReceiptSerializer):
    """What taking an event back did, or with dry_run would do."""

    undoes = serializers.IntegerField()
    commands = CommandSerializer(many=True)


class RequestSerializer(serializers.Serializer[Any]):
    """One inference request: what was asked, and how it ended (null while it runs)."""

    request_id = serializers.CharField()
    id = serializers.IntegerField(help_text="In order of admission; send the last as after.")
    position = serializers.IntegerField(
        allow_null=True, help_text="In the ledger, in order of ending; null while it runs."
    )
    tenant_id = serializers.CharField()
    subject = serializers.CharField(help_text="Key id, jwt:<sub> or user:<name>.")
    end_user = serializers.CharField(help_text="The user that the request named, or empty.")
    endpoint = serializers.CharField()
    requested_model = serializers.CharField()
    route = serializers.CharField()
    arm = serializers.CharField()
    version_id = serializers.CharField()
    latency_class = serializers.ChoiceField(LATENCY_CLASSES)
    node_id = serializers.CharField(allow_null=True)
    replica_id = serializers.CharField(allow_null=True)
    num_prompt_tokens = serializers.IntegerField()
    num_cached_tokens = serializers.IntegerField(allow_null=True)
    num_output_tokens = serializers.IntegerField(allow_null=True)
    max_output_tokens = serializers.IntegerField()
    ttft_ms = serializers.FloatField(allow_null=True)
    queue_ms = serializers.FloatField(allow_null=True)
    duration_ms = serializers.FloatField(allow_null=True)
    outcome = serializers.ChoiceField(OUTCOMES)
    finish_reason = serializers.CharField(allow_null=True)
    error_code = serializers.CharField(allow_null=True)
    attempts = serializers.IntegerField(allow_null=True)
    price = serializers.CharField(allow_null=True, help_text="Of it all, exactly: 0.00015.")
    price_input = serializers.CharField(help_text="Of a million tokens, when it was admitted.")
    price_cached_input = serializers.CharField(help_text="Likewise.")
    price_output = serializers.CharField(help_text="Likewise.")
    started_at = serializers.FloatField()
    finished_at = serializers.FloatField(allow_null=True)


class AttemptSerializer(serializers.Serializer[Any]):
    """One try of one choice of a request on one replica."""

    choice = serializers.IntegerField()
    attempt = serializers.IntegerField(help_text="From 1, of that choice.")
    node_id = serializers.CharField()
    replica_id = serializers.CharField()
    outcome = serializers.ChoiceField(("ok", "cancelled", "error"))
    error_code = serializers.CharField()
    num_cached_tokens = serializers.IntegerField()
    num_output_tokens = serializers.IntegerField()
    queue_ms = serializers.FloatField(allow_null=True)
    started_at = serializers.FloatField()
    duration_ms = serializers.FloatField()


class RequestQuery(AsOfQuery):
    """Newest first; ``after`` continues from the last position of the page before."""

    request_id = Text(required=False)
    tenant = Text(required=False)
    model = Text(required=False, help_text="A version id, or the name that was asked for.")
    outcome = Choice(OUTCOMES, required=False)
    after = position_field()
    limit = limit_field()


class ExportQuery(Query):
    format = Choice(FORMATS, required=False, default="jsonl")
    what = Choice(("events", "requests"), required=False, default="events")
    after = position_field(default=0)
    upto = position_field()
    tenant = Text(required=False)
    type = Text(required=False, help_text="Event types, or endpoints of requests; with commas.")
    since = QueryNumber(required=False, help_text="Unix seconds, inclusive.")
    until = QueryNumber(required=False, help_text="Unix seconds, exclusive.")
    formula_safe = Choice(
        ("true", "false"),
        required=False,
        default="true",
        help_text="CSV: a ' before text that a spreadsheet would run; the manifest records it.",
    )
    manifest = Choice(
        ("true", "false"),
        required=False,
        default="false",
        help_text="Answer with the signed manifest of that file instead.",
    )
