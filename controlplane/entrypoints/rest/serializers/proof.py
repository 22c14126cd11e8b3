"""Checkpoints, proofs, verifications, and the manifest of an export. Hashes are hex."""

from typing import Any

from rest_framework import serializers

from controlplane.application.records import LOGS
from controlplane.entrypoints.rest.fields import (
    Choice,
    Query,
    QueryInteger,
    Text,
    limit_field,
    position_field,
)

_HASHES = serializers.ListField(child=serializers.CharField())
_MAX = 2**63 - 1


class CheckpointSerializer(serializers.Serializer[Any]):
    """A signed checkpoint of a log: its size and Merkle root at a time."""

    log = serializers.ChoiceField(LOGS)
    size = serializers.IntegerField(help_text="Records it covers, from the first.")
    first = serializers.IntegerField(help_text="First position of the segment that it adds.")
    root = serializers.CharField(help_text="RFC 6962 root over all of them.")  # type: ignore[assignment]  # DRF's own
    at = serializers.FloatField()
    record = serializers.CharField(help_text="The shape of the segment's records.")
    note = serializers.CharField(help_text="C2SP signed note, to be checked with a public key.")


class CheckpointQuery(Query):
    log = Choice(LOGS, required=False, help_text="Both, if it is left out.")
    after = position_field(help_text="Sizes beyond this one (below it with order=desc).")
    order = Choice(("asc", "desc"), required=False, default="asc")
    limit = limit_field()


class SealingKeysSerializer(serializers.Serializer[Any]):
    keys = serializers.ListField(
        child=serializers.CharField(help_text="name+hash+base64, as Go's note package has it.")
    )


class NoQuery(Query):
    """Takes no parameters."""


class InclusionQuery(Query):
    log = Choice(LOGS, required=False, default="events")
    position = position_field(help_text="Of the record; or give request_id.")
    request_id = Text(required=False, help_text="With log=requests.")
    size = position_field(help_text="Of the tree; default: the newest checkpoint's.")


class InclusionSerializer(serializers.Serializer[Any]):
    """RFC 6962 audit path: from ``SHA-256(0x00 || record)`` to the root."""

    log = serializers.ChoiceField(LOGS)
    position = serializers.IntegerField(help_text="The leaf's index is one less.")
    size = serializers.IntegerField()
    record = serializers.CharField(help_text="The canonical bytes that the leaf hashes.")
    leaf = serializers.CharField()
    path = _HASHES
    root = serializers.CharField()  # type: ignore[assignment]  # DRF's own
    checkpoint = CheckpointSerializer(allow_null=True, help_text="Of that size, if there is one.")


class ConsistencyQuery(Query):
    log = Choice(LOGS, required=False, default="events")
    first = QueryInteger("invalid_size", 1, _MAX, help_text="The older size.")
    second = QueryInteger("invalid_size", 1, _MAX, required=False, help_text="Default: newest.")


class ConsistencySerializer(serializers.Serializer[Any]):
    """RFC 6962 consistency proof: the first tree is the beginning of the second."""

    log = serializers.ChoiceField(LOGS)
    first = serializers.IntegerField()
    second = serializers.IntegerField()
    first_root = serializers.CharField()
    second_root = serializers.CharField()
    path = _HASHES


class FindingSerializer(serializers.Serializer[Any]):
    """The first thing found wrong."""

    log = serializers.CharField()
    position = serializers.IntegerField()
    record_id = serializers.CharField()
    check = serializers.CharField()
    detail = serializers.CharField()


class ProvedLogSerializer(serializers.Serializer[Any]):
    log = serializers.ChoiceField(LOGS)
    head = serializers.IntegerField()
    sealed = serializers.IntegerField()
    root = serializers.CharField()  # type: ignore[assignment]  # DRF's own
    num_checkpoints = serializers.IntegerField()
    checked = serializers.IntegerField()
    archives = serializers.ListField(child=serializers.CharField())


class VerificationSerializer(serializers.Serializer[Any]):
    """The last verification of everything stored; ``at`` null if there was none."""

    running = serializers.BooleanField(help_text="One runs in this process now.")
    at = serializers.FloatField(allow_null=True)
    actor = serializers.CharField(allow_null=True)
    intact = serializers.BooleanField(allow_null=True)
    logs = ProvedLogSerializer(many=True)
    finding = FindingSerializer(allow_null=True)
    seconds = serializers.FloatField(allow_null=True)
    records_per_second = serializers.FloatField(allow_null=True)


class ExportFiltersSerializer(serializers.Serializer[Any]):
    after = serializers.IntegerField()
    tenant = serializers.CharField(allow_null=True)
    types = serializers.ListField(child=serializers.CharField())
    since = serializers.FloatField(allow_null=True)
    until = serializers.FloatField(allow_null=True)


class ExportStartSerializer(serializers.Serializer[Any]):
    """The log's Merkle tree and hash chain where an export without filters starts."""

    size = serializers.IntegerField()
    peaks = _HASHES
    chain = serializers.CharField()


class ExportPartSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    rows = serializers.IntegerField()
    first_row = serializers.IntegerField()
    first_position = serializers.IntegerField()
    last_position = serializers.IntegerField()
    bytes = serializers.IntegerField()
    sha256 = serializers.CharField()


class ExportFileSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    sha256 = serializers.CharField()


class ManifestSerializer(serializers.Serializer[Any]):
    version = serializers.CharField(help_text="export/1")
    installation = serializers.CharField()
    log = serializers.ChoiceField(LOGS)
    format = serializers.CharField()
    filters = ExportFiltersSerializer()
    created_at = serializers.FloatField()
    upto = serializers.IntegerField(help_text="How far the log was looked through.")
    target = serializers.IntegerField(help_text="How far it was meant to be.")
    complete = serializers.BooleanField()
    rows = serializers.IntegerField()
    first_position = serializers.IntegerField(help_text="0 if there is no row.")
    last_position = serializers.IntegerField()
    root = serializers.CharField(help_text="RFC 6962 root over the rows' leaves.")  # type: ignore[assignment]  # DRF's own
    peaks = _HASHES
    start = ExportStartSerializer(allow_null=True)
    formula_safe = serializers.BooleanField(help_text="CSV text cells cannot run as formulas.")
    parts = ExportPartSerializer(many=True)
    files = ExportFileSerializer(many=True)


class SignedManifestSerializer(serializers.Serializer[Any]):
    """What an export holds, and the signed note over its root and its SHA-256."""

    manifest = ManifestSerializer()
    note = serializers.CharField()
