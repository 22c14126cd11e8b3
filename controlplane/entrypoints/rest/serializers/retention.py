"""How long what is kept."""

from typing import Any

from rest_framework import serializers

from controlplane.domain.retention import KINDS
from controlplane.entrypoints.rest.fields import Integer, Order


class RetentionSerializer(serializers.Serializer[Any]):
    """Events and totals of usage are kept for ever, and have no policy."""

    kind = serializers.ChoiceField(KINDS)
    days = serializers.IntegerField(allow_null=True, help_text="null: for ever.")
    default_days = serializers.IntegerField()
    goes = serializers.BooleanField(
        help_text="False while requests stay, since ENGINE_ARCHIVE names no place for them."
    )
    removed_upto = serializers.IntegerField(
        help_text="Position of the last request that lies in an archive now."
    )


class RetentionOrder(Order):
    days = Integer(allow_null=True, help_text="1 to 36500; null: for ever.")
