"""Why a request's attempts went where they went."""

from typing import Any

from rest_framework import serializers

from controlplane.dispatch.record import FOLLOWED, REFUSED, SAMPLED, SPARE
from controlplane.entrypoints.rest.serializers.routing import RoutingWeightsSerializer


class AskedSerializer(serializers.Serializer[Any]):
    num_prompt_tokens = serializers.IntegerField()
    max_output_tokens = serializers.IntegerField()
    max_wait_s = serializers.FloatField(help_text="The longest it waits for a replica to load.")


class SeenReplicaSerializer(serializers.Serializer[Any]):
    """A replica as the gateway knew it when it chose."""

    replica_id = serializers.CharField()
    node_id = serializers.CharField()
    state = serializers.CharField()
    node_status = serializers.CharField()
    draining = serializers.BooleanField()
    age_s = serializers.FloatField(
        allow_null=True, help_text="Since its node was last heard; null: never."
    )
    utilization = serializers.FloatField()
    temperature_c = serializers.FloatField()
    memory_free_bytes = serializers.IntegerField()
    memory_total_bytes = serializers.IntegerField()
    num_running = serializers.IntegerField()
    num_waiting = serializers.IntegerField()
    num_local = serializers.IntegerField(help_text="What this gateway had in flight there.")
    num_local_then = serializers.IntegerField(help_text="And when its telemetry came.")
    num_local_tokens = serializers.IntegerField(help_text="And what of it was to be prefilled.")
    max_batch = serializers.IntegerField()
    num_blocks = serializers.IntegerField()
    block_size = serializers.IntegerField()
    prefill_tokens_per_s = serializers.FloatField()
    decode_step_s = serializers.FloatField()
    num_cached_tokens = serializers.IntegerField(help_text="Of the prompt, in its prefix cache.")
    resident = serializers.BooleanField()
    load_seconds = serializers.FloatField()
    is_held = serializers.BooleanField()
    zone_hops = serializers.IntegerField(help_text="Levels in which its zone is not the gateway's.")


class CostTermsSerializer(serializers.Serializer[Any]):
    """cost = latency + utilization + loading; the rest says what latency is made of."""

    queue_s = serializers.FloatField()
    prefill_s = serializers.FloatField()
    decode_s = serializers.FloatField()
    thermal = serializers.FloatField()
    distance_s = serializers.FloatField()
    latency = serializers.FloatField()
    utilization = serializers.FloatField()
    loading = serializers.FloatField()
    cost = serializers.FloatField()


class DispatchCandidateSerializer(serializers.Serializer[Any]):
    replica_id = serializers.CharField()
    node_id = serializers.CharField()
    cost = serializers.FloatField()
    health = serializers.FloatField(help_text="Decides between equal costs.")
    terms = CostTermsSerializer()


class RejectedReplicaSerializer(serializers.Serializer[Any]):
    replica_id = serializers.CharField()
    node_id = serializers.CharField()
    code = serializers.CharField(help_text="The rule.")
    detail = serializers.CharField()


class RecomputedDifferenceSerializer(serializers.Serializer[Any]):
    path = serializers.CharField(help_text="Like outcome.candidates[0].cost.")
    stored = serializers.JSONField(allow_null=True)
    recomputed = serializers.JSONField(allow_null=True)


class RecomputedSerializer(serializers.Serializer[Any]):
    """The choice made again, just now, from what it saw."""

    equal = serializers.BooleanField(help_text="Bit for bit.")
    comparable = serializers.BooleanField(
        help_text="False if another formula chose: a difference then proves nothing."
    )
    differences = RecomputedDifferenceSerializer(many=True)


class DispatchSerializer(serializers.Serializer[Any]):
    """One choice of a replica, also one that found none."""

    choice = serializers.IntegerField()
    attempt = serializers.IntegerField(help_text="From 1, of that choice; see attempts.")
    at = serializers.FloatField()
    why = serializers.ChoiceField(
        (SAMPLED, FOLLOWED, REFUSED, SPARE),
        help_text="sampled: by the hash of its id; followed: after one that was lost or refused; "
        "refused: no replica took it; spare: none of these, while the gateway had few.",
    )
    position = serializers.IntegerField(help_text="Log position of placement and configuration.")
    formula = serializers.IntegerField()
    replica_id = serializers.CharField(help_text="Empty if there was none.")
    node_id = serializers.CharField()
    weights = RoutingWeightsSerializer()
    request = AskedSerializer()
    num_replicas = serializers.IntegerField()
    replicas = SeenReplicaSerializer(many=True)
    num_candidates = serializers.IntegerField()
    candidates = DispatchCandidateSerializer(many=True, help_text="The best first.")
    num_rejected = serializers.IntegerField()
    rejected = RejectedReplicaSerializer(many=True)
    sentences = serializers.ListField(child=serializers.CharField())
    recomputed = RecomputedSerializer()


class RequestDispatchSerializer(serializers.Serializer[Any]):
    """Kept of a share of requests, of attempts that follow others, of what no replica took, and of
    one request a second beside."""

    request_id = serializers.CharField()
    outcome = serializers.CharField()
    share = serializers.FloatField(help_text="Of requests that are kept, by a hash of their ids.")
    is_sampled = serializers.BooleanField(help_text="Whether this one is, with that share.")
    is_whole = serializers.BooleanField(
        help_text="False for a tenant: without other replicas, whose load is other tenants'."
    )
    dispatches = DispatchSerializer(many=True)
