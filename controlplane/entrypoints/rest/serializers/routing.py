"""The weights by which gateways choose replicas."""

from typing import Any

from rest_framework import serializers

from controlplane.entrypoints.rest.fields import Number, Order


class RoutingWeightsSerializer(serializers.Serializer[Any]):
    """Of the cost alpha * latency + beta * utilization + gamma * loading, and of health."""

    alpha = serializers.FloatField(help_text="Per estimated second.")
    beta = serializers.FloatField(help_text="In seconds, at full utilisation.")
    gamma = serializers.FloatField(help_text="Per second of loading.")
    omega = serializers.ListField(
        child=serializers.FloatField(), help_text="Of health: idle, memory, cool, queue; sum 1."
    )
    t_safe = serializers.FloatField(help_text="In Celsius; hotter nodes cost more.")
    t_max = serializers.FloatField(help_text="In Celsius; from here on a node is ruled out.")
    stale_s = serializers.FloatField(help_text="A node not heard for longer is ruled out.")
    prefix = serializers.FloatField(
        help_text="How much of what is cached of a prompt is believed: 0 none of it, 1 all."
    )
    hop_s = serializers.FloatField(help_text="Per level in which node's and gateway's zone differ.")


class RoutingSerializer(serializers.Serializer[Any]):
    weights = RoutingWeightsSerializer()
    defaults = RoutingWeightsSerializer()


class RoutingOrder(Order):
    """What is not said stays as it is."""

    alpha = Number(required=False)
    beta = Number(required=False)
    gamma = Number(required=False)
    omega = serializers.ListField(child=Number(), min_length=4, max_length=4, required=False)
    t_safe = Number(required=False)
    t_max = Number(required=False)
    stale_s = Number(required=False)
    prefix = Number(required=False)
    hop_s = Number(required=False)
