"""Whose turn it is among the tenants of one latency class: a virtual token counter for each.

A tenant's account grows by what it is served, over its weight: one for each prompt token that is
computed when a request of it starts (those found in the prefix cache cost nothing), two for each
token generated. The next slot goes to the waiting tenant that has been served least; inside a
tenant the order is that of arrival. (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024: VTC.) Example, equal weights, one slot, requests of 10 prompt and 20 output tokens, "a"
has three of them when "b" comes, just after the first has started:

    a1 starts   a 10                 a1 ends   a 50
    b arrives   lifted to a's 10     b1 starts b 20, ends b 60
    a2 starts   a 60                 a2 ends   a 100, so b2 comes before a3

So one tenant's long line costs another at most the slot's present holder, not the line.

A tenant that comes back is lifted to the least that a waiting tenant has been served, or, if none
waits, to where the last one stood that was chosen: nobody saves up, and nobody pays for what it
took while no other wanted it. Tenants are told apart by the salt of their prefix cache, which
names nobody. A plain round robin was rejected: it gives a tenant of long answers ten times the
tokens of one of short answers. Deficit round robin needs the cost of a request beforehand, and
nobody knows how long an answer gets.

The least served is found by a heap whose entries may lie: accounts only grow, so an entry is never
too high, and only the one on top has to be made true. A step costs no more with a thousand tenants
than with one.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuagent.engine.batch import Sequence

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0  # of a token; those of the paper
MAX_ACCOUNTS = 1024

Entry = tuple[float, float, int, "Account"]  # served, arrival of the first, unique, whose


@dataclass(slots=True, eq=False)
class Account:
    """What one tenant has been served in one class, in weighted tokens, and what waits of it."""

    served: float = 0.0
    waiting: "list[Sequence]" = field(default_factory=list)
    entry: Entry | None = None  # the one that counts of those in the heap

    def charge_prompt(self, num_tokens: int, weight: float) -> None:
        """A request has started, and so many tokens of its prompt are to be computed."""
        self.served += PROMPT_WEIGHT * num_tokens / weight

    def charge_output(self, num_tokens: int, weight: float) -> None:
        """So many tokens were generated."""
        self.served += OUTPUT_WEIGHT * num_tokens / weight


class FairLine:
    """The waiting requests of one class."""

    def __init__(self) -> None:
        self._accounts: dict[bytes, Account] = {}
        self._heap: list[Entry] = []
        self._numbers = count()
        self._floor = 0.0  # the least served of those that waited when last somebody asked
        self._num_waiting = 0
        self._limit = MAX_ACCOUNTS

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, sequence: "Sequence") -> None:
        """Queue a request at its tenant's place of its arrival."""
        account = self._account_of(sequence.request.cache_salt)
        if not account.waiting:
            self.head()
            account.served = max(account.served, self._floor)
        sequence.account = account
        insort(account.waiting, sequence, key=_arrival)
        self._num_waiting += 1
        if account.waiting[0] is sequence:
            self._enter(account)

    def remove(self, sequence: "Sequence") -> None:
        """Take a request out that waits here."""
        waiting = sequence.account.waiting
        del waiting[bisect_left(waiting, sequence.arrival, key=_arrival)]
        self._num_waiting -= 1

    def head(self) -> "Sequence | None":
        """The first request of the tenant that was served least; the earlier among equals."""
        while self._heap:
            top = self._heap[0]
            account = top[3]
            if account.entry is not top:
                heappop(self._heap)
            elif not account.waiting:
                heappop(self._heap)
                account.entry = None
            elif top[0] == account.served and top[1] == account.waiting[0].arrival:
                self._floor = account.served
                return account.waiting[0]
            else:
                heapreplace(self._heap, self._entry_of(account))
        return None

    def _account_of(self, tenant: bytes) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._limit:
                self._forget_half()
            account = self._accounts[tenant] = Account()
        return account

    def _forget_half(self) -> None:
        """Drop the older half of those that do not wait: they come back as strangers, lifted to
        the others, and so lose at most what they were served since they last waited."""
        idle = [tenant for tenant, account in self._accounts.items() if not account.waiting]
        for tenant in idle[: len(idle) // 2 + 1]:
            del self._accounts[tenant]
        self._limit = max(MAX_ACCOUNTS, 2 * len(self._accounts))

    def _enter(self, account: Account) -> None:
        heappush(self._heap, self._entry_of(account))

    def _entry_of(self, account: Account) -> Entry:
        number = next(self._numbers)
        entry = (account.served, account.waiting[0].arrival, number, account)
        account.entry = entry
        return entry


def _arrival(sequence: "Sequence") -> int:
    return sequence.arrival
