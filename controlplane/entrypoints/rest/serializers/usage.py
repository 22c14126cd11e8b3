"""Usage and the check that it is right."""

from typing import Any

from rest_framework import serializers

from controlplane.entrypoints.rest.fields import Query, QueryInteger, Text, limit_field


class UsageQuery(Query):
    group_by = Text(
        required=False,
        help_text="Some of tenant, key, user, model, version, route, arm, hour, day: with commas.",
    )
    since = Text(required=False, help_text="ISO 8601, rounded down to the hour; included.")
    until = Text(required=False, help_text="Likewise; not included.")
    tenant = Text(required=False)
    key = Text(required=False, help_text="Key id, jwt:<sub> or user:<name>.")
    user = Text(required=False, help_text="The user that requests named.")
    model = Text(required=False)
    version = Text(required=False, help_text="A version id, as smollm2@v1.")
    route = Text(required=False)
    arm = Text(required=False)
    limit = limit_field()
    offset = QueryInteger("invalid_cursor", 0, 10**9, required=False, default=0)


class UsageSums(serializers.Serializer[Any]):
    num_requests = serializers.IntegerField()
    num_failed = serializers.IntegerField(help_text="Ended as error, timeout or unknown.")
    num_prompt_tokens = serializers.IntegerField()
    num_cached_tokens = serializers.IntegerField(help_text="Of the prompt's.")
    num_output_tokens = serializers.IntegerField()
    price = serializers.CharField(help_text="Exactly.")


class UsageGroupSerializer(UsageSums):
    group = serializers.DictField(child=serializers.CharField(), help_text="By name, as asked.")


class UsageSerializer(serializers.Serializer[Any]):
    """Sums of the terminal records up to ``position``."""

    position = serializers.IntegerField(help_text="Of the last record that is in these sums.")
    behind = serializers.IntegerField(help_text="Records that are not in them yet.")
    since = serializers.CharField(allow_null=True)
    until = serializers.CharField(allow_null=True)
    count = serializers.IntegerField(help_text="Of groups.")
    total = UsageSums(help_text="Of all groups, also of those on other pages.")
    results = UsageGroupSerializer(many=True)


class UsageCheckSerializer(serializers.Serializer[Any]):
    """All totals, recounted from the records."""

    at = serializers.FloatField()
    position = serializers.IntegerField()
    num_records = serializers.IntegerField()
    num_totals = serializers.IntegerField()
    num_differences = serializers.IntegerField()
    differences = serializers.ListField(child=serializers.CharField(), help_text="At most 20.")
    seconds = serializers.FloatField()


class LastCheckSerializer(serializers.Serializer[Any]):
    last = UsageCheckSerializer(allow_null=True)
