"""Signed tokens at the gateway: forged ones open nothing, and a rotation of keys is not noticed."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from controlplane.domain import model
from controlplane.domain.model import Access, ChangeAccess
from tests.access.forgeries import forgeries
from tests.access.issuer import CURVE_KEY, Issuer, token
from tests.openai.ledger import requests_of
from tests.openai.stack import Stack, until
from tests.openai.test_websocket import Client, open_socket
from tests.openai.wire import CLIENT, HELLO, post

CHAT = "/v1/chat/completions"
ASKED = {"model": "fast", "messages": HELLO, "max_tokens": 2}
REFUSALS = (400, 401, 403, 431)


def models(stack: Stack, bearer: str) -> httpx.Response:
    headers = {b"Authorization": b"Bearer " + bearer.encode()}
    return CLIENT.get(f"{stack.gateway.url}/v1/models", headers=headers)


def test_a_good_token_is_served_and_its_subject_recorded(stack: Stack) -> None:
    """Of three kinds of key; the owner is the tenant."""
    for good in (token(sub="tina"), token(CURVE_KEY, "ES256", "e1", sub="tina")):
        assert post(stack, CHAT, ASKED, key=good).status_code == 200
    assert "jwt:tina" in {row["subject"] for row in requests_of(stack, "acme")}


def test_no_forged_token_is_accepted_over_http(stack: Stack) -> None:
    """A hundred of them; each is refused with a status of a client's mistake."""
    for forged, why in forgeries():
        try:
            answer = models(stack, forged)
        except httpx.TransportError:
            continue  # a header of a megabyte ends the connection
        assert answer.status_code in REFUSALS, (why, answer.text)
    assert models(stack, token()).status_code == 200


def test_no_forged_token_is_accepted_by_the_websocket(stack: Stack) -> None:
    """Neither in the handshake's header nor in the first message."""
    url = f"ws://127.0.0.1:{stack.gateway.port}/ws/v1/stream"
    for forged, why in forgeries():
        with open_socket(stack) as socket:
            client = Client(socket)
            if len(forged) > 1_000_000:  # more than a message may have: cut off, even while sending
                with suppress(ConnectionClosed):
                    client.send(type="auth", token=forged)
                assert client.close_code() in (1009, 1006), why  # a reset can overtake the frame
                continue
            client.send(type="auth", token=forged)
            assert client.receive()["type"] == "error", why
            assert client.close_code() == 4401, why
        if len(forged) < 8192 and forged.isascii():
            with pytest.raises(InvalidStatus) as refused:
                connect(url, additional_headers={"Authorization": f"Bearer {forged}"})
            assert refused.value.response.status_code in REFUSALS, why


def test_a_model_for_some_roles_is_absent_for_tokens_of_others(stack: Stack) -> None:
    """A role from the issuer's claim counts like a key's; a change holds within a second."""
    admin, plain = token(groups=["ml-admins"]), token()
    names = {bearer: set() for bearer in (admin, plain)}

    def listed(bearer: str) -> set[str]:
        return {one["id"] for one in models(stack, bearer).json()["data"]}

    access = ChangeAccess("ends", Access(True, (), ("admin",)), time.time())
    stack.order(model.DECIDER, "model-ends", access)
    try:
        until(lambda: "ends" not in listed(plain), 1)
        assert "ends" in listed(admin) and names
        body = ASKED | {"model": "ends"}
        assert post(stack, CHAT, body, key=plain).status_code == 404
        assert post(stack, CHAT, body, key=admin).status_code == 200
        assert post(stack, CHAT, body, key=stack.keys["acme"]).status_code == 404
    finally:
        reset = ChangeAccess("ends", Access(), time.time())
        stack.order(model.DECIDER, "model-ends", reset)


def test_a_viewers_token_reads_and_does_not_infer(stack: Stack) -> None:
    """The same table as everywhere."""
    answer = post(stack, CHAT, ASKED, key=token(groups=["ml-readers"]))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")


def test_a_rotation_of_the_issuers_keys_refuses_nobody(stack: Stack, issuer: Issuer) -> None:
    """Requests go on with both keys' tokens while the new key appears; the old one's are refused
    once the issuer has withdrawn it and its keys were fetched again."""
    old = issuer.sign()
    assert models(stack, old).status_code == 200
    with ThreadPoolExecutor(8) as pool:
        before = [pool.submit(models, stack, issuer.sign(sub=f"a{n}")) for n in range(40)]
        issuer.rotate()
        after = [pool.submit(models, stack, issuer.sign(sub=f"b{n}")) for n in range(40)]
    assert {one.result().status_code for one in before + after} == {200}
    assert models(stack, old).status_code == 200


def test_a_key_for_some_models_asks_for_no_others(stack: Stack) -> None:
    """In the list, over HTTP and over the websocket."""
    narrow = stack.add_key("acme", models=("fast",))
    assert {one["id"] for one in models(stack, narrow).json()["data"]} == {"fast", "quick"}
    assert post(stack, CHAT, ASKED, key=narrow).status_code == 200
    assert post(stack, CHAT, ASKED | {"model": "ends"}, key=narrow).status_code == 404
    with open_socket(stack) as socket:
        client = Client(socket)
        client.send(type="auth", token=narrow)
        assert client.receive()["type"] == "ready"
        client.generate("g", model="ends", max_tokens=2)
        assert client.receive()["error"]["code"] == "model_not_found"
