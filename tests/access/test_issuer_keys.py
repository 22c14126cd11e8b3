"""When an issuer's keys are fetched: rarely, once for many callers, and never in vain twice."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from controlplane.adapters.access.issuers import (
    IssuerConfig,
    KeySet,
    read_document,
)
from tests.access.issuer import Issuer


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with Issuer().serving() as running:
        yield running


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(issuer: Issuer, clock: Clock) -> KeySet:
    return KeySet(msgspec.convert(issuer.config(), IssuerConfig), monotonic=clock)


def test_keys_are_fetched_when_needed_and_again_after_ten_minutes(
    issuer: Issuer, keys: KeySet, clock: Clock
) -> None:
    assert issuer.num_fetches == 0
    for at, fetches in ((0.0, 1), (599.0, 1), (602.0, 2), (1201.0, 2), (1204.0, 3)):
        clock.now = 1000.0 + at
        assert keys.key(issuer.newest) is not None
        assert issuer.num_fetches == fetches, at


def test_a_new_key_is_found_at_once_and_a_withdrawn_one_is_gone(
    issuer: Issuer, keys: KeySet
) -> None:
    old = issuer.newest
    assert keys.key(old) is not None
    new = issuer.rotate(keep=1)
    assert keys.key(new) is not None
    assert keys.key(old) is None


def test_made_up_key_ids_fetch_once_in_30_seconds(
    issuer: Issuer, keys: KeySet, clock: Clock
) -> None:
    """And do not keep the renewal of the known ones from happening."""
    assert keys.key(issuer.newest) is not None
    for number in range(1000):
        assert keys.key(f"made-up-{number}") is None
    assert issuer.num_fetches == 2
    clock.now += 31
    assert keys.key("made-up") is None and issuer.num_fetches == 3
    clock.now += 590
    assert keys.key("made-up") is None and keys.key(issuer.newest) is not None
    assert issuer.num_fetches == 4


def test_keys_outlive_the_issuer_by_a_day_and_no_longer(
    issuer: Issuer, keys: KeySet, clock: Clock
) -> None:
    """While it fails it is asked again every 30 seconds at most."""
    assert keys.key(issuer.newest) is not None
    issuer.failing = True
    clock.now += 700
    for _ in range(100):
        assert keys.key(issuer.newest) is not None
    assert issuer.num_fetches == 2
    clock.now += 23 * 3600
    assert keys.key(issuer.newest) is not None
    clock.now += 3600
    assert keys.key(issuer.newest) is None
    issuer.failing = False
    clock.now += 31
    assert keys.key(issuer.newest) is not None


def test_without_any_key_it_is_tried_again_soon(issuer: Issuer, keys: KeySet, clock: Clock) -> None:
    """An issuer that starts after us is not refused for half a minute."""
    issuer.failing = True
    assert keys.key(issuer.newest) is None and keys.key(issuer.newest) is None
    assert issuer.num_fetches == 1
    issuer.failing = False
    clock.now += 6
    assert keys.key(issuer.newest) is not None


async def test_of_many_callers_one_fetches(issuer: Issuer, keys: KeySet) -> None:
    """Threads and event loop together; nobody is refused while the fetch is under way."""
    issuer.slow_s = 0.3
    with ThreadPoolExecutor(20) as pool:
        blocking = [pool.submit(keys.key, issuer.newest) for _ in range(20)]
        soon = await asyncio.gather(*(keys.key_soon(issuer.newest) for _ in range(200)))
        found = [one.result() for one in blocking] + soon
    assert all(key is not None for key in found) and issuer.num_fetches == 1


def test_waiting_for_a_fetch_does_not_stop_the_others(issuer: Issuer, keys: KeySet) -> None:
    """A key that is known is judged while a made-up one is searched for."""
    assert keys.key(issuer.newest) is not None
    issuer.slow_s = 2.0
    searching = threading.Thread(target=keys.key, args=("made-up",))
    searching.start()
    done: list[Any] = []
    judging = threading.Thread(target=lambda: done.append(keys.key(issuer.newest)))
    judging.start()
    judging.join(0.5)
    assert done and done[0] is not None
    searching.join()


def test_a_redirect_is_not_followed(issuer: Issuer) -> None:
    """Where an issuer's server sends us was chosen by nobody here."""
    config = msgspec.convert(issuer.config(jwks_url=f"{issuer.url}/elsewhere.json"), IssuerConfig)
    with pytest.raises(OSError):
        read_document(config)
    assert issuer.num_fetches == 1
