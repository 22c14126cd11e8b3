"""An API key's life: two secrets at a time, paused and resumed, revoked for good."""

import pytest

from controlplane.domain import tenant
from controlplane.domain.api_key import MAX_OVERLAP_SECONDS, Key, why_not
from controlplane.domain.decider import Event, fold
from controlplane.domain.event_types import decode
from controlplane.domain.ids import KeyId, TenantId
from controlplane.domain.policy import ROLES
from controlplane.domain.tenant import (
    ApiKeyIssued,
    ApiKeyResumed,
    ApiKeyRevoked,
    ApiKeyRotated,
    ApiKeySuspended,
    IssueApiKey,
    ResumeApiKey,
    RevokeApiKey,
    RotateApiKey,
    SuspendApiKey,
    TenantCreated,
)
from tests.domain.scenario import Scenario

T = TenantId("acme")
K = KeyId("0123456789ab")
ISSUED = (
    TenantCreated(T, "acme", "standard", 1.0),
    ApiKeyIssued(T, K, "laptop", "wxyz", ("inference",), 1000.0, 2.0),
)
ROTATE = RotateApiKey(T, K, "s2", "abcd", 100.0, 10.0)
ROTATED = ApiKeyRotated(T, K, "s2", "abcd", 100.0, 10.0)
SUSPENDED = ApiKeySuspended(T, K, "leaked?", 20.0)


def given(*events: Event) -> Scenario:
    return Scenario(tenant.DECIDER, events)


def key_after(*events: Event) -> Key:
    return fold(tenant.DECIDER, events).keys.live[K]


def test_after_a_rotation_the_new_secret_is_good_and_the_old_one_until_the_chosen_time() -> None:
    key = key_after(*ISSUED, ROTATED)
    assert [why_not(key, secret, 99.9) for secret in ("s2", K, "s1", "")] == [
        "", "", "rotated", "rotated"
    ]  # fmt: skip
    assert [why_not(key, secret, 100.0) for secret in ("s2", K)] == ["", "rotated"]
    assert why_not(key, "s2", 1000.0) == "expired"


def test_only_two_secrets_are_good_at_a_time() -> None:
    """A second rotation ends the first secret, however long it had left."""
    key = key_after(*ISSUED, ROTATED, ApiKeyRotated(T, K, "s3", "efgh", 500.0, 11.0))
    assert [why_not(key, secret, 12.0) for secret in (K, "s2", "s3")] == ["rotated", "", ""]


def test_a_key_that_was_never_rotated_has_no_second_secret() -> None:
    """Not even the empty name that stands for none."""
    assert why_not(key_after(*ISSUED), "", 3.0) == "rotated"


def test_rotating_is_decided_once_and_within_a_year() -> None:
    given(*ISSUED).when(ROTATE).then(ROTATED)
    given(*ISSUED, ROTATED).when(ROTATE).then_nothing()
    for until in (9.9, 10.1 + MAX_OVERLAP_SECONDS):
        command = RotateApiKey(T, K, "s2", "abcd", until, 10.0)
        given(*ISSUED).when(command).then_refused("invalid_expiry")


def test_a_suspended_key_opens_nothing_until_it_is_resumed() -> None:
    given(*ISSUED).when(SuspendApiKey(T, K, "leaked?", 20.0)).then(SUSPENDED)
    given(*ISSUED, SUSPENDED).when(SuspendApiKey(T, K, "again", 21.0)).then_nothing()
    assert why_not(key_after(*ISSUED, SUSPENDED), K, 21.0) == "suspended"
    resumed = ApiKeyResumed(T, K, 22.0)
    given(*ISSUED, SUSPENDED).when(ResumeApiKey(T, K, 22.0)).then(resumed)
    given(*ISSUED).when(ResumeApiKey(T, K, 22.0)).then_nothing()
    assert why_not(key_after(*ISSUED, SUSPENDED, resumed), K, 23.0) == ""


@pytest.mark.parametrize(
    "command",
    [ROTATE, SuspendApiKey(T, K, "", 9.0), ResumeApiKey(T, K, 9.0)],
)
def test_a_revoked_key_and_a_strangers_key_are_equally_absent(
    command: tenant.TenantCommand,
) -> None:
    before = given(ISSUED[0]).when(command).then_refused("key_not_found")
    revoked = ApiKeyRevoked(T, K, 3.0)
    after = given(*ISSUED, revoked).when(command).then_refused("key_not_found")
    assert before.message == after.message


def test_a_suspended_key_can_be_revoked() -> None:
    given(*ISSUED, SUSPENDED).when(RevokeApiKey(T, K, 30.0)).then(ApiKeyRevoked(T, K, 30.0))


def test_a_key_has_a_known_role() -> None:
    for role in (*ROLES, "root"):
        command = IssueApiKey(T, K, "k", "wxyz", ("inference",), None, 2.0, role)
        if role in ROLES:
            given(ISSUED[0]).when(command).then(
                ApiKeyIssued(T, K, "k", "wxyz", ("inference",), None, 2.0, role)
            )
        else:
            given(ISSUED[0]).when(command).then_refused("invalid_role")


def test_a_key_of_before_roles_has_the_one_that_its_scopes_gave_it() -> None:
    """Version 1 had no role: an admin scope made an administrator."""
    stored = (
        b'{"at":7.0,"expires_at":null,"key_id":"0123456789ab","last4":"wxyz","name":"k",'
        b'"scopes":["%b"],"tenant_id":"acme","type":"ApiKeyIssued"}'
    )
    for scope, role in ((b"inference", "developer"), (b"admin:read", "admin")):
        event = decode("ApiKeyIssued", 1, stored % scope)
        assert isinstance(event, ApiKeyIssued)
        assert (event.role, event.models) == (role, ())
