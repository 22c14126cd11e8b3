"""``application.handle``: one command, whatever happens beside it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from controlplane.adapters.clock import ManualClock
from controlplane.application.handle import CommandHandler, Handled
from controlplane.application.ports import EventMeta, EventStore, Idempotency
from controlplane.domain import tenant
from controlplane.domain.audit import REFUSALS, CommandRefused
from controlplane.domain.errors import Conflict, NotFound, VersionConflict
from controlplane.domain.ids import KeyId, TenantId
from tests.contracts.stores import Stores

ACME = TenantId("acme")
STREAM = "tenant-acme"
META = EventMeta("user:ada")
CREATE = tenant.CreateTenant(ACME, "acme", "free", 1.0)
KEY = Idempotency("key", "body-1")


@pytest.fixture
def handler(store: EventStore) -> CommandHandler:
    return CommandHandler(store, ManualClock())


def tier(name: str) -> tenant.ChangeTier:
    return tenant.ChangeTier(ACME, name, 2.0)


def test_a_command_appends_what_was_decided(handler: CommandHandler, store: EventStore) -> None:
    done = handler.handle(tenant.DECIDER, STREAM, CREATE, META)
    assert (done.version, done.position, done.replayed) == (1, 1, False)
    assert store.replay(STREAM) == list(done.events)


def test_a_wish_that_is_true_already_appends_nothing(handler: CommandHandler) -> None:
    """The position is the head's, so that a reader who waits for it sees the wish fulfilled."""
    handler.handle(tenant.DECIDER, STREAM, CREATE, META)
    done = handler.handle(tenant.DECIDER, STREAM, tier("free"), META)
    assert (done.events, done.version, done.position) == ((), 1, 1)


def test_a_refusal_is_recorded_and_raised(handler: CommandHandler, store: EventStore) -> None:
    """Who, what, on which stream, why, and what was asked for."""
    with pytest.raises(NotFound):
        handler.handle(tenant.DECIDER, STREAM, tier("free"), META)
    (refused,) = store.read_stream(REFUSALS)
    assert refused.meta == META
    assert isinstance(refused.event, CommandRefused)
    assert (refused.event.command, refused.event.target) == ("ChangeTier", STREAM)
    assert refused.event.code == "tenant_not_found"
    assert refused.event.asked == {"tenant_id": "acme", "tier": "free"}


def test_a_dry_run_appends_nothing_not_even_a_refusal(
    handler: CommandHandler, store: EventStore
) -> None:
    done = handler.handle(tenant.DECIDER, STREAM, CREATE, META, dry_run=True)
    assert (len(done.events), done.version) == (1, 1)
    with pytest.raises(NotFound):
        handler.handle(tenant.DECIDER, STREAM, tier("free"), META, dry_run=True)
    assert store.head().position == 0


def test_an_old_expected_version_is_refused(handler: CommandHandler) -> None:
    """If-Match: the caller decided on a state that is no longer."""
    handler.handle(tenant.DECIDER, STREAM, CREATE, META)
    handler.handle(tenant.DECIDER, STREAM, tier("premium"), META, expected_version=1)
    with pytest.raises(VersionConflict) as refused:
        handler.handle(tenant.DECIDER, STREAM, tier("free"), META, expected_version=1)
    assert (refused.value.expected, refused.value.actual) == (1, 2)


def test_the_same_key_and_body_get_the_first_answer(
    handler: CommandHandler, store: EventStore
) -> None:
    """Twice sent, once applied; the second answer is the stored one."""

    def answer(done: Handled) -> tuple[int, bytes]:
        return 201, b"version %d" % done.version

    send = dict(idempotency=KEY, response=answer)
    first = handler.handle(tenant.DECIDER, STREAM, CREATE, META, **send)  # type: ignore[arg-type]
    again = handler.handle(tenant.DECIDER, STREAM, CREATE, META, **send)  # type: ignore[arg-type]
    assert not first.replayed and again.replayed and again.stored is not None
    assert (again.stored.status, again.stored.body) == (201, b"version 1")
    assert again.position == first.position == store.head().position == 1


def test_a_resend_with_an_if_match_that_is_old_by_now_gets_the_first_answer(
    handler: CommandHandler, store: EventStore
) -> None:
    """It is old because the first one was carried out."""
    handler.handle(tenant.DECIDER, STREAM, CREATE, META)
    send = dict(idempotency=KEY, expected_version=1)
    handler.handle(tenant.DECIDER, STREAM, tier("premium"), META, **send)  # type: ignore[arg-type]
    again = handler.handle(tenant.DECIDER, STREAM, tier("premium"), META, **send)  # type: ignore[arg-type]
    assert again.replayed and store.head().position == 2


def test_the_same_key_with_another_body_is_refused(handler: CommandHandler) -> None:
    handler.handle(tenant.DECIDER, STREAM, CREATE, META, idempotency=KEY)
    with pytest.raises(Conflict) as refused:
        other = Idempotency("key", "body-2")
        handler.handle(tenant.DECIDER, STREAM, tier("premium"), META, idempotency=other)
    assert refused.value.code == "idempotency_mismatch"


def test_a_key_belongs_to_who_sent_it(handler: CommandHandler) -> None:
    """Another actor's equal key is another key: nobody reads a stranger's answer."""
    handler.handle(tenant.DECIDER, STREAM, CREATE, META, idempotency=KEY)
    eve = EventMeta("user:eve")
    done = handler.handle(tenant.DECIDER, STREAM, tier("premium"), eve, idempotency=KEY)
    assert not done.replayed and done.version == 2


def test_a_resend_that_races_its_first_is_applied_once(
    handler: CommandHandler, store: EventStore
) -> None:
    start = threading.Barrier(8)

    def send(_: int) -> Handled:
        start.wait()
        return handler.handle(tenant.DECIDER, STREAM, CREATE, META, idempotency=KEY)

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(send, range(8)))
    assert sum(not one.replayed for one in done) == 1
    assert len(store.replay(STREAM)) == 1


def test_two_processes_deciding_on_one_stream_lose_nothing(stores: Stores) -> None:
    """Each handler remembers a state that the other makes old; both sets of keys are issued."""
    handlers = [CommandHandler(stores.open(), ManualClock()) for _ in range(2)]
    handlers[0].handle(tenant.DECIDER, STREAM, CREATE, META)

    def issue(index: int) -> int:
        key = tenant.IssueApiKey(
            ACME, KeyId(f"{index:012x}"), "k", "last", ("inference",), None, 1.0
        )
        return handlers[index % 2].handle(tenant.DECIDER, STREAM, key, META).version

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(issue, range(24)))
    assert sorted(versions) == list(range(2, 26))
    assert len(handlers[0].state(tenant.DECIDER, STREAM)[1].keys.live) == 24


def test_a_refusal_is_not_given_on_an_old_state(stores: Stores) -> None:
    """What one process remembers as absent was created by another: no refusal, no record of one."""
    one, two = (CommandHandler(stores.open(), ManualClock()) for _ in range(2))
    with pytest.raises(NotFound):
        one.handle(tenant.DECIDER, STREAM, tier("premium"), META)
    two.handle(tenant.DECIDER, STREAM, CREATE, META)
    assert one.handle(tenant.DECIDER, STREAM, tier("premium"), META).version == 2
    assert two.handle(tenant.DECIDER, STREAM, tier("free"), META).version == 3
    assert one.handle(tenant.DECIDER, STREAM, tier("free"), META).version == 3
