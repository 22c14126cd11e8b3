"""The retention policy, as the log has it now."""

from typing import Any

from django.conf import settings

from controlplane import bootstrap
from controlplane.domain import retention
from controlplane.domain.errors import NotFound


def policy(kind: str) -> tuple[dict[str, Any], int]:
    """Of one kind, and the version of its stream."""
    if kind not in retention.KINDS:
        raise NotFound("retention", kind)
    decider = retention.DECIDER
    version, state = bootstrap.command_handler().state(decider, decider.stream(kind))
    return {
        "kind": kind,
        "days": retention.days_of(kind, state),
        "default_days": retention.DEFAULT_DAYS[kind],
        "goes": kind != retention.REQUESTS or bool(settings.ENV.archive),
        "removed_upto": state.removed_upto,
    }, version
