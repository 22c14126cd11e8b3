"""Rows for the ledger and events for the log, by a seed: realistic, awkward text included."""

import random
from typing import Any

from django.db import connections

from controlplane.adapters.ledger.batch import admit_all, settle_all
from controlplane.adapters.ledger.statements import statements
from controlplane.application.ports import Attempt, EventStore, Intent, Terminal
from controlplane.domain.decider import Event
from controlplane.domain.money import Price
from controlplane.domain.tenant import TenantCreated, TenantSuspended, TenantTierChanged
from tests.contracts.stores import append

AT = 1_700_000_000.0
WORDS = ("stop", "length", "", "=1+1", "'quoted", "a,b", 'say "hi"', "line\nbreak", "ü€😀", "-2")


def intent(number: int, chance: random.Random) -> Intent:
    return Intent(
        request_id=f"req-{number:06d}",
        tenant_id=f"t{number % 7}",
        subject=chance.choice(("key-1", "jwt:ann", "user:bob", *WORDS)),
        end_user=chance.choice(("", "ann", *WORDS)),
        endpoint="chat",
        requested_model="m",
        route=chance.choice(("", "r1")),
        arm=chance.choice(("", "a", "b")),
        version_id="m@v1",
        latency_class="standard",
        num_prompt_tokens=chance.randrange(1, 500),
        max_output_tokens=chance.randrange(1, 500),
        at=AT + number + chance.random(),
        gateway="gw-1",
        price=Price(*sorted((chance.randrange(10**6) for _ in range(3)), reverse=True)),
    )


def terminal(number: int, chance: random.Random) -> Terminal:
    ok = chance.random() < 0.8
    return Terminal(
        request_id=f"req-{number:06d}",
        outcome="ok" if ok else chance.choice(("error", "cancelled", "timeout")),
        finish_reason=chance.choice(WORDS),
        error_code="" if ok else "node_lost",
        node_id=f"n{number % 3}",
        replica_id="m.v1.g1.0",
        num_prompt_tokens=chance.randrange(500),
        num_cached_tokens=0,
        num_output_tokens=chance.randrange(500),
        ttft_ms=chance.random() * 100 if ok else None,
        queue_ms=None if chance.random() < 0.2 else chance.random(),
        duration_ms=chance.random() * 1e4,
        at=AT + number + 2,
        tries=tuple(_attempt(number, one) for one in range(1, 2 + number % 3)),
    )


def _attempt(number: int, one: int) -> Attempt:
    """A request's tries differ in length, so that a mix-up shows."""
    began = AT + number + one / 7
    return Attempt(0, one, f"n{one}", "m.v1.g1.0", "ok", "", 0, one, None, began, 1e3 / one)


def fill_ledger(count: int, seed: int = 1, first: int = 1, alias: str = "default") -> None:
    """``count`` ended requests, settled in an order of their own."""
    chance, wrapper = random.Random(seed), connections[alias]
    sql: Any = statements(wrapper.vendor)
    numbers = list(range(first, first + count))
    with wrapper.cursor() as outer:
        raw = wrapper.connection.cursor()
        outer.execute("SELECT 1")
        raw.execute(sql.begin)
        admit_all(raw, sql, [intent(number, chance) for number in numbers])
        chance.shuffle(numbers)
        for start in range(0, count, 100):
            batch = numbers[start : start + 100]
            settle_all(raw, sql, [terminal(number, chance) for number in batch])
        raw.execute("COMMIT")


def fill_events(store: EventStore, count: int, seed: int = 1) -> None:
    """``count`` events over a few tenants' streams."""
    chance = random.Random(seed)
    for start in range(0, count, 500):
        for tenant in range(7):
            share = [
                event(f"t{tenant}", chance)
                for number in range(start, min(start + 500, count))
                if number % 7 == tenant
            ]
            if share:
                store.append(append(f"tenant-t{tenant}", None, *share))


def event(tenant: str, chance: random.Random) -> Event:
    made: Event = chance.choice(
        (
            TenantCreated(tenant, chance.choice(WORDS), "free", AT),  # type: ignore[arg-type]
            TenantTierChanged(tenant, "premium", AT),  # type: ignore[arg-type]
            TenantSuspended(tenant, chance.choice(WORDS), AT),  # type: ignore[arg-type]
        )
    )
    return made
