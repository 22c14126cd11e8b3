"""Keys, tickets, roles and the brake on guessing."""

from io import StringIO
from typing import Any

from django.core.management import call_command

from controlplane.adapters.access import keys, tokens, users
from controlplane.adapters.access.models import ApiKeySecret
from controlplane.config import settings as product
from controlplane.domain.policy import (
    READ,
    RESOURCES,
    ROLES,
    USE,
    WRITE,
    Principal,
    allowed,
    may_grant,
)


def test_a_key_is_recognised_by_its_full_text_only() -> None:
    key_id, secret, full = tokens.new_key()
    assert tokens.split_key(full) == (key_id, secret)
    assert tokens.secret_matches(secret, tokens.hash_secret(secret))
    assert not tokens.secret_matches(secret + "x", tokens.hash_secret(secret))
    for text in (
        "' OR '1'='1",
        "sk_",
        f"sk_{key_id}",
        full + "\n",
        full.upper(),
        "sk_" + "9" * 9000,
    ):
        assert tokens.split_key(text) is None


def test_a_ticket_holds_for_ten_minutes_and_not_a_byte_changed() -> None:
    ticket = tokens.sign_ticket("acme", "user:ann", now=1000.0, seconds=1e9)
    assert tokens.read_ticket(ticket.text, now=1599.0) == ticket
    assert tokens.read_ticket(ticket.text, now=1600.0) is None
    for index in range(4, len(ticket.text) - 1):
        other = "A" if ticket.text[index] != "A" else "B"
        forged = ticket.text[:index] + other + ticket.text[index + 1 :]
        assert tokens.read_ticket(forged, now=1001.0) is None
    for text in ("tkt_", "tkt_a.b", "tkt_é.é", "tkt_" + "a" * 9000):
        assert tokens.read_ticket(text, now=1001.0) is None


def test_a_secret_is_kept_as_a_hash_and_its_use_noted_once_a_minute() -> None:
    """Whoever reads the table learns no secret; a busy key costs one write a minute."""
    key_id, secret, full = tokens.new_key()
    keys.store_secret(key_id, key_id, secret, "acme")
    assert secret not in str(ApiKeySecret.objects.values().get())
    found = keys.match(full)
    assert found is not None and found.tenant_id == "acme"
    for now in (1000.0, 1030.0, 1059.0):
        keys.write_last_use({key_id: now})
    assert keys.last_uses("acme") == {key_id: 1000.0}
    keys.write_last_use({key_id: 1061.0})
    assert keys.last_uses("acme") == {key_id: 1061.0}
    keys.forget_key(key_id)
    assert keys.match(full) is None


def test_the_policy_denies_what_it_does_not_name() -> None:
    for role in (*ROLES, "", "root"):
        for resource in (*RESOURCES, "everything"):
            principal = Principal("user:x", role)
            if role in ("", "root") or resource == "everything":
                assert not allowed(principal, READ, resource)
                assert not allowed(principal, WRITE, resource)
            assert not allowed(principal, "delete", resource)


def test_a_confined_admin_rules_its_tenant_and_not_the_fleet() -> None:
    key = Principal("key:1", "admin", "acme", ("inference", "admin:write"))
    assert allowed(key, WRITE, "key") and allowed(key, READ, "request")
    for resource in ("budget", "tenant", "model", "node", "route", "catalog", "user", "system"):
        assert not allowed(key, WRITE, resource)
    assert not allowed(key, READ, "node")
    assert key.reaches("acme") and not key.reaches("globex")


def test_readers_write_nothing_and_use_nothing() -> None:
    for role in ("auditor", "viewer"):
        for action in (WRITE, USE):
            assert not any(allowed(Principal("user:x", role), action, r) for r in RESOURCES)


def test_a_scope_narrows_a_role_and_never_widens_it() -> None:
    """For every role, resource and action: with fewer scopes, fewer rights."""
    for role in ROLES:
        everything = Principal("key:1", role)
        for scopes in ((), ("inference",), ("admin:read",), ("admin:write",), ("all",)):
            key = Principal("key:1", role, scopes=scopes)
            for resource in RESOURCES:
                for action in (READ, WRITE, USE):
                    assert allowed(everything, action, resource) or not allowed(
                        key, action, resource
                    )
    assert not any(allowed(Principal("k", "admin", "", ("inference",)), READ, r) for r in RESOURCES)


def test_nobody_grants_above_themselves() -> None:
    """Administrators any role; developers their own, for inference; the others nothing."""
    for role in ROLES:
        assert may_grant(Principal("user:x", "admin"), role, ("admin:write",))
        mine = Principal("user:x", "developer")
        assert may_grant(mine, role, ("inference",)) == (role == "developer")
        assert not may_grant(mine, role, ("inference", "admin:read"))


def test_five_wrong_passwords_close_the_door_for_a_while() -> None:
    for _ in range(users.MAX_FAILURES):
        assert users.seconds_until_login("ann", "10.0.0.1", now=1000.0) == 0
        users.note_failed_login("ann", "10.0.0.1", now=1000.0)
    assert users.seconds_until_login("ann", "10.0.0.1", now=1100.0) == 200
    assert users.seconds_until_login("ann", "10.0.0.2", now=1100.0) == 0
    assert users.seconds_until_login("ann", "10.0.0.1", now=1301.0) == 0
    users.note_login("ann", "10.0.0.1")
    assert users.seconds_until_login("ann", "10.0.0.1", now=1100.0) == 0


def test_create_admin_prints_a_password_that_works(settings, tmp_path) -> None:
    settings.DATA_DIR = tmp_path
    out = StringIO()
    call_command("create_admin", stdout=out)
    password = (tmp_path / "initial_admin_password").read_text().strip()
    assert password in out.getvalue()
    assert (tmp_path / "initial_admin_password").stat().st_mode & 0o077 == 0
    user = users.User.objects.get(username="admin")
    assert user.check_password(password)
    assert users.principal_of(user) == Principal("user:admin", "admin")


def test_passwords_are_kept_by_argon2_at_its_full_cost(settings: Any) -> None:
    """The product's own setting, and not the cheap one with which the other tests log in."""
    settings.PASSWORD_HASHERS = product.PASSWORD_HASHERS
    user = users.save_user("ann", "correct horse", "viewer")
    assert user.password.startswith("argon2$argon2id$v=19$m=102400,t=2,p=8$")
