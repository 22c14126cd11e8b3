"""What a tenant may and may not become."""

from typing import Any

import pytest
from msgspec.structs import replace
from msgspec.structs import replace as replace_struct

from controlplane.domain import tenant
from controlplane.domain.api_key import Keys
from controlplane.domain.budget import Budget, check_budget, parse_limit
from controlplane.domain.decider import Event, fold
from controlplane.domain.errors import Invalid
from controlplane.domain.event_types import decode
from controlplane.domain.ids import KeyId, TenantId
from controlplane.domain.tenant import (
    ApiKeyIssued,
    ApiKeyRevoked,
    ChangeTier,
    CreateTenant,
    DeleteTenant,
    IssueApiKey,
    RemoveBudget,
    ResetBudget,
    ResumeTenant,
    RevokeApiKey,
    SetBudget,
    SuspendTenant,
    TenantBudgetReset,
    TenantBudgetSet,
    TenantCreated,
    TenantDeleted,
    TenantResumed,
    TenantSuspended,
    TenantTierChanged,
)
from tests.domain.scenario import Scenario

T = TenantId("acme")
K = KeyId("0123456789ab")
CREATED = TenantCreated(T, "acme", "standard", 1.0)
ISSUED = ApiKeyIssued(T, K, "laptop", "wxyz", ("inference",), None, 2.0)
REVOKED = ApiKeyRevoked(T, K, 3.0)
ALL = Budget("all", "tenant", "", "tokens", 100, "day")
ISSUE = IssueApiKey(T, K, "laptop", "wxyz", ("inference",), None, 2.0)


def given(*events: Event) -> Scenario:
    return Scenario(tenant.DECIDER, events)


def test_a_tenant_is_created_once() -> None:
    create = CreateTenant(T, "acme", "standard", 1.0)
    given().when(create).then(CREATED)
    given(CREATED).when(create).then_refused("tenant_exists")
    given(CREATED, TenantDeleted(T, 2.0)).when(create).then_refused("tenant_exists")


@pytest.mark.parametrize("name", ["", "Acme", "../x", "a" * 64, "a b", "-a", "ａ", "a\x00"])
def test_a_bad_name_is_refused(name: str) -> None:
    given().when(CreateTenant(T, name, "standard", 1.0)).then_refused("invalid_name")


def test_only_known_tiers_are_taken() -> None:
    given().when(CreateTenant(T, "acme", "gold", 1.0)).then_refused("invalid_tier")
    given(CREATED).when(ChangeTier(T, "gold", 2.0)).then_refused("invalid_tier")
    given(CREATED).when(ChangeTier(T, "free", 2.0)).then(TenantTierChanged(T, "free", 2.0))
    given(CREATED).when(ChangeTier(T, "standard", 2.0)).then_nothing()


@pytest.mark.parametrize(
    "command",
    [
        ChangeTier(T, "free", 9.0),
        SuspendTenant(T, "", 9.0),
        ResumeTenant(T, 9.0),
        DeleteTenant(T, 9.0),
        SetBudget(T, ALL, 9.0),
        RemoveBudget(T, "all", 9.0),
        ResetBudget(T, "all", 5, 9.0),
        ISSUE,
        RevokeApiKey(T, K, 9.0),
    ],
)
def test_nothing_can_be_done_to_a_tenant_that_is_not_there(command: tenant.TenantCommand) -> None:
    """Neither before it was created nor after it was deleted; the answers are the same."""
    before = given().when(command).then_refused("tenant_not_found")
    after = given(CREATED, TenantDeleted(T, 2.0)).when(command).then_refused("tenant_not_found")
    assert before.message == after.message


def test_suspending_and_resuming_take_turns() -> None:
    suspended = TenantSuspended(T, "unpaid", 2.0)
    given(CREATED).when(SuspendTenant(T, "unpaid", 2.0)).then(suspended)
    given(CREATED, suspended).when(SuspendTenant(T, "again", 3.0)).then_nothing()
    given(CREATED, suspended).when(ResumeTenant(T, 3.0)).then(TenantResumed(T, 3.0))
    given(CREATED).when(ResumeTenant(T, 3.0)).then_nothing()


def set_to(budget: Budget, limit: int | None, at: float) -> TenantBudgetSet:
    rule = (budget.budget_id, budget.scope, budget.target, budget.unit)
    return TenantBudgetSet(T, *rule, limit, budget.period, at)


def test_budgets_are_set_changed_and_removed_by_name() -> None:
    zero, none = replace_struct(ALL, limit=0), set_to(ALL, None, 4.0)
    given(CREATED).when(SetBudget(T, zero, 2.0)).then(set_to(ALL, 0, 2.0))
    given(CREATED, set_to(ALL, 0, 2.0)).when(SetBudget(T, zero, 3.0)).then_nothing()
    given(CREATED, set_to(ALL, 0, 2.0)).when(SetBudget(T, ALL, 3.0)).then(set_to(ALL, 100, 3.0))
    given(CREATED, set_to(ALL, 0, 2.0)).when(RemoveBudget(T, "all", 4.0)).then(none)
    given(CREATED, set_to(ALL, 0, 2.0), none).when(RemoveBudget(T, "all", 5.0)).then_nothing()


def test_a_reset_forgives_and_a_raise_does_not_take_that_back() -> None:
    """Unless the budget now counts something else."""
    history = [CREATED, set_to(ALL, 100, 2.0), TenantBudgetReset(T, "all", 70, 3.0)]
    given(*history[:2]).when(ResetBudget(T, "all", 70, 3.0)).then(history[2])
    given(CREATED).when(ResetBudget(T, "all", 70, 3.0)).then_refused("budget_not_found")
    raised = fold(tenant.DECIDER, [*history, set_to(ALL, 200, 4.0)]).budgets["all"]
    assert raised == replace_struct(ALL, limit=200, forgiven=70, forgiven_at=3.0)
    monthly = replace_struct(ALL, period="month")
    changed = fold(tenant.DECIDER, [*history, set_to(monthly, 100, 4.0)]).budgets["all"]
    assert changed == monthly


@pytest.mark.parametrize(
    "wrong",
    [{"limit": -1}, {"limit": 2**62}, {"period": "week"}, {"scope": "org"}, {"unit": "eggs"},
     {"scope": "key"}, {"target": "x"}, {"scope": "model", "target": "x" * 256}],
)  # fmt: skip
def test_a_budget_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    command = SetBudget(T, replace_struct(ALL, **wrong), 2.0)
    given(CREATED).when(command).then_refused("invalid_budget")


@pytest.mark.parametrize(
    ("unit", "text", "told"),
    [
        ("tokens", "9" * 40, "limit is 0 or more tokens, and below 4611686018427387904."),
        ("tokens", "9" * 41, "A number of tokens is written in 1 to 40 digits."),
        ("money", "9" * 15, "limit is 0 or more money, and below 1000000000000."),
        ("money", "9" * 40, "at most 15 digits, and 12 decimals"),
    ],
)
def test_a_limit_beyond_the_bound_is_told_the_bound(unit: str, text: str, told: str) -> None:
    with pytest.raises(Invalid, match=told):
        check_budget(replace_struct(ALL, unit=unit, limit=parse_limit(unit, text)))


def test_the_budget_of_old_is_one_of_the_tenant_in_tokens() -> None:
    """As events of the first releases are read."""
    old = b'{"at":3.0,"period":"day","tenant_id":"acme","tokens":%b,"type":"TenantBudgetSet"}'
    for text, limit in ((b"5", 5), (b"null", None)):
        read = decode("TenantBudgetSet", 1, old % text)
        assert read == TenantBudgetSet(T, "default", "tenant", "", "tokens", limit, "day", 3.0)


def test_a_key_is_issued_once_and_revoked_for_good() -> None:
    given(CREATED).when(ISSUE).then(ISSUED)
    given(CREATED, ISSUED).when(ISSUE).then_nothing()
    given(CREATED, ISSUED).when(RevokeApiKey(T, K, 3.0)).then(REVOKED)
    given(CREATED, ISSUED, REVOKED).when(RevokeApiKey(T, K, 4.0)).then_nothing()
    given(CREATED, ISSUED, REVOKED).when(ISSUE).then_refused("key_revoked")
    given(CREATED).when(RevokeApiKey(T, K, 3.0)).then_refused("key_not_found")


def test_a_key_needs_known_scopes_and_a_future() -> None:
    for scopes in ((), ("root",), ("inference", "root")):
        command = IssueApiKey(T, K, "k", "wxyz", scopes, None, 2.0)
        given(CREATED).when(command).then_refused("invalid_scope")
    for expires_at in (1.0, 2.0, -1e308, 1e12, 1e308):
        command = IssueApiKey(T, K, "k", "wxyz", ("inference",), expires_at, 2.0)
        given(CREATED).when(command).then_refused("invalid_expiry")


def test_a_tenant_with_live_keys_is_not_deleted() -> None:
    one = given(CREATED, ISSUED).when(DeleteTenant(T, 4.0)).then_refused("in_use")
    assert one.message == "The tenant has 1 live key; revoke what is live first."
    other = ApiKeyIssued(T, KeyId("b" * 12), "ci", "wxyz", ("inference",), None, 2.0)
    two = given(CREATED, ISSUED, other).when(DeleteTenant(T, 4.0)).then_refused("in_use")
    assert two.message == "The tenant has 2 live keys; revoke what is live first."
    given(CREATED, ISSUED, REVOKED).when(DeleteTenant(T, 4.0)).then(TenantDeleted(T, 4.0))


def test_state_holds_what_the_next_decision_needs() -> None:
    state = fold(tenant.DECIDER, [CREATED, ISSUED, set_to(ALL, 5, 3.0), REVOKED])
    assert state == replace(
        tenant.Tenant(),
        exists=True,
        budgets={"all": replace_struct(ALL, limit=5)},
        keys=Keys({}, frozenset({K})),
    )
