"""What is asked for, as the ledger says: each request once, open ones now, on either database."""

from dataclasses import replace
from typing import Any

import pytest

from controlplane.adapters.ledger import rollup
from controlplane.adapters.ledger.arrivals import LedgerArrivals
from controlplane.adapters.ledger.models import InferenceRequest
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.application.demand import Arrival
from controlplane.application.ports import Intent
from tests.contracts.ledgers import AT, an_end, an_intent, in_thread


@pytest.fixture(autouse=True)
async def empty(alias: str) -> None:
    await in_thread(alias, lambda: InferenceRequest.objects.using(alias).all().delete())


async def admit(ledger: LedgerStore, *times: float, version_id: str = "m@v1") -> list[Intent]:
    intents = [an_intent(at=AT + at, version_id=version_id) for at in times]
    for intent in intents:
        await ledger.admit(intent)
    return intents


async def test_what_is_open_is_counted_by_version(ledger: LedgerStore, alias: str) -> None:
    first, _ = await admit(ledger, 0, 1)
    await admit(ledger, 2, version_id="n@v1")
    arrivals = LedgerArrivals(alias)
    assert await in_thread(alias, arrivals.open) == {"m@v1": 2, "n@v1": 1}
    await ledger.settle(an_end(first))
    assert await in_thread(alias, arrivals.open) == {"m@v1": 1, "n@v1": 1}


async def test_every_arrival_comes_once_from_a_time_on(ledger: LedgerStore, alias: str) -> None:
    await admit(ledger, 0, 10, 20, 30)
    arrivals = LedgerArrivals(alias)

    async def new() -> list[Arrival]:
        return list(await in_thread(alias, lambda: arrivals.arrived(AT + 15)))

    assert [one.at - AT for one in await new()] == [20, 30]
    assert await new() == []
    await admit(ledger, 40)
    assert [one.at - AT for one in await new()] == [40]


async def test_a_lower_id_that_is_committed_later_is_not_missed(
    ledger: LedgerStore, alias: str
) -> None:
    """As on PostgreSQL, where ids are given out before the commit."""
    await admit(ledger, 0, 1)

    def shift() -> None:
        """Free the id before the last."""
        last = InferenceRequest.objects.using(alias).order_by("-id").first()
        assert last is not None
        InferenceRequest.objects.using(alias).filter(id=last.id).update(id=last.id + 1)

    await in_thread(alias, shift)
    arrivals = LedgerArrivals(alias)
    assert len(await in_thread(alias, lambda: arrivals.arrived(0.0))) == 2

    def late() -> Any:
        rows = InferenceRequest.objects.using(alias)
        last = rows.order_by("-id").values().first()
        assert last is not None
        rows.create(**last | {"id": last["id"] - 1, "request_id": "late", "at": AT + 0.5})

    await in_thread(alias, late)
    assert [one.at - AT for one in await in_thread(alias, lambda: arrivals.arrived(0.0))] == [0.5]


async def test_first_tokens_are_of_what_ended_since(ledger: LedgerStore, alias: str) -> None:
    before, after, cancelled = await admit(ledger, 0, 1, 2)
    await ledger.settle(replace(an_end(before), ttft_ms=100.0))
    arrivals = LedgerArrivals(alias)
    assert await in_thread(alias, arrivals.first_tokens) == []
    await ledger.settle(replace(an_end(after), ttft_ms=250.0))
    await ledger.settle(replace(an_end(cancelled), ttft_ms=None))
    (found,) = await in_thread(alias, arrivals.first_tokens)
    assert (found.version_id, found.at, found.ttft_s) == ("m@v1", AT + 1, 0.25)
    assert await in_thread(alias, arrivals.first_tokens) == []


async def test_hours_are_those_of_the_roll_ups(ledger: LedgerStore, alias: str) -> None:
    hour = int(AT // 3600)
    for intent in await admit(ledger, 0, 7200, 7200, version_id="hours@v1"):
        await ledger.settle(an_end(intent))
    await in_thread(alias, lambda: rollup.catch_up_all(alias))
    arrivals = LedgerArrivals(alias)
    found = await in_thread(alias, lambda: arrivals.hours(hour + 1))
    assert found[("hours@v1", hour + 2)] == 2 and ("hours@v1", hour) not in found
