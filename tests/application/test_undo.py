"""Every administrative change has a way back, or a reason why it has none."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.application.ports import EventMeta, RecordedEvent
from controlplane.application.undo import RULES, compensation
from controlplane.domain import model, node, retention, route, routing, tenant
from controlplane.domain.audit import CommandRefused, cause_of_undo
from controlplane.domain.decider import Event, fold
from controlplane.domain.errors import Conflict
from controlplane.domain.ids import KeyId, NodeId
from controlplane.domain.version_spec import VersionSpec
from controlplane.projections.audit import ADMINISTRATIVE
from tests.domain.samples import ACME, ARMS, DEVICES, KEY, NODE, SPEC

V2 = VersionSpec(version="v2", source="simulated://x", gpu_memory=1)
TENANT = (tenant.TenantCreated(ACME, "acme", "standard", 0.0),)
MODEL = (
    model.ModelRegistered("smollm2", 0.0),
    model.ModelVersionAdded("smollm2", SPEC, 0.0),
    model.ModelVersionAdded("smollm2", V2, 0.0),
)
JOINED = (node.NodeJoined(NODE, "b", "z", DEVICES, 0.0),)

ISSUED = tenant.ApiKeyIssued(ACME, KEY, "ci", "wxyz", ("inference",), None, 1.0)


def budget(limit: int | None, at: float = 1.0) -> tenant.TenantBudgetSet:
    return tenant.TenantBudgetSet(ACME, "all", "tenant", "", "tokens", limit, "day", at)


# What there was before, and the change that is taken back.
UNDOABLE: list[tuple[str, Sequence[Event], Event]] = [
    ("tenant-acme", (), TENANT[0]),
    ("tenant-acme", TENANT, tenant.TenantTierChanged(ACME, "premium", 1.0)),
    ("tenant-acme", TENANT, tenant.TenantSuspended(ACME, "unpaid", 1.0)),
    ("tenant-acme", (*TENANT, tenant.TenantSuspended(ACME, "unpaid", 1.0)),
     tenant.TenantResumed(ACME, 2.0)),
    ("tenant-acme", TENANT, budget(5)),
    ("tenant-acme", (*TENANT, budget(7)), budget(5)),
    ("tenant-acme", (*TENANT, budget(7)), budget(None)),
    ("tenant-acme", (*TENANT, budget(7), tenant.TenantBudgetReset(ACME, "all", 3, 1.0)),
     tenant.TenantBudgetReset(ACME, "all", 5, 2.0)),
    ("tenant-acme", TENANT, ISSUED),
    ("tenant-acme", (*TENANT, ISSUED), tenant.ApiKeySuspended(ACME, KEY, "leaked?", 2.0)),
    ("tenant-acme", (*TENANT, ISSUED, tenant.ApiKeySuspended(ACME, KEY, "leaked?", 2.0)),
     tenant.ApiKeyResumed(ACME, KEY, 3.0)),
    ("tenant-acme", TENANT, tenant.TenantCaptureStarted(ACME, 1.0)),
    ("tenant-acme", (*TENANT, tenant.TenantCaptureStarted(ACME, 1.0)),
     tenant.TenantCaptureStopped(ACME, 2.0)),
    ("retention-text", (retention.RetentionSet("text", 30, 60, 1.0),),
     retention.RetentionSet("text", 60, None, 2.0)),
    ("routing-weights", (routing.RoutingWeightsSet(routing.Weights(), routing.Weights(2.0), 1.0),),
     routing.RoutingWeightsSet(routing.Weights(2.0), routing.Weights(beta=0.0), 2.0)),
    ("model-smollm2", MODEL[:2], MODEL[2]),
    ("model-smollm2", MODEL, model.ModelVersionScaled("smollm2", "v1", 0, 9, 1.0)),
    ("model-smollm2", MODEL, model.ModelPriceSet("smollm2", "v1", model.Price(1, 1, 2), 1.0)),
    ("model-smollm2", MODEL, model.ModelDefaultVersionSet("smollm2", "v2", 1.0)),
    ("model-smollm2", MODEL, model.ModelAliasAdded("smollm2", "small", 1.0)),
    ("model-smollm2", (*MODEL, model.ModelAliasAdded("smollm2", "small", 1.0)),
     model.ModelAliasRemoved("smollm2", "small", 2.0)),
    ("model-smollm2", MODEL,
     model.ModelAccessChanged("smollm2", model.Access(False, ("acme",)), 1.0)),
    ("route-chat", (), route.RouteCreated("chat", ARMS, True, 1.0)),
    ("route-chat", (route.RouteCreated("chat", ARMS, True, 1.0),),
     route.RouteArmsChanged("chat", ARMS[:1], False, 2.0)),
    ("route-chat", (route.RouteCreated("chat", ARMS, False, 1.0),),
     route.RouteDeleted("chat", 2.0)),
    ("node-n1", JOINED, node.NodeDrainStarted(NODE, "kernel", 1.0)),
    ("node-n1", (*JOINED, node.NodeDrainStarted(NODE, "kernel", 1.0)),
     node.NodeDrainEnded(NODE, 2.0)),
]  # fmt: skip
FINAL: list[tuple[str, Sequence[Event], Event]] = [
    ("tenant-acme", TENANT, tenant.TenantDeleted(ACME, 1.0)),
    ("tenant-acme", TENANT, tenant.ApiKeyRevoked(ACME, KEY, 1.0)),
    ("tenant-acme", (*TENANT, ISSUED), tenant.ApiKeyRotated(ACME, KEY, "s2", "abcd", 9.0, 2.0)),
    ("tenant-acme", TENANT, tenant.TenantTextErased(ACME, 0, 1.0)),
    ("retention-requests", (), retention.SegmentRemoved("requests", 1, 1000, "a", 1.0)),
    ("model-smollm2", (), MODEL[0]),
    ("model-smollm2", MODEL, model.ModelVersionRetired("smollm2", "v1", 1.0)),
    ("node-n1", JOINED, node.NodeRemoved(NODE, 1.0)),
]


def log(stream: str, events: Sequence[Event], causes: dict[int, int] | None = None) -> Any:
    """The events recorded from position 1 on; ``causes``: which position undoes which."""
    return [
        RecordedEvent(
            index, stream, index, str(type(event).__struct_config__.tag), 1, b"",
            EventMeta("user:ada", causation_id=cause_of_undo((causes or {})[index])
                      if index in (causes or {}) else ""),
            0.0, b"", event,
        )
        for index, event in enumerate(events, 1)
    ]  # fmt: skip


def test_every_administrative_event_has_a_rule() -> None:
    assert set(RULES) == set(ADMINISTRATIVE)
    tried = {type(event) for _, _, event in (*UNDOABLE, *FINAL)}
    assert tried == set(RULES)


@pytest.mark.parametrize(
    ("stream", "before", "event"), UNDOABLE, ids=lambda one: type(one).__name__
)
def test_the_command_leads_back_to_the_state_before(
    stream: str, before: Sequence[Event], event: Event
) -> None:
    """And the change after it, undone again, is the change once more."""
    order = compensation(log(stream, (*before, event)), len(before) + 1, 9.0)
    decider = order.decider
    assert decider.stream(order.target) == stream
    there = fold(decider, (*before, event))
    back = fold(decider, decider.decide(there, order.command), there)
    assert comparable(back) == comparable(fold(decider, before))
    undone = (*before, event, *decider.decide(there, order.command))
    if not isinstance(event, (tenant.TenantCreated, model.ModelVersionAdded, tenant.ApiKeyIssued)):
        again = compensation(log(stream, undone), len(undone), 10.0)
        assert comparable(fold(decider, decider.decide(back, again.command), back)) == comparable(
            there
        )


def budgets_of(state: tenant.Tenant) -> Any:
    """When something was forgiven is no matter, as long as it was in this period."""
    return [replace(one, forgiven_at=0.0) for one in state.budgets.values()]


def comparable(state: Any) -> Any:
    """What a change can be seen by; a deleted or retired thing stays known by its name."""
    if isinstance(state, tenant.Tenant):
        return (state.exists and not state.deleted and (
            state.tier, state.suspended, budgets_of(state), state.keys.live))  # fmt: skip
    if isinstance(state, route.Route):
        return state.exists and (state.arms, state.sticky)
    if isinstance(state, model.Model):
        live = {name: spec for name, spec in state.versions.items() if name not in state.retired}
        prices = {name: model.price_of(state, name) for name in live}
        return live, prices, model.default_version(state), state.aliases, state.access
    return state


@pytest.mark.parametrize(("stream", "before", "event"), FINAL, ids=lambda one: type(one).__name__)
def test_what_cannot_be_taken_back_says_why(
    stream: str, before: Sequence[Event], event: Event
) -> None:
    with pytest.raises(Conflict) as found:
        compensation(log(stream, (*before, event)), len(before) + 1, 9.0)
    assert found.value.code == "not_undoable" and len(found.value.message) > 30


def test_reports_and_refusals_are_no_orders() -> None:
    for event in (JOINED[0], CommandRefused("AddAlias", "model-x", "name_taken", "", 0.0)):
        with pytest.raises(Conflict, match="no order"):
            compensation(log("node-n1", [event]), 1, 9.0)


def test_only_the_last_word_on_an_aspect_is_taken_back() -> None:
    """A later change of something else does not matter; one of the same is undone first."""
    events = (
        *TENANT,
        tenant.TenantTierChanged(ACME, "premium", 1.0),
        budget(5, 2.0),
        tenant.TenantTierChanged(ACME, "free", 3.0),
    )
    stream = log("tenant-acme", events)
    assert compensation(stream, 4, 9.0).command == tenant.ChangeTier(ACME, "premium", 9.0)
    assert compensation(stream, 3, 9.0).command == tenant.RemoveBudget(ACME, "all", 9.0)
    with pytest.raises(Conflict, match="position 4") as found:
        compensation(stream, 2, 9.0)
    assert found.value.code == "changed_since"
    other = (*MODEL, model.ModelVersionScaled("smollm2", "v1", 0, 2, 1.0),
             model.ModelVersionScaled("smollm2", "v2", 0, 3, 1.0))  # fmt: skip
    scale = compensation(log("model-smollm2", other), 4, 9.0).command
    assert scale == model.ScaleVersion("smollm2", "v1", 1, 2, 9.0)


def test_what_was_taken_back_is_not_taken_back_twice() -> None:
    events = (
        *TENANT,
        tenant.TenantTierChanged(ACME, "premium", 1.0),
        tenant.TenantTierChanged(ACME, "standard", 2.0),
    )
    with pytest.raises(Conflict, match="position 3") as found:
        compensation(log("tenant-acme", events, {3: 2}), 2, 9.0)
    assert found.value.code == "already_undone"


def test_another_key_is_another_aspect() -> None:
    keys = [tenant.ApiKeyIssued(ACME, KeyId(k), k, "wxyz", ("inference",), None, 1.0) for k in "ab"]
    stream = log("tenant-acme", (*TENANT, *keys))
    assert compensation(stream, 2, 9.0).command == tenant.RevokeApiKey(ACME, KeyId("a"), 9.0)
    drained = log("node-n1", (*JOINED, node.NodeDrainStarted(NodeId("n1"), "x", 1.0)))
    assert compensation(drained, 2, 9.0).command == node.UndrainNode(NodeId("n1"), 9.0)
