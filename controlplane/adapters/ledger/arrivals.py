"""What is being asked for, read from the ledger: it alone knows of every request, whichever gateway
admitted it, and still knows after a restart of everything.

``open`` is a count over the partial index of live requests. ``arrived`` follows the intents by id.
PostgreSQL gives ids out before the commit, so a lower id may appear after a higher one: each read
goes back ``OVERLAP`` ids and passes over what it has seen::

    read 1    ids 7 8 10             (9 is not committed yet)
    read 2    from 11 - 256 on       8 and 10 are known, 9 and 11 are new

An intent that commits later than that is missed: demand is an average, and whoever waits for a
model is found by ``open``. One thread uses it.
"""

from collections.abc import Iterable
from typing import Any

from django.db.models import Count, Max, Min, Sum

from controlplane.adapters.ledger.models import InferenceRequest, Rollup
from controlplane.application.demand import Arrival, FirstToken

OVERLAP = 256
BATCH = 20_000


class LedgerArrivals:
    """``demand.Arrivals``."""

    def __init__(self, alias: str = "default") -> None:
        self._requests = InferenceRequest.objects.using(alias)
        self._rollups = Rollup.objects.using(alias)
        self._next_id: int | None = None
        self._seen: set[int] = set()
        self._position = 0

    def open(self) -> dict[str, int]:
        live = self._requests.filter(outcome="").values("version_id")
        return {row["version_id"]: row["num"] for row in live.annotate(num=Count("id"))}

    def arrived(self, since: float) -> list[Arrival]:
        if self._next_id is None:
            self._next_id = self._first_id(since)
        rows = list(
            self._requests.filter(id__gte=self._next_id - OVERLAP, at__gte=since)
            .order_by("id")
            .values_list("id", "at", "version_id")[:BATCH]
        )
        new = [Arrival(at, version_id) for one, at, version_id in rows if one not in self._seen]
        if rows:
            self._next_id = rows[-1][0] + 1
        self._seen = {one for one, _, _ in rows if one >= self._next_id - OVERLAP}
        return sorted(new, key=lambda one: one.at)

    def first_tokens(self) -> list[FirstToken]:
        """Of the requests that ended since the last call; none at the first."""
        if not self._position:
            self._position = self._requests.aggregate(Max("position"))["position__max"] or 0
        ended = self._requests.filter(position__gt=self._position).order_by("position")
        rows: Iterable[Any] = list(
            ended.values_list("position", "version_id", "latency_class", "at", "ttft_ms")[:BATCH]
        )
        found = []
        for position, version_id, latency_class, at, ttft_ms in rows:
            self._position = position
            if ttft_ms is not None:
                found.append(FirstToken(version_id, latency_class, at, ttft_ms / 1000))
        return found

    def hours(self, first: int) -> dict[tuple[str, int], int]:
        rows = self._rollups.filter(hour__gte=first).values("version_id", "hour")
        counted = rows.annotate(num=Sum("num_requests"))
        return {(row["version_id"], row["hour"]): row["num"] for row in counted}

    def _first_id(self, since: float) -> int:
        """The first id at or after ``since``, by halving: times grow with ids, give or take
        seconds."""
        ends = self._requests.aggregate(low=Min("id"), high=Max("id"))
        low, high = ends["low"] or 1, (ends["high"] or 0) + 1
        while low < high:
            middle = (low + high) // 2
            later = self._requests.filter(id__gte=middle).order_by("id")
            row = later.values_list("at").first()
            if row is not None and row[0] < since:
                low = middle + 1
            else:
                high = middle
        return int(low)
