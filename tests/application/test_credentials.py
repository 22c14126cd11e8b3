"""A node's credentials open its own subjects and nothing else."""

import asyncio
import base64
import json

import nats as nats_client
import pytest

from controlplane.adapters.natsbus.connection import Bus, connect
from controlplane.adapters.natsbus.credentials import (
    Authority,
    InvalidNodeId,
    node_permissions,
)
from controlplane.application.fleet import BusUnavailable
from tests.application.bus import control, node
from tests.natsserver import NatsServer, nats  # noqa: F401


async def _violations(bus: Bus, subject: str, payload: bytes = b"x", reply: str = "") -> int:
    """How many errors publishing to ``subject`` caused."""
    before = bus.errors.total()
    await bus.client.publish(subject, payload, reply)
    await bus.client.flush(2)
    await asyncio.sleep(0.02)
    return bus.errors.total() - before


async def test_a_node_reads_and_writes_its_own_state(nats: NatsServer) -> None:  # noqa: F811
    """Node n1 gets its desired state, writes its observed state and streams its frames."""
    async with control(nats) as boss, node(nats, "n1") as n1:
        frames = await boss.client.subscribe("engine.frames.gw1.*")
        desired = await boss.jetstream().key_value("desired")
        await desired.put("n1", b"generation 1")
        mine = await n1.jetstream().key_value("desired")
        assert (await mine.get("n1")).value == b"generation 1"
        observed = await n1.jetstream().key_value("observed")
        await observed.put("n1", b"running")
        seen = await boss.jetstream().key_value("observed")
        assert (await seen.get("n1")).value == b"running"
        await n1.client.publish("engine.frames.gw1.n1", b"frame")
        assert (await frames.next_msg(10)).data == b"frame"


async def test_a_node_hears_its_new_desired_state(nats: NatsServer) -> None:  # noqa: F811
    """A plain subscription to the node's own key is woken by each new value."""
    async with control(nats) as boss, node(nats, "n1") as n1:
        hints = await n1.client.subscribe("$KV.desired.n1")
        await n1.client.flush()
        await (await boss.jetstream().key_value("desired")).put("n1", b"generation 2")
        assert (await hints.next_msg(10)).data == b"generation 2"


async def test_a_node_puts_a_tokenizer_of_several_chunks(nats: NatsServer) -> None:  # noqa: F811
    async with control(nats) as boss, node(nats, "n1") as n1:
        bundle = bytes(range(256)) * 2000
        await (await n1.jetstream().object_store("tokenizers")).put("m@v1", bundle)
        store = await boss.jetstream().object_store("tokenizers")
        assert (await store.get("m@v1")).data == bundle


@pytest.mark.parametrize(
    "subject",
    [
        "engine.telemetry.n2",
        "engine.frames.gw1.n2",
        "engine.closed.gw1.n2",
        "engine.close.n1",
        "$KV.observed.n2",
        "$KV.desired.n1",
        "$KV.desired.n2",
        "engine.generate.n1",
        "engine.generate.n2",
        "engine.cancel.n2",
        "engine.log.head",
        "$JS.API.STREAM.DELETE.KV_desired",
        "$JS.API.STREAM.PURGE.KV_observed",
        "$JS.API.STREAM.UPDATE.KV_desired",
        "$JS.API.STREAM.CREATE.mine",
        "$JS.API.STREAM.MSG.GET.KV_desired",
        "$JS.API.STREAM.MSG.DELETE.KV_desired",
        "$JS.API.DIRECT.GET.KV_desired",
        "engine.js.DIRECT.GET.KV_desired",
        "engine.js.DIRECT.GET.KV_desired.$KV.desired.n2",
        "engine.js.STREAM.MSG.GET.KV_desired",
        "engine.js.CONSUMER.CREATE.KV_desired",
        "$JS.API.DIRECT.GET.KV_desired.$KV.desired.n2",
        "$JS.API.CONSUMER.CREATE.KV_desired",
        "$JS.API.CONSUMER.CREATE.KV_desired.c.$KV.desired.n2",
    ],
)
async def test_a_node_may_not_publish_elsewhere(nats: NatsServer, subject: str) -> None:  # noqa: F811
    """The server refuses it: nothing arrives, the node is told of a violation."""
    async with control(nats) as boss, node(nats, "n1") as n1:
        heard = await boss.client.subscribe(subject)
        await boss.client.flush()
        assert await _violations(n1, subject) == 1
        with pytest.raises(nats_client.errors.TimeoutError):
            await heard.next_msg(0.1)


@pytest.mark.parametrize(
    "subject",
    [">", "engine.>", "engine.generate.n2", "engine.close.n2", "engine.frames.>", "$KV.desired.*",
     "_INBOX.>", "_INBOX_n2.>", "engine.telemetry.*", "$KV.observed.n2"],
)  # fmt: skip
async def test_a_node_may_not_listen_elsewhere(nats: NatsServer, subject: str) -> None:  # noqa: F811
    async with node(nats, "n1") as n1:
        await n1.client.subscribe(subject)
        await n1.client.flush()
        await asyncio.sleep(0.02)
        assert n1.errors.total() == 1


async def test_a_rollup_header_erases_nobody_elses_state(nats: NatsServer) -> None:  # noqa: F811
    """With ``Nats-Rollup: all`` on its own key n1 could drop every other key, were it allowed."""
    async with control(nats) as boss, node(nats, "n1") as n1:
        observed = await boss.jetstream().key_value("observed")
        await observed.put("n2", b"state of n2")
        with pytest.raises(nats_client.js.errors.APIError):
            await n1.jetstream().publish("$KV.observed.n1", b"x", headers={"Nats-Rollup": "all"})
        assert (await observed.get("n2")).value == b"state of n2"


DANGEROUS_REPLIES = [
    "$JS.API.STREAM.DELETE.KV_desired",
    "$JS.API.STREAM.DELETE.OBJ_tokenizers",
    "$JS.API.STREAM.PURGE.OBJ_tokenizers",
    "engine.js.STREAM.DELETE.KV_desired",
    "$KV.desired.n2",
    "$KV.observed.n2",
    "engine.generate.n2",
    "engine.log.head",
]


@pytest.mark.parametrize(
    "question",
    [
        "engine.js.DIRECT.GET.KV_desired.$KV.desired.n1",
        "engine.js.STREAM.INFO.KV_desired",
        "engine.js.STREAM.MSG.GET.OBJ_tokenizers",
        "$KV.observed.n1",
        "$O.tokenizers.C.x",
    ],
)
async def test_the_server_is_no_confused_deputy(nats: NatsServer, question: str) -> None:  # noqa: F811
    """Whatever reply subject n1 names, the answer, empty or not, never acts in the engine's
    account: no stream is deleted or purged, no other node hears an order."""
    async with control(nats) as boss, node(nats, "n1") as n1:
        jetstream = boss.jetstream()
        desired = await jetstream.key_value("desired")
        await desired.put("n2", b"state of n2")
        observed = await jetstream.key_value("observed")
        await observed.put("n2", b"report of n2")
        await (await jetstream.object_store("tokenizers")).put("m@v1", b"bundle")
        heard = await boss.client.subscribe("engine.>")
        await boss.client.flush()
        for reply in DANGEROUS_REPLIES:
            for payload in (b"", b"not json"):
                await n1.client.publish(question, payload, reply)
        await n1.client.flush()
        await asyncio.sleep(0.2)
        assert (await desired.get("n2")).value == b"state of n2"
        assert (await observed.get("n2")).value == b"report of n2"
        tokenizer = await (await jetstream.object_store("tokenizers")).get("m@v1")
        assert tokenizer.data == b"bundle"
        assert heard.pending_msgs == 0


async def test_no_credentials_no_connection(nats: NatsServer) -> None:  # noqa: F811
    with pytest.raises(BusUnavailable):
        await connect(nats.url, None, "stranger", timeout_s=1)


async def test_another_clusters_credentials_are_worthless(nats: NatsServer, tmp_path) -> None:  # noqa: F811
    """The chain must end at this server's operator."""
    stranger = Authority(tmp_path / "other").write_control_creds()
    with pytest.raises(BusUnavailable):
        await connect(nats.url, stranger, "stranger", timeout_s=1)


@pytest.mark.parametrize("name", ["", "*", ">", "n1.>", "a.b", "N1", "-n", "n 1", "n1\n", "x" * 64])
def test_a_node_name_cannot_widen_its_permissions(name: str, tmp_path) -> None:
    with pytest.raises(InvalidNodeId):
        Authority(tmp_path).write_node_creds(name)


def test_every_permission_names_the_node_or_a_shared_bucket() -> None:
    """No wildcard stands where another node's id would be."""
    permissions = node_permissions("n1")
    for subject in (*permissions.publish, *permissions.subscribe):
        assert "n1" in subject or "tokenizers" in subject or ".INFO.KV_" in subject, subject


def test_keys_are_made_once_and_private(tmp_path) -> None:
    """A second process issues for the same account; nobody else can read the seeds."""
    first, second = Authority(tmp_path), Authority(tmp_path)
    assert _issuer(first.node_creds("n1")) == _issuer(second.node_creds("n2"))
    assert _issuer(first.control_creds()) == _issuer(second.control_creds())
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*.nk"))
    assert first.write_node_creds("n1").stat().st_mode & 0o077 == 0


def _issuer(creds: str) -> str:
    payload = creds.splitlines()[1].split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return str(claims["iss"])
