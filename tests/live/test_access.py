"""Who may listen, decided before anything is said; how a bad guest is sent away."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from django.test import Client

from controlplane.adapters.access import users
from controlplane.domain import tenant
from controlplane.entrypoints.live import consumer
from tests.live.conftest import Listener, Live, create_tenant, fresh_key, order
from tests.rest.conftest import PASSWORD


def cookie_of(username: str, role: str) -> tuple[Client, str]:
    users.save_user(username, PASSWORD, role)
    client = Client()
    body = {"username": username, "password": PASSWORD}
    assert client.post("/api/v1/session/", body, "application/json").status_code == 200
    return client, f"sessionid={client.cookies['sessionid'].value}"


@asynccontextmanager
async def with_cookie(live: Live, cookie: str, **headers: str) -> AsyncIterator[Listener]:
    async with live.listener(cookie=cookie, **headers) as one:
        yield one


async def test_the_dashboards_own_page_may_listen(live: Live) -> None:
    _, cookie = await asyncio.to_thread(cookie_of, "ann", "viewer")
    async with live.listener(cookie=cookie, origin="http://localhost") as one:
        assert await one.connect()
        await one.send(type="subscribe", after=None)
        assert (await one.next())["type"] == "hello"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://localhost.evil"])
async def test_another_page_may_not_use_the_cookie(live: Live, origin: str) -> None:
    _, cookie = await asyncio.to_thread(cookie_of, "ann", "admin")
    headers = {"origin": origin} if origin else {}
    async with live.listener(cookie=cookie, **headers) as one:
        assert not await one.connect()


async def test_another_host_name_is_not_served(live: Live) -> None:
    one = Listener(live.application, "/ws/live", [(b"host", b"evil.example")])
    assert not await one.connect()


async def test_a_key_may_come_in_the_first_frame(live: Live, operator: str) -> None:
    async with live.listener() as one:
        assert await one.connect()
        await one.send(type="auth", token=operator)
        await one.send(type="subscribe", after=None)
        assert (await one.next())["type"] == "hello"


async def test_saying_nothing_or_something_wrong_ends_in_4401(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "AUTH_SECONDS", 0.2)
    async with live.listener() as silent:
        assert await silent.connect()
        assert await silent.closed() == 4401
    create_tenant("acme")
    inference = await fresh_key("acme", "inference")
    for frame in (
        {"type": "auth", "token": "' OR '1'='1"},
        {"type": "auth", "token": 7},
        {"type": "auth"},
        {"type": "auth", "token": inference},
        {"type": "subscribe", "after": None},
    ):
        async with live.listener() as one:
            assert await one.connect()
            await one.send(**frame)
            assert (await one.next())["code"] == "invalid_token"
            assert await one.closed() == 4401


async def test_a_token_in_the_address_is_refused(live: Live, operator: str) -> None:
    for name in ("token", "access_token", "api_key", "Authorization"):
        async with live.listener(path=f"/ws/live?{name}={operator}") as one:
            assert not await one.connect()


async def test_other_addresses_are_refused(live: Live, operator: str) -> None:
    for path in ("/ws/live/", "/ws/other", "/ws/live/../live", "/"):
        async with live.listener(operator, path=path) as one:
            assert not await one.connect(), path


async def test_a_revoked_key_and_a_finished_session_hear_no_more(
    live: Live, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "AUTH_SECONDS", 0.2)
    monkeypatch.setattr(consumer, "RECHECK_SECONDS", 0.2)
    client, cookie = await asyncio.to_thread(cookie_of, "ann", "admin")
    async with live.listener(operator) as by_key:
        assert await by_key.connect()
        key_id = operator.removeprefix("sk_").partition(".")[0]
        revoke = tenant.RevokeApiKey("operators", key_id, time.time())
        await asyncio.to_thread(order, "operators", revoke)
        assert await by_key.closed() == 4401
    async with live.listener(cookie=cookie, origin="http://localhost") as by_cookie:
        assert await by_cookie.connect()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(client.logout)
        assert await by_cookie.closed() == 4401


BAD_FRAMES = (
    "[", "7", "[]", "{}", '{"type": 1}', '{"type": "a", "type": "b"}', '{"type": "\\ud800"}',
    "[" * 3000, '{"type": "x' + "y" * 5000 + '"}',
)  # fmt: skip


async def test_malformed_frames_are_named_and_change_nothing(live: Live, operator: str) -> None:
    async with live.listener(operator) as one:
        assert await one.connect()
        for text in BAD_FRAMES:
            await one.socket.send_to(text_data=text)
            assert (await one.next())["code"] == "invalid_frame", text[:40]
    async with live.listener(operator) as one:
        assert await one.connect()
        for after in (-1, 1.5, "7", True, [], 2**63):
            await one.send(type="subscribe", after=after)
            assert (await one.next())["code"] == "invalid_position"
        await one.send(type="unsubscribe")
        assert (await one.next())["code"] == "unknown_type"
        await one.send(type="subscribe", after=None)
        assert (await one.next())["type"] == "hello"
        await one.send(type="subscribe", after=None)
        assert (await one.next("error"))["code"] == "too_many"


async def test_flooding_and_binary_are_sent_away(live: Live, operator: str) -> None:
    async with live.listener(operator) as one:
        assert await one.connect()
        await asyncio.sleep(0)
        for _ in range(consumer.MAX_FRAMES_PER_SECOND + 1):
            await one.send(type="auth")
        assert (await one.next("error"))["code"] == "rate_limited"
        assert await one.closed() == 1008
    async with live.listener(operator) as one:
        assert await one.connect()
        await one.socket.send_to(bytes_data=b"\x00\x01")
        assert await one.closed() == 1003


async def test_a_revoked_suspended_or_rotated_key_hears_no_more_within_a_second(live: Live) -> None:
    """The log says so, and nothing waits for the next time that the key is looked up; a rotated
    key's old secret may come again."""
    await asyncio.to_thread(create_tenant, "acme")
    token = await fresh_key("acme", "admin:read")
    key_id = token.removeprefix("sk_").partition(".")[0]
    now = time.time()
    for ending in (
        tenant.SuspendApiKey("acme", key_id, "leaked?", now),
        tenant.ResumeApiKey("acme", key_id, now),
        tenant.RotateApiKey("acme", key_id, "ba9876543210", "abcd", now + 60, now),
        tenant.RevokeApiKey("acme", key_id, now),
    ):
        if isinstance(ending, tenant.ResumeApiKey):
            await asyncio.to_thread(order, "acme", ending)
            continue
        async with live.subscribed(token) as one:
            await one.next("hello")
            await asyncio.to_thread(order, "acme", ending)
            assert await one.closed(seconds=1.0) == 4401


async def test_a_suspended_tenant_hears_no_more_within_a_second(live: Live) -> None:
    """Its neighbour does."""
    for name in ("acme", "other"):
        await asyncio.to_thread(create_tenant, name)
    first, second = await fresh_key("acme", "admin:read"), await fresh_key("other", "admin:read")
    async with live.subscribed(first) as one, live.subscribed(second) as other:
        await one.next("hello")
        suspend = tenant.SuspendTenant("acme", "unpaid", time.time())
        await asyncio.to_thread(order, "acme", suspend)
        assert await one.closed(seconds=1.0) == 4401
        await asyncio.to_thread(order, "other", tenant.ChangeTier("other", "premium", time.time()))
        assert (await other.next("event"))["stream"] == "tenant-other"


async def test_suspended_operators_keys_hear_no_more_but_who_logged_in_does(
    live: Live, operator: str
) -> None:
    _, cookie = await asyncio.to_thread(cookie_of, "ann", "admin")
    async with (
        live.subscribed(operator) as by_key,
        live.listener(cookie=cookie, origin="http://localhost") as by_cookie,
    ):
        assert await by_cookie.connect()
        await by_cookie.send(type="subscribe", after=None)
        suspend = tenant.SuspendTenant("operators", "leaked", time.time())
        await asyncio.to_thread(order, "operators", suspend)
        assert await by_key.closed(seconds=1.0) == 4401
        assert (await by_cookie.next("event"))["stream"] == "tenant-operators"
