"""People: creating them, their principal, and the brake on guessing passwords."""

import hashlib

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.db import transaction
from django.db.models import F

from controlplane.adapters.access.models import DashboardUser, LoginFailures
from controlplane.domain.policy import Principal

MAX_FAILURES = 5
FAILURE_WINDOW_SECONDS = 300.0


@transaction.atomic
def save_user(username: str, password: str, role: str, tenant_id: str = "") -> User:
    """Create the user, or set the password and role of an existing one."""
    user, _ = User.objects.get_or_create(username=username)
    user.set_password(password)
    user.save()
    save_role(user, role, tenant_id)
    return user


def save_role(user: User, role: str, tenant_id: str) -> None:
    DashboardUser.objects.update_or_create(
        user=user, defaults={"role": role, "tenant_id": tenant_id}
    )


def principal_of(user: AbstractBaseUser | AnonymousUser) -> Principal | None:
    """The principal of a logged-in user; None without a login or without a role."""
    if not user.is_authenticated or not user.is_active:
        return None
    dashboard = DashboardUser.objects.filter(user_id=user.pk).first()
    if dashboard is None:
        return None
    return Principal(f"user:{user.get_username()}", dashboard.role, dashboard.tenant_id)


def role_of(username: str) -> str:
    """The role that the user has now; empty if there is none."""
    found = DashboardUser.objects.filter(user__username=username).first()
    return found.role if found else ""


def seconds_until_login(username: str, address: str, now: float) -> float:
    """0.0, or how long this user name must wait from this address after too many failures.

    Counted per name and address: by name alone, anybody could lock the administrator out.
    """
    row = LoginFailures.objects.filter(who=_who(username, address)).first()
    if row is None or row.count < MAX_FAILURES:
        return 0.0
    return max(0.0, row.since + FAILURE_WINDOW_SECONDS - now)


@transaction.atomic
def note_failed_login(username: str, address: str, now: float) -> None:
    who = _who(username, address)
    LoginFailures.objects.filter(since__lt=now - FAILURE_WINDOW_SECONDS).delete()
    LoginFailures.objects.get_or_create(who=who, defaults={"since": now})
    LoginFailures.objects.filter(who=who).update(count=F("count") + 1)


def note_login(username: str, address: str) -> None:
    LoginFailures.objects.filter(who=_who(username, address)).delete()


def _who(username: str, address: str) -> str:
    """A digest: what people type into a user-name field is sometimes their password."""
    return hashlib.sha256(f"{username}\x00{address}".encode()).hexdigest()
