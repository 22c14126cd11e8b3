"""What is recorded for the audit alone, and changes no aggregate.

Stream ``refusals``: an order that was not carried out is a fact too. Stream ``access``: who was
given a login, who used one, and who read a captured text. Stream ``limits``: when rates were not
shared by all gateways. Stream ``controller-epoch``: who moved the fleet on past what its nodes had
accepted, after a restore. No password, token or key is ever in any of them.
"""

import re
from typing import Any

import msgspec

from controlplane.domain.decider import Command, Event

REFUSALS = "refusals"
ACCESS = "access"
LIMITS = "limits"
EPOCH = "controller-epoch"
MAX_ASKED_BYTES = 4096


class CommandRefused(Event, frozen=True, tag_field="type", tag="CommandRefused"):
    """``target`` is the stream the order was for; ``asked`` are the order's own fields, empty if
    it never became a command or is too large to be kept."""

    command: str
    target: str
    code: str
    detail: str
    at: float
    asked: dict[str, Any] = msgspec.field(default_factory=dict)


class DashboardUserSaved(Event, frozen=True, tag_field="type", tag="DashboardUserSaved"):
    """A user was made, or has another password, role or tenant. ``role_before`` is empty for a
    new one; ``tenant_id`` is empty for one of the whole fleet."""

    username: str
    role_before: str
    role: str
    tenant_id: str
    at: float


class SignedIn(Event, frozen=True, tag_field="type", tag="SignedIn"):
    """``method``: password, or oidc."""

    username: str
    method: str
    at: float


class LimitsUnshared(Event, frozen=True, tag_field="type", tag="LimitsUnshared"):
    """A gateway cannot reach what the rate limits are shared in; ``policy`` holds meanwhile:
    local (it limits by itself) or refuse."""

    gateway: str
    policy: str
    at: float


class LimitsShared(Event, frozen=True, tag_field="type", tag="LimitsShared"):
    """It can again."""

    gateway: str
    at: float


class TextRead(Event, frozen=True, tag_field="type", tag="TextRead"):
    """Somebody read what a request of the tenant asked and was answered; in no case the text."""

    tenant_id: str
    request_id: str
    at: float


class EpochAdvanced(Event, frozen=True, tag_field="type", tag="EpochAdvanced"):
    """The next controller leads with one more than ``epoch``; ``epoch_before`` was the last one
    that led (0: none)."""

    epoch_before: int
    epoch: int
    at: float


AuditEvent = (
    CommandRefused
    | DashboardUserSaved
    | SignedIn
    | LimitsUnshared
    | LimitsShared
    | TextRead
    | EpochAdvanced
)


_SECRET = re.compile(
    r"sk_[0-9a-f]{12}\.[A-Za-z0-9_-]{8,}|tkt_[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*\.?[A-Za-z0-9_-]*"
)


def redacted(text: str) -> str:
    """``text`` without keys, tickets and JWTs, which people paste where they do not belong."""
    return _SECRET.sub("[secret]", text)


def asked_of(command: Command) -> dict[str, Any]:
    """The command's fields as they are kept; ``now`` says nothing."""
    fields = msgspec.to_builtins(command)
    fields.pop("now", None)
    text = msgspec.json.encode(fields)
    if len(text) > MAX_ASKED_BYTES:
        return {}
    kept: dict[str, Any] = msgspec.json.decode(redacted(text.decode()))
    return kept


_CAUSE = "undo:"


def cause_of_undo(position: int) -> str:
    """The causation id of an event that takes back the one at ``position``."""
    return f"{_CAUSE}{position}"


def undone_position(causation_id: str) -> int | None:
    """The position that an event with this causation id takes back; None if it takes back none."""
    number = causation_id.removeprefix(_CAUSE)
    return int(number) if number != causation_id and number.isdigit() else None
