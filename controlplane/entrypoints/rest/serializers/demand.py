"""Replicas by load, forecasts, and loads ahead."""

from typing import Any

from rest_framework import serializers

from controlplane.entrypoints.rest.fields import Choice, Text, limit_field, position_field
from controlplane.entrypoints.rest.serializers.common import ListQuery, ReadQuery

CODES = (
    "woken", "queue", "kv_pressure", "ttft", "slack", "idle", "preload", "preload_over",
    "displaced",
)  # fmt: skip
METHODS = ("arima", "averages", "daytime")
OUTCOMES = ("hit", "wasted", "missed")


class ReadingSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    value = serializers.FloatField()


class ScalingSerializer(serializers.Serializer[Any]):
    """One change of a version's number of replicas; ``readings`` are what it was made from."""

    position = serializers.IntegerField()
    version_id = serializers.CharField()
    at = serializers.FloatField()
    before = serializers.IntegerField()
    after = serializers.IntegerField()
    code = serializers.ChoiceField(CODES)
    reason = serializers.CharField()
    readings = ReadingSerializer(many=True)
    until = serializers.FloatField(help_text="When a load ahead is judged; else 0.")


class ExpectedSerializer(serializers.Serializer[Any]):
    version_id = serializers.CharField()
    num_requests = serializers.FloatField()
    method = serializers.ChoiceField(METHODS)


class CameSerializer(serializers.Serializer[Any]):
    version_id = serializers.CharField()
    expected = serializers.FloatField()
    num_requests = serializers.IntegerField()


class ForecastSerializer(serializers.Serializer[Any]):
    """``came``: what the forecast before this one had expected, and what came."""

    position = serializers.IntegerField()
    at = serializers.FloatField()
    until = serializers.FloatField()
    expected = ExpectedSerializer(many=True)
    came = CameSerializer(many=True)


class PreloadSerializer(serializers.Serializer[Any]):
    """What became of a load ahead; ``missed``: a request had to wake the model."""

    position = serializers.IntegerField()
    version_id = serializers.CharField()
    at = serializers.FloatField()
    outcome = serializers.ChoiceField(OUTCOMES)
    loaded_at = serializers.FloatField(allow_null=True, help_text="Null for what was missed.")
    num_requests = serializers.IntegerField()
    ahead_s = serializers.FloatField(allow_null=True, help_text="Before the first request.")
    wasted_s = serializers.FloatField(help_text="Resident for nothing.")


class PreloadTotalSerializer(serializers.Serializer[Any]):
    version_id = serializers.CharField()
    num_hits = serializers.IntegerField()
    num_wasted = serializers.IntegerField()
    num_missed = serializers.IntegerField()
    ahead_s = serializers.FloatField()
    wasted_s = serializers.FloatField()


class ForecastQuery(ReadQuery):
    """Newest first; ``before`` is the position to continue below."""

    before = position_field()
    limit = limit_field(default=20, high=200)


class ScalingQuery(ForecastQuery):
    version_id = Text(required=False)
    code = Choice(CODES, required=False)


class PreloadQuery(ForecastQuery):
    version_id = Text(required=False)
    outcome = Choice(OUTCOMES, required=False)


class PreloadTotalQuery(ListQuery):
    version_id = Text(required=False)
