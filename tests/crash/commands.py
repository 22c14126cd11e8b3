"""Seeded orders to the control plane: every type of command there is, lawful ones and others."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.domain import api_key, capture, model, node, route, tenant
from controlplane.domain.budget import Budget
from controlplane.domain.decider import Command, Decider
from controlplane.domain.ids import KeyId, NodeId, TenantId, VersionId
from controlplane.domain.money import Price
from controlplane.domain.version_spec import VersionSpec

TENANTS = ("acme", "umbrella", "initech")
BUDGETS = {"acme": (3_000, "day"), "umbrella": (5_000, "total"), "initech": None}
MODELS = ("smollm2", "minilm")
VERSIONS = ("v1", "v2", "v3")
DEVICES = (node.DeviceInfo(0, "cpu", "CPU", 8 * 2**30),)


@dataclass(frozen=True)
class Order:
    """A command and the idempotency key that it is sent under, each time it is sent."""

    key: str
    decider: Decider[Any]
    stream: str
    command: Command

    @property
    def body_hash(self) -> str:
        return msgspec.json.encode(self.command).hex()[-64:]


def orders(seed: int, num_orders: int, at: float) -> list[Order]:
    """The first ones set the scene, so that later ones are not all refused; the rest is chance.

    The node is one that no controller hears of, and of this seed alone: runs share a bus.
    """
    choose, node_id = random.Random(seed), NodeId(f"keyed-{seed}")
    kinds = (*KINDS, *_node_kinds(node_id))
    commands = [*_scene(at), *(choose.choice(kinds)(choose, at) for _ in range(num_orders))]
    return [Order(f"key-{seed}-{i}", *_target(one), one) for i, one in enumerate(commands)]


def _target(command: Any) -> tuple[Decider[Any], str]:
    for module, name in ((tenant, "tenant_id"), (node, "node_id")):
        if hasattr(command, name):
            return module.DECIDER, module.DECIDER.stream(getattr(command, name))
    owner = model if isinstance(command, model.ModelCommand) else route
    return owner.DECIDER, owner.DECIDER.stream(command.name)


def _scene(at: float) -> list[Command]:
    return [
        *(tenant.CreateTenant(TenantId(name), name, "free", at) for name in TENANTS),
        *(
            tenant.SetBudget(TenantId(name), Budget("ledger", "tenant", "", "tokens", *rule), at)
            for name, rule in BUDGETS.items()
            if rule
        ),
        *(model.RegisterModel(name, at) for name in MODELS),
        *(model.AddVersion(name, _spec("v1"), at) for name in MODELS),
    ]


def _spec(version: str) -> VersionSpec:
    return VersionSpec(version=version, source="simulated://m", gpu_memory=2**30)


def num_scene() -> int:
    return len(_scene(0.0))


def _other(limit: int) -> Budget:
    """Of a model that no request asks for."""
    return Budget("other", "model", "none", "tokens", limit, "day")


Kind = Callable[[random.Random, float], Command]


def _tenant(make: Callable[[random.Random, TenantId, float], Command]) -> Kind:
    return lambda choose, at: make(choose, TenantId(choose.choice(TENANTS)), at)


def _key(make: Callable[[TenantId, KeyId, float], Command]) -> Kind:
    return _tenant(lambda choose, who, at: make(who, KeyId(f"{choose.randint(0, 5):012x}"), at))


def _model(make: Callable[[random.Random, str, float], Command]) -> Kind:
    return lambda choose, at: make(choose, choose.choice(MODELS), at)


def _arms(choose: random.Random) -> tuple[route.Arm, ...]:
    return (
        route.Arm("a", VersionId("smollm2@v1"), choose.random() + 0.1),
        route.Arm("b", VersionId("minilm@v1"), choose.random()),
    )


def _node_kinds(who: NodeId) -> tuple[Kind, ...]:
    def observed(choose: random.Random, at: float) -> Command:
        joined = node.NodeJoined(who, f"boot-{choose.randint(1, 2)}", "z", DEVICES, at)
        acked = node.NodeAcknowledged(who, choose.randint(0, 9), at)
        return node.RecordNodeEvents(who, (joined, acked), at)

    return (
        lambda choose, at: node.DrainNode(who, "kernel", at),
        lambda choose, at: node.UndrainNode(who, at),
        lambda choose, at: node.RemoveNode(who, at),
        observed,
        observed,
    )


KINDS: tuple[Kind, ...] = (
    _tenant(lambda choose, who, at: tenant.CreateTenant(who, who, "free", at)),
    _tenant(lambda choose, who, at: tenant.ChangeTier(who, choose.choice(tenant.TIERS), at)),
    _tenant(lambda choose, who, at: tenant.SuspendTenant(who, "unpaid", at)),
    _tenant(lambda choose, who, at: tenant.ResumeTenant(who, at)),
    lambda choose, at: tenant.DeleteTenant(TenantId("initech"), at),
    _tenant(lambda choose, who, at: tenant.SetBudget(who, _other(choose.choice([0, 9])), at)),
    _tenant(lambda choose, who, at: tenant.ResetBudget(who, "other", 5, at)),
    _tenant(lambda choose, who, at: tenant.RemoveBudget(who, "other", at)),
    _tenant(lambda choose, who, at: capture.StartCapture(who, at)),
    _tenant(lambda choose, who, at: capture.StopCapture(who, at)),
    _tenant(lambda choose, who, at: capture.EraseText(who, at)),
    _key(lambda who, key, at: api_key.IssueApiKey(who, key, "k", "x", ("inference",), None, at)),
    _key(lambda who, key, at: api_key.RotateApiKey(who, key, "5ec2e7", "wxyz", at + 60, at)),
    _key(lambda who, key, at: api_key.SuspendApiKey(who, key, "leak", at)),
    _key(lambda who, key, at: api_key.ResumeApiKey(who, key, at)),
    _key(lambda who, key, at: api_key.RevokeApiKey(who, key, at)),
    _model(lambda choose, name, at: model.RegisterModel(name, at)),
    _model(lambda choose, name, at: model.AddVersion(name, _spec(choose.choice(VERSIONS)), at)),
    _model(
        lambda choose, name, at: model.ScaleVersion(
            name, choose.choice(VERSIONS), choose.randint(0, 2), 2, at
        )
    ),
    _model(lambda choose, name, at: model.RetireVersion(name, choose.choice(VERSIONS[1:]), at)),
    _model(lambda choose, name, at: model.SetDefaultVersion(name, choose.choice(VERSIONS), at)),
    _model(lambda choose, name, at: model.AddAlias(name, choose.choice(["small", "tiny"]), at)),
    _model(lambda choose, name, at: model.RemoveAlias(name, choose.choice(["small", "tiny"]), at)),
    _model(
        lambda choose, name, at: model.ChangeAccess(
            name, model.Access(choose.random() < 0.5, ("acme",)), at
        )
    ),
    _model(
        lambda choose, name, at: model.SetModelPrice(
            name, choose.choice(VERSIONS), Price(choose.randint(1, 9), 1, 2), at
        )
    ),
    lambda choose, at: route.CreateRoute("chat", _arms(choose), True, at),
    lambda choose, at: route.ChangeArms("chat", _arms(choose), False, at),
    lambda choose, at: route.DeleteRoute("chat", at),
)
