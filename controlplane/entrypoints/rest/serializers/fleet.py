"""Nodes, replicas and placement decisions."""

from typing import Any

from rest_framework import serializers

from controlplane.entrypoints.rest.fields import (
    Choice,
    Known,
    Query,
    QueryNumber,
    Text,
    limit_field,
    position_field,
)
from controlplane.entrypoints.rest.serializers.common import ListQuery, ReadQuery
from controlplane.entrypoints.rest.serializers.demand import ScalingSerializer

TIERS = ("resident", "warm", "storage")
LIVE_TIERS = ("resident", "host", "storage")
REPLICA_STATES = (
    "assigned", "accepted", "pending", "downloading", "loading", "ready", "stopping", "failed",
    "lost",
)  # fmt: skip
NODE_STATUSES = ("ready", "suspect", "lost")


class DeviceSerializer(serializers.Serializer[Any]):
    index = serializers.IntegerField()
    kind = serializers.CharField()
    name = serializers.CharField()
    memory_bytes = serializers.IntegerField()
    link = serializers.CharField(
        help_text="The symmetric interconnect that it shares with others of its node; empty: none."
    )


class HostSerializer(serializers.Serializer[Any]):
    """What a node has beside its devices; 0: not known."""

    cpu_milli = serializers.IntegerField(help_text="Thousandths of a core.")
    memory_bytes = serializers.IntegerField()
    fabric = serializers.CharField(help_text="The network that joins its devices to other nodes'.")
    engines = serializers.ListField(
        child=serializers.CharField(), help_text="What its agent can run models with."
    )


class ReplicaSerializer(serializers.Serializer[Any]):
    """Desired, acknowledged and observed are three facts; ``state`` sums them up."""

    replica_id = serializers.CharField()
    version_id = serializers.CharField()
    node_id = serializers.CharField()
    device_index = serializers.IntegerField()
    memory_bytes = serializers.IntegerField(help_text="Reserved for it by the plan.")
    desired = serializers.BooleanField()
    acked = serializers.BooleanField(help_text="The node accepted the plan that wants it.")
    observed = serializers.CharField(allow_null=True, help_text="As the node last reported.")
    state = serializers.ChoiceField(REPLICA_STATES)
    since = serializers.FloatField(help_text="Of the state.")
    reason = serializers.CharField()
    generation = serializers.IntegerField(help_text="Of the plan that last wanted it so.")
    decision_id = serializers.CharField()
    weights_bytes = serializers.IntegerField(help_text="Measured after loading; 0: not yet.")
    kv_bytes = serializers.IntegerField()
    peak_bytes = serializers.IntegerField()
    load_seconds = serializers.FloatField()
    tier = serializers.ChoiceField(
        TIERS,
        help_text="In which it is placed; warm: swapped in from host memory when it is asked for, "
        "storage: loaded then.",
    )
    tier_since = serializers.FloatField(help_text="Placed so.")
    tier_reason = serializers.CharField(help_text="Why that changed; empty: as it was started.")
    live_tier = serializers.ChoiceField(
        LIVE_TIERS,
        allow_null=True,
        help_text="Where it is, as its node says now; null: not heard, or of the past.",
    )
    live_tier_since = serializers.FloatField(
        allow_null=True, help_text="By the node's clock; null: not known."
    )
    waiting = serializers.CharField(help_text="Why, in its node's words, while it is pending.")
    stuck_since = serializers.FloatField(
        allow_null=True, help_text="Since when nothing moves, beyond its deadline; null: it does."
    )
    stuck_code = serializers.CharField()
    stuck_reason = serializers.CharField()


class NodeSerializer(serializers.Serializer[Any]):
    node_id = serializers.CharField()
    status = serializers.ChoiceField(NODE_STATUSES)
    zone = serializers.CharField()
    draining = serializers.BooleanField()
    drain_reason = serializers.CharField(help_text="As it was given with the order to drain.")
    drain_waits_for = serializers.ListField(
        child=serializers.CharField(),
        help_text="Versions whose replicas stay here, as no other node has room for them.",
    )
    boot_id = serializers.CharField()
    acked_generation = serializers.IntegerField()
    desired_generation = serializers.IntegerField(help_text="Of the last plan for this node.")
    stuck_since = serializers.FloatField(
        allow_null=True,
        help_text="Since when it has not accepted what it was told, beyond the deadline.",
    )
    stuck_code = serializers.CharField(help_text="refused, silent, or empty.")
    stuck_reason = serializers.CharField()
    devices = DeviceSerializer(many=True)
    host = HostSerializer()
    replicas = ReplicaSerializer(many=True)
    joined_at = serializers.FloatField()
    last_seen = serializers.FloatField(help_text="Last transition in the log, not heartbeat.")


class NodeQuery(ListQuery):
    status = Choice(NODE_STATUSES, required=False)
    zone = Text(required=False)


class PlacementQuery(ListQuery):
    node = Text(required=False)
    model = Text(required=False)
    version_id = Text(required=False)
    state = Known(REPLICA_STATES, required=False)


class ShardSerializer(serializers.Serializer[Any]):
    node_id = serializers.CharField()
    device_index = serializers.IntegerField()


class AssignmentSerializer(serializers.Serializer[Any]):
    replica_id = serializers.CharField()
    version_id = serializers.CharField()
    node_id = serializers.CharField()
    device_index = serializers.IntegerField()
    memory_bytes = serializers.IntegerField()
    shards = ShardSerializer(
        many=True, help_text="All devices of a tensor-parallel group; empty: it takes one."
    )
    replaces = serializers.CharField(
        allow_null=True, help_text="The replica that leaves once this one is ready."
    )
    tier = serializers.ChoiceField(TIERS)


class RejectionSerializer(serializers.Serializer[Any]):
    node_id = serializers.CharField()
    device_index = serializers.IntegerField()
    code = serializers.CharField()
    detail = serializers.CharField()


class ScoreTermSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    value = serializers.FloatField()


class CandidateSerializer(serializers.Serializer[Any]):
    node_id = serializers.CharField()
    device_index = serializers.IntegerField()
    score = serializers.FloatField()
    terms = ScoreTermSerializer(many=True)


class StartedSerializer(serializers.Serializer[Any]):
    assignment = AssignmentSerializer()
    reason = serializers.CharField()
    candidates = CandidateSerializer(many=True, help_text="The best ones.")
    rejections = RejectionSerializer(many=True, help_text="Of a large fleet a few of each code.")
    num_candidates = serializers.IntegerField()
    ruled_out = serializers.ListField(
        child=serializers.ListField(child=serializers.JSONField()),
        help_text="Pairs: the code of a rule, and how many devices it excluded.",
    )


class StoppedSerializer(serializers.Serializer[Any]):
    assignment = AssignmentSerializer()
    code = serializers.CharField()
    reason = serializers.CharField()


class RetieredSerializer(serializers.Serializer[Any]):
    """A replica that is kept in another tier from then on, and stays where it is."""

    assignment = AssignmentSerializer()
    before = serializers.ChoiceField(TIERS)
    code = serializers.CharField()
    reason = serializers.CharField()
    rate = serializers.FloatField(help_text="Requests a minute for it.")
    instead_of = serializers.ListField(
        child=serializers.CharField(), help_text="The replicas that it changes place with."
    )


class UnplacedSerializer(serializers.Serializer[Any]):
    version_id = serializers.CharField()
    num_missing = serializers.IntegerField()
    code = serializers.CharField()
    reason = serializers.CharField()
    rejections = RejectionSerializer(many=True)


class InputsSerializer(serializers.Serializer[Any]):
    """What the planner saw beside the log up to ``planned_from``; zeros are left out."""

    foreign_bytes = serializers.JSONField(help_text="(node, device, bytes of other processes)")
    idle_s = serializers.JSONField(help_text="(replica, seconds since it last worked)")
    reserved_bytes = serializers.JSONField(help_text="(kind of device, bytes kept free)")
    planner = serializers.IntegerField(help_text="Which rules and weights decided.")
    host_bytes = serializers.JSONField(help_text="(node, bytes kept for what is swapped out)")
    charged_bytes = serializers.JSONField(help_text="(replica, bytes that its node measured)")
    steady = serializers.JSONField(help_text="Swappable replicas that work without a pause.")
    rates = serializers.JSONField(help_text="(swappable version, requests a minute)")


class DecisionSerializer(serializers.Serializer[Any]):
    decision_id = serializers.CharField()
    generation = serializers.IntegerField()
    position = serializers.IntegerField()
    planned_from = serializers.IntegerField(help_text="Log position that the planner saw.")
    at = serializers.FloatField()
    actor = serializers.CharField()
    started = StartedSerializer(many=True)
    stopped = StoppedSerializer(many=True)
    unplaced = UnplacedSerializer(many=True)
    retiered = RetieredSerializer(many=True)


class OneDecisionSerializer(DecisionSerializer):
    inputs = InputsSerializer(allow_null=True)
    sentences = serializers.ListField(
        child=serializers.CharField(), help_text="One for each change and each gap."
    )


class DifferenceSerializer(serializers.Serializer[Any]):
    path = serializers.CharField(help_text="Like started[0].reason.")
    stored = serializers.JSONField(allow_null=True)
    replayed = serializers.JSONField(allow_null=True)


class ReplaySerializer(serializers.Serializer[Any]):
    """The decision made again from what it saw: the log up to planned_from, and its inputs."""

    decision_id = serializers.CharField()
    position = serializers.IntegerField()
    planned_from = serializers.IntegerField()
    inputs_recorded = serializers.BooleanField(
        help_text="False for events of schema version 1: a difference then proves nothing."
    )
    planner = serializers.IntegerField(
        help_text="Which rules and weights decided; 0: moves that were asked for."
    )
    equal = serializers.BooleanField(help_text="Bit for bit.")
    differences = DifferenceSerializer(many=True)


class ChangeSerializer(serializers.Serializer[Any]):
    """``code`` of a stop; candidates and rejections of a start."""

    change = serializers.ChoiceField(("started", "stopped"))
    assignment = AssignmentSerializer()
    reason = serializers.CharField()
    code = serializers.CharField(required=False)
    candidates = CandidateSerializer(many=True, required=False)
    rejections = RejectionSerializer(many=True, required=False)


class ExplanationSerializer(serializers.Serializer[Any]):
    """Why a replica is where it is, and whether that can be computed again."""

    replica_id = serializers.CharField()
    version_id = serializers.CharField()
    node_id = serializers.CharField()
    device_index = serializers.IntegerField()
    state = serializers.CharField()
    reason = serializers.CharField()
    tier = serializers.ChoiceField(TIERS)
    tier_since = serializers.FloatField()
    tier_reason = serializers.CharField(help_text="Why a later decision changed it.")
    decision_id = serializers.CharField()
    decided_at = serializers.FloatField()
    decision_position = serializers.IntegerField()
    changes = ChangeSerializer(many=True)
    scaling = ScalingSerializer(
        allow_null=True,
        help_text="What last changed the version's number of replicas; null: its minimum holds.",
    )
    replay = ReplaySerializer()


class RepackQuery(Query):
    max_moves = serializers.IntegerField(required=False, default=8, min_value=1, max_value=1000)


class MoveSerializer(serializers.Serializer[Any]):
    replica_id = serializers.CharField()
    version_id = serializers.CharField()
    memory_bytes = serializers.IntegerField()
    from_node = serializers.CharField()
    from_device = serializers.IntegerField()
    to_node = serializers.CharField()
    to_device = serializers.IntegerField()


class FittingSerializer(serializers.Serializer[Any]):
    version_id = serializers.CharField()
    number = serializers.IntegerField()


class RepackSerializer(serializers.Serializer[Any]):
    """What moving replicas together would gain; ``manage.py repack --apply`` starts it."""

    moves = MoveSerializer(many=True)
    moved_bytes = serializers.IntegerField()
    num_unplaced = serializers.IntegerField(help_text="Replicas that fit nowhere now.")
    placed = FittingSerializer(many=True, help_text="Of these, those that fit after the moves.")
    emptied = ShardSerializer(many=True, help_text="Devices that fall empty.")
    sentences = serializers.ListField(child=serializers.CharField())


class WhatIfQuery(ReadQuery):
    """Lists are separated by commas; ``as_of`` is where the log is forked."""

    lose_node = Text(required=False, default="", max_length=2000)
    add_node = Text(required=False, default="", max_length=2000, help_text="`n9=n1`: like n1.")
    replicas = Text(required=False, default="", max_length=2000, help_text="`chat@v2=4`.")
    load = QueryNumber(required=False, default=1.0, help_text="Times the present requests.")


class PlaceSerializer(serializers.Serializer[Any]):
    version_id = serializers.CharField()
    node_id = serializers.CharField()
    device_index = serializers.IntegerField()
    number = serializers.IntegerField()


class EvictedSerializer(serializers.Serializer[Any]):
    replica_id = serializers.CharField()
    version_id = serializers.CharField()
    reason = serializers.CharField()


class MissingSerializer(serializers.Serializer[Any]):
    version_id = serializers.CharField()
    num_missing = serializers.IntegerField()
    code = serializers.CharField()
    reason = serializers.CharField()


class ReplicaLoadSerializer(serializers.Serializer[Any]):
    version_id = serializers.CharField()
    before = serializers.IntegerField(help_text="Replicas as it is.")
    after = serializers.IntegerField(help_text="Replicas after the change.")
    per_replica = serializers.FloatField(allow_null=True, help_text="Relative to now.")


class WhatIfSerializer(serializers.Serializer[Any]):
    """What a changed fleet would look like, by the planner itself; nothing is written."""

    position = serializers.IntegerField(help_text="Where the log was forked.")
    joined = PlaceSerializer(many=True)
    left = PlaceSerializer(many=True)
    evicted = EvictedSerializer(many=True)
    unplaced = MissingSerializer(many=True, help_text="Where more are missing than as it is.")
    relieved = FittingSerializer(many=True, help_text="Missing as it is, and placed then.")
    loads = ReplicaLoadSerializer(many=True, help_text="Where the load on a replica changes.")
    settled = serializers.BooleanField(help_text="Whether the planner came to rest.")
    sentences = serializers.ListField(child=serializers.CharField())


class DecisionQuery(ReadQuery):
    """Newest first; ``before`` is the position to continue below."""

    before = position_field()
    version_id = Text(required=False)
    limit = limit_field(default=20, high=200)
