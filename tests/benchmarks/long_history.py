"""The long life of a fleet, as events and inference requests, made fast and always the same.

A world of 200 models on 12 nodes with 4 GPUs each and 100 tenants: replicas are placed, loaded,
fail, stop and are placed anew, nodes go silent and come back, people change tiers, budgets, keys,
aliases, routes and access. Unlike ``tests.projections.history`` nothing here contradicts itself.
About one event in eight is a placement decision with its candidates and rejections.
"""

import random
from collections.abc import Iterator

from controlplane.application.ports import EventMeta, Intent, Terminal
from controlplane.domain import audit, model, node, placement, route, tenant
from controlplane.domain.decider import Event
from controlplane.domain.ids import KeyId, NodeId, ReplicaId, TenantId, VersionId
from controlplane.domain.money import Price
from controlplane.domain.version_spec import VersionSpec

GIB = 2**30
PRICE = Price(150_000, 75_000, 600_000)  # 0.15, 0.075 and 0.60 per million tokens
NUM_MODELS, NUM_NODES, NUM_TENANTS, DEVICES_PER_NODE = 200, 12, 100, 4
FIRST_AT = 1_760_000_000.0
CONTROLLER, PEOPLE = EventMeta("system:controller"), [
    EventMeta(f"user:{name}", f"req-{name}", "", "10.0.0.7", "routine") for name in ("ada", "bob")
]  # fmt: skip
Happened = tuple[str, Event, EventMeta]


class World:
    """``events(n)`` yields n of them, in order; a second call goes on from there."""

    def __init__(self, seed: int = 1) -> None:
        self._choose = random.Random(seed)
        self._now = FIRST_AT
        self._replicas: dict[str, placement.Assignment] = {}
        self._keys: list[tuple[str, str]] = []
        self._next = 0
        self._generation = 0
        self._backlog = list(self._beginning())[::-1]

    def events(self, number: int) -> Iterator[Happened]:
        for _ in range(number):
            while not self._backlog:
                self._backlog = list(self._episode())[::-1]
            yield self._backlog.pop()

    def _tick(self) -> float:
        self._now += self._choose.random() * 20
        return self._now

    def _beginning(self) -> Iterator[Happened]:
        ada = PEOPLE[0]
        for name in tenants():
            yield f"tenant-{name}", tenant.TenantCreated(name, name, "standard", self._now), ada
        devices = tuple(node.DeviceInfo(i, "cuda", "H200", 141 * GIB)
                        for i in range(DEVICES_PER_NODE))  # fmt: skip
        for number, name in enumerate(nodes()):
            joined = node.NodeJoined(name, "boot-0", f"zone-{number % 3}", devices, self._now)
            yield f"node-{name}", joined, CONTROLLER
        for number in range(NUM_MODELS):
            yield from self._new_model(f"model-{number:03d}", ada)

    def _new_model(self, name: str, who: EventMeta) -> Iterator[Happened]:
        yield f"model-{name}", model.ModelRegistered(name, self._now), who
        spec = VersionSpec(
            version="v1", source=f"hf://zoo/{name}@main", gpu_memory=16 * GIB, max_replicas=4
        )
        yield f"model-{name}", model.ModelVersionAdded(name, spec, self._now), who
        arms = (route.Arm("a", VersionId(f"{name}@v1"), 1.0),)
        yield f"route-r-{name}", route.RouteCreated(f"r-{name}", arms, True, self._now), who

    def _episode(self) -> Iterator[Happened]:
        """Something that takes several events."""
        kind = self._choose.random()
        if kind < 0.55:
            return self._place()
        if kind < 0.65:
            return self._silence()
        return self._administer()

    # --- the fleet ----------------------------------------------------------------------------
    def _place(self) -> Iterator[Happened]:
        """One replica more, one less, and what the node says of it."""
        one = self._assignment()
        gone = [self._replicas.pop(next(iter(self._replicas)))] if len(self._replicas) > 150 else []
        self._replicas[one.replica_id] = one
        self._generation += 1
        at, stream = self._tick(), f"node-{one.node_id}"
        yield "placement", self._decision(one, gone, at), CONTROLLER
        about = (one.node_id, one.replica_id, one.version_id)
        yield stream, node.NodeAcknowledged(one.node_id, self._generation, at + 0.2), CONTROLLER
        if self._choose.random() < 0.05:
            failed = node.ReplicaFailed(*about, "out_of_memory", "2 GiB short", at + 9)
            yield stream, failed, CONTROLLER
        else:
            for state in ("downloading", "loading"):
                yield stream, node.ReplicaStateChanged(*about, state, at + 1), CONTROLLER
            ready = node.ReplicaBecameReady(
                *about, one.device_index, 15 * GIB, GIB, 16 * GIB, 12.5, "ab" * 32, at + 14
            )
            yield stream, ready, CONTROLLER
        for old in gone:
            stopped = node.ReplicaStopped(old.node_id, old.replica_id, old.version_id, at + 15)
            yield f"node-{old.node_id}", stopped, CONTROLLER

    def _assignment(self) -> placement.Assignment:
        self._next += 1
        name = f"model-{self._choose.randrange(NUM_MODELS):03d}"
        return placement.Assignment(
            ReplicaId(f"{name}.v1.g{self._generation + 1}.{self._next}"),
            VersionId(f"{name}@v1"),
            NodeId(f"node-{self._choose.randrange(NUM_NODES):02d}"),
            self._choose.randrange(DEVICES_PER_NODE),
            16 * GIB,
        )

    def _decision(
        self, one: placement.Assignment, gone: list[placement.Assignment], at: float
    ) -> placement.PlacementDecided:
        terms = (placement.ScoreTerm("fit", 0.75), placement.ScoreTerm("replicas_on_node", 0.0))
        candidates = tuple(
            placement.Candidate(NodeId(f"node-{i:02d}"), i % 4, 0.75 - i / 100, terms)
            for i in range(6)
        )
        rejections = tuple(
            placement.Rejection(
                NodeId(f"node-{i:02d}"), 3, "insufficient_memory", "needs 16.0 GiB, 3.2 GiB is free"
            )
            for i in range(6)
        )
        return placement.PlacementDecided(
            f"dec-{self._generation:032x}",
            0,
            (placement.Started(one, f"{one.version_id} goes there.", candidates, rejections),),
            tuple(placement.Stopped(old, "surplus", "too many") for old in gone),
            (),
            at,
        )

    def _silence(self) -> Iterator[Happened]:
        name, at = self._choose.choice(nodes()), self._tick()
        yield f"node-{name}", node.NodeSuspected(name, 6.5, at), CONTROLLER
        yield f"node-{name}", node.NodeRecovered(name, "boot-0", at + 2), CONTROLLER

    # --- people -------------------------------------------------------------------------------
    def _administer(self) -> Iterator[Happened]:
        who, at, choose = self._choose.choice(PEOPLE), self._tick(), self._choose
        name = choose.choice(tenants())
        served = f"model-{choose.randrange(NUM_MODELS):03d}"
        kind = choose.randrange(8)
        if kind == 0:
            tier = choose.choice(tenant.TIERS)
            yield f"tenant-{name}", tenant.TenantTierChanged(name, tier, at), who
        elif kind == 1:
            yield f"tenant-{name}", tenant.TenantSuspended(name, "unpaid", at), who
            yield f"tenant-{name}", tenant.TenantResumed(name, at + 60), who
        elif kind == 2:
            yield from self._key(name, at, who)
        elif kind == 3:
            high = choose.randrange(1, 9)
            yield f"model-{served}", model.ModelVersionScaled(served, "v1", 1, high, at), who
        elif kind == 4:
            alias = f"alias-{served}"
            yield f"model-{served}", model.ModelAliasAdded(served, alias, at), who
            yield f"model-{served}", model.ModelAliasRemoved(served, alias, at + 5), who
        elif kind == 5:
            access = model.Access(bool(choose.randrange(2)), (name,))
            yield f"model-{served}", model.ModelAccessChanged(served, access, at), who
        elif kind == 6:
            arms = (route.Arm("a", VersionId(f"{served}@v1"), choose.random() + 0.1),)
            changed = route.RouteArmsChanged(f"r-{served}", arms, True, at)
            yield f"route-r-{served}", changed, who
        else:
            refused = audit.CommandRefused(
                "AddAlias", f"model-{served}", "name_taken", "It is.", at
            )
            yield "refusals", refused, who

    def _key(self, name: TenantId, at: float, who: EventMeta) -> Iterator[Happened]:
        """Issue one; of those that live too long, revoke the oldest."""
        self._next += 1
        key = f"{self._next:012x}"
        issued = tenant.ApiKeyIssued(name, KeyId(key), "ci", "wxyz", ("inference",), None, at)
        yield f"tenant-{name}", issued, who
        self._keys.append((name, key))
        if len(self._keys) > 400:
            owner, oldest = self._keys.pop(0)
            revoked = tenant.ApiKeyRevoked(TenantId(owner), KeyId(oldest), at)
            yield f"tenant-{owner}", revoked, who


def tenants() -> list[TenantId]:
    return [TenantId(f"tenant-{number:02d}") for number in range(NUM_TENANTS)]


def nodes() -> list[NodeId]:
    return [NodeId(f"node-{number:02d}") for number in range(NUM_NODES)]


def requests(number: int, seed: int = 1) -> Iterator[tuple[Intent, Terminal]]:
    """Requests of a month, oldest first: a few tenants and models make most of them."""
    choose = random.Random(seed)
    for index in range(number):
        at = FIRST_AT + 30 * 86_400 * index / number
        name = f"model-{int(choose.paretovariate(1.2)) % NUM_MODELS:03d}"
        prompt, output = choose.randrange(20, 2000), choose.randrange(1, 500)
        outcome = choose.choices(("ok", "cancelled", "error", "timeout"), (950, 30, 15, 5))[0]
        who = f"tenant-{int(choose.paretovariate(1.1)) % NUM_TENANTS:02d}"
        yield _request(f"req-{seed}-{index:09d}", who, name, prompt, output, outcome, at)


def _request(
    request_id: str, who: str, name: str, prompt: int, output: int, outcome: str, at: float
) -> tuple[Intent, Terminal]:
    intent = Intent(
        request_id=request_id,
        tenant_id=who,
        subject="0123456789ab",
        end_user="",
        endpoint="chat.completions",
        requested_model=name,
        route="",
        arm="",
        version_id=f"{name}@v1",
        latency_class="interactive",
        num_prompt_tokens=prompt,
        max_output_tokens=512,
        at=at,
        gateway="gw-1",
        price=PRICE,
    )
    terminal = Terminal(
        request_id=request_id,
        outcome=outcome,
        finish_reason="stop" if outcome == "ok" else "",
        error_code="" if outcome in ("ok", "cancelled") else "node_lost",
        node_id=f"node-{prompt % NUM_NODES:02d}",
        replica_id=f"{name}.v1.g1.0",
        num_prompt_tokens=prompt,
        num_cached_tokens=0,
        num_output_tokens=output,
        ttft_ms=35.0,
        queue_ms=1.0,
        duration_ms=20.0 * output,
        at=at + 0.02 * output,
    )
    return intent, terminal
