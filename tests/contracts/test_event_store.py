"""The contract of ``ports.EventStore``."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from controlplane.application.chain import GENESIS, columns_of, link
from controlplane.application.ports import (
    Appended,
    EventStore,
    Head,
    KeyUsed,
    Lease,
    StoredResponse,
)
from controlplane.domain.errors import VersionConflict
from tests.contracts.stores import META, Stores, append, changed, created


def test_what_is_appended_is_read_back(store: EventStore) -> None:
    """Every field comes back as it went in, with its place, and the event decoded."""
    appended = store.append(append("tenant-acme", 0, created(), changed()))
    assert appended == Appended(position=2, version=2)
    first, second = store.read_stream("tenant-acme")
    assert (first.position, first.version, first.stream) == (1, 1, "tenant-acme")
    assert (first.type, first.schema_version, first.meta) == ("TenantCreated", 1, META)
    assert first.event == created() and second.event == changed()
    assert (first.event_id, second.event_id) == ("tenant-acme:1", "tenant-acme:2")
    assert [first, second] == store.read_all(0, 10)
    assert store.replay("tenant-acme") == [created(), changed()]


def test_an_empty_log_has_the_genesis_head(store: EventStore) -> None:
    assert store.head() == store.verify() == GENESIS
    assert store.read_all(0, 10) == store.read_stream("nothing") == []


def test_versions_are_contiguous_within_each_stream(store: EventStore) -> None:
    """Positions count over all streams, versions within one."""
    for index in range(6):
        store.append(append(f"tenant-{index % 2}", index // 2, created()))
    assert [event.version for event in store.read_stream("tenant-1")] == [1, 2, 3]
    assert [event.position for event in store.read_stream("tenant-1")] == [2, 4, 6]


def test_a_wrong_expected_version_appends_nothing(store: EventStore) -> None:
    """The refusal names the version there is, and the log is as before."""
    store.append(append("tenant-acme", 0, created()))
    with pytest.raises(VersionConflict) as refused:
        store.append(append("tenant-acme", 0, created()))
    assert (refused.value.expected, refused.value.actual) == (0, 1)
    assert store.head().position == 1


def test_no_expected_version_appends_to_whatever_there_is(store: EventStore) -> None:
    store.append(append("refusals", None, created()))
    assert store.append(append("refusals", None, created())).version == 2


def test_reading_is_bounded_by_after_limit_and_upto(store: EventStore) -> None:
    for index in range(10):
        store.append(append(f"tenant-{index}", 0, created()))
    positions = [event.position for event in store.read_all(3, 4)]
    assert positions == [4, 5, 6, 7]
    assert [event.position for event in store.read_all(3, 100, upto=5)] == [4, 5]
    assert store.read_all(7, 100, upto=5) == []
    assert [event.version for event in store.read_stream("tenant-1", after_version=1)] == []


def test_a_used_key_appends_nothing_and_gives_the_first_answer(store: EventStore) -> None:
    """Even when the version would be a conflict by now: the first answer is the answer."""
    store.append(append("tenant-acme", 0, created(), key="k", body=b'{"a":1}'))
    answer = StoredResponse("hash-of-body", 201, b'{"a":1}', 1)
    assert store.stored_response("k") == answer
    with pytest.raises(KeyUsed) as used:
        store.append(append("tenant-acme", 0, created(), key="k", body=b"other"))
    assert used.value.stored == answer
    assert store.head().position == 1


def test_a_key_is_kept_even_when_nothing_happened(store: EventStore) -> None:
    """A command that found its wish true already is answered the same when sent again."""
    store.append(append("tenant-acme", 0, created()))
    assert store.append(append("tenant-acme", 1, key="k", body=b"same")) == Appended(1, 1)
    assert store.stored_response("k") == StoredResponse("hash-of-body", 201, b"same", 1)
    with pytest.raises(KeyUsed):
        store.append(append("tenant-acme", 1, changed(), key="k"))


def test_a_refused_append_leaves_its_key_free(store: EventStore) -> None:
    with pytest.raises(VersionConflict):
        store.append(append("tenant-acme", 5, created(), key="k"))
    assert store.stored_response("k") is None
    store.append(append("tenant-acme", 0, created(), key="k"))


def test_a_key_is_free_again_after_a_day(stores: Stores) -> None:
    store = stores.open()
    store.append(append("tenant-acme", 0, created(), key="k"))
    stores.clock.advance(24 * 3600 - 1)
    assert store.stored_response("k") is not None
    stores.clock.advance(2)
    assert store.stored_response("k") is None
    store.append(append("tenant-acme", 1, changed(), key="k"))
    assert store.stored_response("k") == StoredResponse("hash-of-body", 201, b"", 2)


def test_the_chain_links_every_record_to_the_one_before(store: EventStore) -> None:
    """Recomputed here from the description in ``chain``, not by the store's own verify."""
    for index in range(5):
        store.append(append(f"tenant-{index}", 0, created(), changed()))
    digest = GENESIS.hash
    for event in store.read_all(0, 100):
        digest = link(digest, columns_of(event))
        assert event.hash == digest
    assert store.head() == store.verify() == store.verify(after=4) == Head(10, digest)


def test_what_cannot_be_read_again_is_never_stored(store: EventStore) -> None:
    """NaN, NUL and lone surrogates would stop some reader for ever; the log takes none of them."""
    for poison in (created("\ud800"), changed("\ud800"), changed("a\x00"), _with_nan()):
        with pytest.raises(ValueError):
            store.append(append("tenant-acme", 0, poison))
    assert store.head().position == 0
    store.append(append("tenant-acme", 0, changed("\\u0000 spelt out is text")))


def _with_nan() -> object:
    event = created()
    return type(event)(event.tenant_id, event.name, event.tier, float("nan"))


def test_one_bad_append_does_not_fail_those_committed_with_it(stores: Stores) -> None:
    """Forty writers at once, half of them with a wrong version: exactly those are refused."""
    store = stores.open()
    start = threading.Barrier(40)

    def write(index: int) -> bool:
        start.wait()
        try:
            store.append(append(f"tenant-{index}", index % 2, created()))
        except VersionConflict:
            return False
        return True

    with ThreadPoolExecutor(40) as pool:
        assert list(pool.map(write, range(40))) == [index % 2 == 0 for index in range(40)]
    assert store.verify().position == 20


def test_of_many_with_one_expected_version_exactly_one_wins(stores: Stores) -> None:
    """Sixteen racers through two stores (as two processes), again and again."""
    opened = [stores.open(), stores.open()]
    for version in range(12):
        one = append("s", version, created())
        won = _race(16, lambda index, one=one: opened[index % 2].append(one))
        assert sum(won) == 1
    assert [event.version for event in opened[0].read_stream("s")] == list(range(1, 13))


def _race(num: int, attempt: Callable[[int], object]) -> list[bool]:
    start = threading.Barrier(num)

    def run(index: int) -> bool:
        start.wait()
        try:
            attempt(index)
        except VersionConflict:
            return False
        return True

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(run, range(num)))


def test_a_reader_misses_nothing_while_many_write(stores: Stores) -> None:
    """A reader that resumes from its last position sees 1, 2, 3, ... without a gap.

    The writers go through two stores, conflict half of the time, and append one to three events.
    """
    opened, seen, done = [stores.open(), stores.open()], [], threading.Event()

    def read() -> None:
        reader = stores.open()
        while not done.is_set() or reader.head().position > len(seen):
            seen.extend(event.position for event in reader.read_all(len(seen), 50))

    def write(index: int) -> None:
        choose = random.Random(index)
        for _ in range(25):
            expected = choose.choice([None, 0])
            events = [created()] * choose.randint(1, 3)
            try:
                opened[index % 2].append(append(f"s{choose.randint(0, 3)}", expected, *events))
            except VersionConflict:
                continue

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    done.set()
    reader.join(timeout=30)
    head = opened[0].verify()
    assert seen == list(range(1, head.position + 1))


def test_a_lease_is_held_kept_lost_and_taken_over(store: EventStore) -> None:
    """The epoch grows with each change of holder, and only then."""
    assert store.acquire_lease("controller", "a", 15, now=100) == Lease("controller", "a", 1, 115)
    assert store.acquire_lease("controller", "b", 15, now=110) is None
    assert store.acquire_lease("controller", "a", 15, now=110) == Lease("controller", "a", 1, 125)
    assert store.acquire_lease("controller", "b", 15, now=125) == Lease("controller", "b", 2, 140)
    assert store.acquire_lease("controller", "a", 15, now=126) is None
    assert store.acquire_lease("other", "a", 15, now=126) == Lease("other", "a", 1, 141)


def test_a_lease_given_back_is_free_at_once(store: EventStore) -> None:
    store.acquire_lease("controller", "a", 15, now=100)
    store.acquire_lease("controller", "a", 0, now=101)
    assert store.acquire_lease("controller", "b", 15, now=101) == Lease("controller", "b", 2, 116)


def test_of_many_that_want_a_lease_one_gets_it(stores: Stores) -> None:
    opened = [stores.open(), stores.open()]
    with ThreadPoolExecutor(16) as pool:
        leases = pool.map(
            lambda index: opened[index % 2].acquire_lease("controller", f"p{index}", 15, 100),
            range(16),
        )
    assert sum(lease is not None for lease in leases) == 1


def test_a_refusal_is_not_given_on_remembered_versions(stores: Stores) -> None:
    """A store that knows a stream at 1 must notice that another process has brought it to 2."""
    one, two = stores.open(), stores.open()
    one.append(append("s", 0, created()))
    two.append(append("s", 1, changed()))
    assert one.append(append("s", 2, changed())).version == 3
    with pytest.raises(VersionConflict) as refused:
        two.append(append("s", 2, changed()))
    assert refused.value.actual == 3
