"""Random histories of a small fleet: lawful ones, and ones that name what never was."""

import random
from collections.abc import Iterator

from controlplane.domain import audit, model, node, placement, route, tenant
from controlplane.domain.decider import Event
from controlplane.domain.ids import KeyId, NodeId, ReplicaId, TenantId, VersionId
from controlplane.domain.money import Price
from controlplane.domain.version_spec import VersionSpec
from tests.domain.samples import DEVICES, REJECTION, SAMPLES, SPEC

TENANTS = ["acme", "umbrella"]
MODELS = ["smollm2", "minilm"]
VERSIONS = ["v1", "v2"]
NODES = ["n1", "n2", "n3"]


def random_history(seed: int, num_events: int) -> Iterator[tuple[str, Event]]:
    """Pairs of stream and event. Nothing keeps them from contradicting each other."""
    choose = random.Random(seed)
    kinds = [_tenant, _key, _model, _version, _route, _node, _replica, _replica, _plan, _refusal]
    yield from (
        (f"tenant-{name}", tenant.TenantCreated(name, name, "free", 0.0)) for name in TENANTS
    )  # type: ignore[arg-type]
    for index in range(num_events):
        yield choose.choice(kinds)(choose, float(index))


def _tenant(choose: random.Random, at: float) -> tuple[str, Event]:
    who = TenantId(choose.choice(TENANTS))
    return f"tenant-{who}", choose.choice(
        [
            tenant.TenantCreated(who, who, "free", at),
            tenant.TenantTierChanged(who, choose.choice(tenant.TIERS), at),
            tenant.TenantSuspended(who, "unpaid", at),
            tenant.TenantResumed(who, at),
            _budget_set(who, choose.choice([None, 5]), at),
            tenant.TenantBudgetReset(who, "default", 2, at),
            tenant.TenantDeleted(who, at),
        ]
    )


def _budget_set(who: TenantId, limit: int | None, at: float) -> Event:
    return tenant.TenantBudgetSet(who, "default", "tenant", "", "tokens", limit, "day", at)


def _key(choose: random.Random, at: float) -> tuple[str, Event]:
    who, key = TenantId(choose.choice(TENANTS)), KeyId(f"{choose.randint(0, 5):012x}")
    issued = tenant.ApiKeyIssued(who, key, "k", "wxyz", ("inference",), None, at)
    return f"tenant-{who}", choose.choice([issued, tenant.ApiKeyRevoked(who, key, at)])


def _model(choose: random.Random, at: float) -> tuple[str, Event]:
    name, alias = choose.choice(MODELS), choose.choice(["small", "tiny"])
    return f"model-{name}", choose.choice(
        [
            model.ModelRegistered(name, at),
            model.ModelAliasAdded(name, alias, at),
            model.ModelAliasRemoved(name, alias, at),
            model.ModelPriceSet(name, "v1", Price(9, 8, choose.randint(0, 5)), at),
            model.ModelAccessChanged(name, model.Access(False, ("acme",)), at),
            model.ModelDefaultVersionSet(name, choose.choice(VERSIONS), at),
        ]
    )


def _version(choose: random.Random, at: float) -> tuple[str, Event]:
    name, version = choose.choice(MODELS), choose.choice(VERSIONS)
    return f"model-{name}", choose.choice(
        [
            model.ModelVersionAdded(name, _spec(version), at),
            model.ModelVersionScaled(name, version, choose.randint(0, 1), 3, at),
            model.ModelVersionRetired(name, version, at),
        ]
    )


def _spec(version: str) -> VersionSpec:
    return VersionSpec(version=version, source=SPEC.source, gpu_memory=SPEC.gpu_memory)


def _route(choose: random.Random, at: float) -> tuple[str, Event]:
    arms = (route.Arm("a", VersionId("smollm2@v1"), choose.random()),)
    return "route-chat", choose.choice(
        [
            route.RouteCreated("chat", arms, True, at),
            route.RouteArmsChanged("chat", arms, False, at),
            route.RouteDeleted("chat", at),
        ]
    )


def _node(choose: random.Random, at: float) -> tuple[str, Event]:
    name = NodeId(choose.choice(NODES))
    boot = f"boot-{choose.randint(1, 2)}"
    return f"node-{name}", choose.choice(
        [
            node.NodeJoined(name, boot, "zone-a", DEVICES, at),
            node.NodeSuspected(name, 6.0, at),
            node.NodeRecovered(name, boot, at),
            node.NodeLost(name, 15.0, at),
            node.NodeDrainStarted(name, "kernel", at),
            node.NodeDrainEnded(name, at),
            node.NodeRemoved(name, at),
            node.NodeAcknowledged(name, choose.randint(0, 20), at),
        ]
    )


def _replica(choose: random.Random, at: float) -> tuple[str, Event]:
    one = _assignment(choose)
    about = (one.node_id, one.replica_id, one.version_id)
    return f"node-{one.node_id}", choose.choice(
        [
            node.ReplicaStateChanged(*about, "loading", at),
            node.ReplicaBecameReady(*about, 0, 1, 2, 3, 0.5, "ab", at),
            node.ReplicaFailed(*about, "out_of_memory", choose.choice(["", "1 GiB"]), at),
            node.ReplicaStopped(*about, at),
        ]
    )


def _assignment(choose: random.Random) -> placement.Assignment:
    number = choose.randint(0, 11)
    name, version, host = MODELS[number % 2], VERSIONS[number // 2 % 2], NODES[number % 3]
    return placement.Assignment(
        ReplicaId(f"{name}.{version}.{number}"),
        VersionId(f"{name}@{version}"),
        NodeId(host),
        0,
        2**30,
    )


def _plan(choose: random.Random, at: float) -> tuple[str, Event]:
    wanted = [_assignment(choose) for _ in range(choose.randint(0, 3))]
    unwanted = [_assignment(choose) for _ in range(choose.randint(0, 2))]
    gaps = [f"{choose.choice(MODELS)}@{choose.choice(VERSIONS)}"] * choose.randint(0, 1)
    return "placement", placement.PlacementDecided(
        f"d-{at}",
        0,
        tuple(placement.Started(one, "wanted", (), (REJECTION,)) for one in wanted),
        tuple(placement.Stopped(one, "surplus", "too many") for one in unwanted),
        tuple(placement.Unplaced(VersionId(v), 1, "no_memory", "full", ()) for v in gaps),
        at,
    )


def _refusal(choose: random.Random, at: float) -> tuple[str, Event]:
    return "refusals", audit.CommandRefused("AddAlias", "model-x", "model_not_found", "", at)


def every_sample() -> list[tuple[str, Event]]:
    return [("samples", sample) for sample in SAMPLES]
