"""Models, versions, aliases, access and routes."""

from typing import Any

from rest_framework import serializers

from controlplane.domain.policy import ROLES
from controlplane.domain.version_spec import (
    DISAGGREGATIONS,
    ENGINES,
    KV_CACHE_DTYPES,
    POLICIES,
    PRIORITIES,
    QUANTIZATIONS,
    RESIDENCIES,
    SPECULATIONS,
    TASKS,
)
from controlplane.entrypoints.rest.fields import (
    Body,
    Boolean,
    Integer,
    Known,
    KnownTexts,
    Memory,
    Number,
    Order,
    Text,
    Texts,
)
from controlplane.entrypoints.rest.serializers.common import ListQuery, ReceiptSerializer

STICKY = (
    "The same user gets the same arm for as long as the weights hold. A user is the request's "
    "user field, else its API key. False: each request draws anew."
)
SOURCE = "hf://org/name@revision, s3://bucket/prefix, file:///folder, pypi://package==version."
ISOLATIONS = ("shared", "dedicated")
VERSION_STATUSES = ("ready", "loading", "idle", "unplaced", "failed", "retired")


class ColocationSerializer(Body):
    labels = Texts(required=False)
    affinity = Texts(required=False)
    anti_affinity = Texts(required=False)
    isolation = Known(ISOLATIONS, required=False, default="shared")


class NeedsSerializer(Body):
    """What a replica needs beside memory on its devices."""

    gpu_classes = Texts(
        required=False, help_text="Words of a device's name, or its kind; any will do."
    )
    compute_percent = Integer(
        required=False, default=0, help_text="Of its devices' time, typically; a hint."
    )
    cpu_milli = Integer(required=False, default=0, help_text="Thousandths of a core of its node.")
    host_memory = Integer(required=False, default=0, help_text="Bytes of its node.")


class NeedsOrder(NeedsSerializer):
    host_memory = Memory(  # type: ignore[assignment]  # written in more ways than it is shown
        "needs.host_memory",
        required=False,
        default=0,
        help_text='Of its node: bytes, or like "4GiB".',
    )


class AccessSerializer(serializers.Serializer[Any]):
    public = serializers.BooleanField()
    tenants = serializers.ListField(child=serializers.CharField())
    roles = serializers.ListField(
        child=serializers.ChoiceField(ROLES), help_text="Of the callers; empty: any role."
    )


class PriceSerializer(serializers.Serializer[Any]):
    """Of a million tokens, as decimal texts."""

    input = serializers.CharField(help_text="Of the prompt.")
    cached_input = serializers.CharField(help_text="Of what a prefix cache had of the prompt.")
    output = serializers.CharField(help_text="Generated.")


class VersionSerializer(serializers.Serializer[Any]):
    """The specification, and how it stands in the fleet."""

    version_id = serializers.CharField()
    version = serializers.CharField()
    source = serializers.CharField()  # type: ignore[assignment]  # hides DRF's own
    format = serializers.CharField()
    sha256 = serializers.CharField()
    gpu_memory = serializers.IntegerField(help_text="Bytes.")
    tensor_parallel = serializers.IntegerField()
    max_batch = serializers.IntegerField()
    max_prompt_tokens = serializers.IntegerField()
    max_output_tokens = serializers.IntegerField()
    quantization = serializers.ChoiceField(QUANTIZATIONS)
    kv_cache_dtype = serializers.ChoiceField(KV_CACHE_DTYPES)
    priority = serializers.ChoiceField(PRIORITIES)
    min_replicas = serializers.IntegerField()
    max_replicas = serializers.IntegerField()
    policy = serializers.ChoiceField(POLICIES)
    colocation = ColocationSerializer()
    draft_model = serializers.CharField(help_text="Source of the model that guesses.")
    speculation = serializers.ChoiceField(SPECULATIONS)
    swap_bytes = serializers.IntegerField(
        allow_null=True, help_text="Of the memory, for preempted requests; null: the node chooses."
    )
    disaggregation = serializers.ChoiceField(DISAGGREGATIONS)
    guaranteed_percent = serializers.IntegerField(
        help_text="Of a shared device's time, whenever it has work; 0: nothing is promised."
    )
    needs = NeedsSerializer()
    residency = serializers.ChoiceField(
        RESIDENCIES,
        help_text="swappable: others may have its memory on the device while it is idle.",
    )
    engine = serializers.ChoiceField(
        ENGINES, help_text="What runs it; only nodes whose agents have it are considered."
    )
    task = serializers.ChoiceField(TASKS, help_text="What it serves: text, or embeddings.")
    max_inputs = serializers.IntegerField(help_text="Texts to embed in one request.")
    retired = serializers.BooleanField()
    status = serializers.ChoiceField(VERSION_STATUSES)
    ready_replicas = serializers.IntegerField()
    desired_replicas = serializers.IntegerField()
    placed_tiers = serializers.DictField(
        child=serializers.IntegerField(),
        help_text="Replicas by the tier that they are placed in: resident, warm, storage.",
    )
    live_tiers = serializers.DictField(
        child=serializers.IntegerField(),
        help_text="Replicas by where they are, as their nodes say now: resident, host, storage. "
        "Those of nodes that are not heard, and of the past, are left out.",
    )
    reason = serializers.CharField(help_text="Why it is not ready, if it is not.")
    stuck_replicas = serializers.IntegerField(help_text="Of which nothing moves any more.")
    retry_at = serializers.FloatField(
        allow_null=True, help_text="When a failed load is tried again; null: none has failed."
    )
    price = PriceSerializer(help_text="Of requests admitted from now on.")


class ModelSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    default_version = serializers.CharField(allow_null=True)
    aliases = serializers.ListField(child=serializers.CharField())
    access = AccessSerializer()
    versions = VersionSerializer(many=True)
    created_at = serializers.FloatField()


class ModelOrder(Order):
    name = Text()


class VersionOrder(Order):
    """The fields of a version; what is left out has the value of an ordinary model."""

    version = Text()
    source = Text(max_length=2048, help_text=SOURCE)  # type: ignore[assignment]  # hides DRF's own
    format = Text(required=False)
    sha256 = Text(required=False, allow_blank=True, max_length=64)
    gpu_memory = Memory(
        "gpu_memory",
        help_text='Weights, KV cache, swap space and workspace: bytes, or like "1.5GiB".',
    )
    tensor_parallel = Integer(required=False)
    max_batch = Integer(required=False)
    max_prompt_tokens = Integer(required=False)
    max_output_tokens = Integer(required=False)
    quantization = Known(QUANTIZATIONS, required=False)
    kv_cache_dtype = Known(KV_CACHE_DTYPES, required=False)
    priority = Known(PRIORITIES, required=False)
    min_replicas = Integer(required=False)
    max_replicas = Integer(required=False)
    policy = Known(POLICIES, required=False)
    colocation = ColocationSerializer(required=False)
    draft_model = Text(required=False, allow_blank=True, max_length=2048)
    speculation = Known(SPECULATIONS, required=False)
    swap_bytes = Memory(
        "swap_bytes",
        required=False,
        allow_null=True,
        help_text="Of the memory, for preempted requests; null: the node chooses.",
    )
    disaggregation = Known(DISAGGREGATIONS, required=False)
    guaranteed_percent = Integer(
        required=False, help_text="Of a shared device's time; for priority high alone."
    )
    needs = NeedsOrder(required=False)
    residency = Known(RESIDENCIES, required=False, help_text="swappable: below priority high.")
    engine = Known(ENGINES, required=False, help_text="vllm: on nodes that have it.")
    task = Known(TASKS, required=False, help_text="What it serves: text, or embeddings.")
    max_inputs = Integer(required=False, help_text="Texts to embed in one request, up to 2048.")


class ScaleOrder(Order):
    min_replicas = Integer()
    max_replicas = Integer()


class PriceOrder(Order):
    """Prices of a million tokens, as decimal texts with at most 6 decimals: ``"0.15"``."""

    input = Text(max_length=11)
    cached_input = Text(max_length=11, required=False, help_text="Left out: the price of input.")
    output = Text(max_length=11)


class AliasSerializer(serializers.Serializer[Any]):
    alias = serializers.CharField()
    model = serializers.CharField()


class AliasOrder(Order):
    alias = Text()


class AccessOrder(Order):
    public = Boolean()
    tenants = Texts(required=False)
    roles = KnownTexts(ROLES, required=False, help_text="Of the callers; none means any role.")


class ArmSerializer(Body):
    name = Text()
    version_id = Text(max_length=130)
    weight = Number()


class RouteSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    arms = ArmSerializer(many=True)
    sticky = serializers.BooleanField(help_text=STICKY)
    created_at = serializers.FloatField()
    updated_at = serializers.FloatField()


class RouteChange(Order):
    arms = ArmSerializer(many=True)
    sticky = Boolean(required=False, default=True, help_text=STICKY)


class RouteOrder(RouteChange):
    name = Text()


class ModelQuery(ListQuery):
    name = Text(required=False)


class AppliedSerializer(serializers.Serializer[Any]):
    """One receipt for each thing that the file names, in the order of execution."""

    dry_run = serializers.BooleanField()
    changed = serializers.IntegerField(help_text="Number of receipts that changed something.")
    results = ReceiptSerializer(many=True)
