"""Erasing captured text: the order is an event first, and then the keys go.

The event comes first so that who ordered it, and why, is on record whatever happens; a process that
dies before the keys are gone leaves that to the next round of the controller, which looks at every
key there is and asks the log whether it may still be there::

    TenantTextErased(acme, generation 2)    durable
    killed                                  key 2 is still there
    finish_all                              acme is in generation 3: keys up to 2 are destroyed

A deleted tenant's keys go the same way.
"""

from typing import Protocol

from controlplane.application.failpoints import passing
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import Clock
from controlplane.domain import tenant

_EVERY = 2**31 - 1


class TextKeys(Protocol):
    """Where the data keys are; blocking."""

    def destroy(self, tenant_id: str, upto: int, now: float) -> int:
        """The tenant's keys up to that generation, for good; how many were there."""

    def tenants_with_keys(self) -> dict[str, int]:
        """The oldest generation whose key is not destroyed, by tenant."""


def finish(handler: CommandHandler, keys: TextKeys, clock: Clock, tenant_id: str) -> int:
    """Destroy the keys that the log says are erased; how many there were."""
    passing("erase.recorded")
    _, state = handler.state(tenant.DECIDER, tenant.DECIDER.stream(tenant_id))
    upto = _EVERY if state.deleted else state.capture.generation - 1
    destroyed = keys.destroy(tenant_id, upto, clock.now()) if upto >= 0 else 0
    passing("erase.destroyed")
    return destroyed


def finish_all(handler: CommandHandler, keys: TextKeys, clock: Clock) -> int:
    """Of every tenant that has keys; how many were destroyed."""
    return sum(finish(handler, keys, clock, name) for name in keys.tenants_with_keys())
