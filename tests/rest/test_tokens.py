"""The gateway's issuers at the admin API: the same tokens, the same table, nothing forged."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane import bootstrap
from tests.access.forgeries import forgeries
from tests.access.issuer import CONFIG, token
from tests.live.conftest import Live, live  # noqa: F401
from tests.rest.conftest import Api
from tests.rest.test_bad_input import problem


@pytest.fixture(autouse=True)
def issuers(settings: Any, tmp_path: Path) -> Iterator[None]:
    settings.JWT_ISSUERS = tmp_path / "issuers.json"
    settings.JWT_ISSUERS.write_text(json.dumps([CONFIG]))
    bootstrap.jwt_verifier.cache_clear()
    yield
    bootstrap.jwt_verifier.cache_clear()


@pytest.fixture
def tenants(admin: Api) -> None:
    for name in ("acme", "operators"):
        assert admin.post("tenants/", {"name": name}).status_code == 201


def test_no_forged_token_is_accepted(tenants: None) -> None:
    for forged, why in forgeries():
        answer = Api().get("status/", headers={"Authorization": f"Bearer {forged}"})
        code = problem(answer)
        assert code in ("invalid_token", "token_expired", "no_org"), (why, code)
    api = Api(token(groups=["ml-admins"]))
    assert api.get("status/").status_code == 200


def test_a_role_from_a_claim_counts_like_a_keys(tenants: None) -> None:
    """Confined to its owner's tenant; without a role good for inference alone."""
    admin, auditor, plain = (
        Api(token(groups=groups)) for groups in (["ml-admins"], ["ml-readers"], [])
    )
    assert admin.post("tenants/acme/keys/", {"name": "ci"}).status_code == 201
    assert problem(admin.post("tenants/", {"name": "more"}), 403) == "forbidden"
    assert problem(admin.get("tenants/operators/"), 404) == "tenant_not_found"
    assert auditor.get("requests/").status_code == 200
    assert problem(auditor.post("tenants/acme/keys/", {"name": "ci"}), 403) == "forbidden"
    assert problem(plain.get("status/"), 403) == "forbidden"


def test_an_operators_token_acts_for_the_fleet_and_is_named_in_the_log(tenants: None) -> None:
    api = Api(token(owner="operators", sub="olga", groups=["ml-admins"]))
    assert api.post("models/", {"name": "m"}).status_code == 201
    (event,) = api.get("events/?type=ModelRegistered").json()["results"]
    assert event["actor"] == "jwt:operators:olga"


def test_a_suspended_tenants_token_opens_nothing(admin: Api, tenants: None) -> None:
    bearer = Api(token(groups=["ml-admins"]))
    assert bearer.get("status/").status_code == 200
    admin.post("tenants/acme/suspend/", {"reason": "unpaid"})
    assert problem(bearer.get("status/"), 403) == "tenant_suspended"


def test_suspended_operators_keys_and_tokens_open_nothing(admin: Api, tenants: None) -> None:
    """A leaked key of the whole fleet is stopped; whoever logs in resumes the tenant."""
    order = {"name": "fleet", "role": "admin", "scopes": ["admin:read", "admin:write"]}
    key = Api(admin.post("tenants/operators/keys/", order).json()["secret"])
    bearer = Api(token(owner="operators", sub="olga", groups=["ml-admins"]))
    assert key.get("status/").status_code == bearer.get("status/").status_code == 200
    admin.post("tenants/operators/suspend/", {"reason": "leaked"})
    for api in (key, bearer):
        assert problem(api.get("status/"), 403) == "tenant_suspended"
        assert problem(api.post("models/", {"name": "m"}), 403) == "tenant_suspended"
    assert admin.post("tenants/operators/resume/", {}).status_code == 200
    assert key.get("status/").status_code == bearer.get("status/").status_code == 200


def test_an_expired_token_is_told_so(tenants: None) -> None:
    answer = Api(token(exp=int(time.time()) - 100)).get("status/")
    assert problem(answer, 401) == "token_expired" and "Bearer" in answer["WWW-Authenticate"]


async def test_no_forged_token_is_accepted_by_the_live_websocket(
    live: Live,  # noqa: F811
    admin: Api,
) -> None:
    """In the first frame; a good one is."""
    for name in ("acme", "operators"):
        await asyncio.to_thread(admin.post, "tenants/", {"name": name})
    for forged, why in forgeries():
        async with live.listener() as one:
            assert await one.connect()
            await one.send(type="auth", token=forged)
            assert await one.closed() == 4401, why
    async with live.listener(token(groups=["ml-admins"])) as good:
        assert await good.connect()
        await good.send(type="subscribe", after=None)
        assert (await good.next())["type"] == "hello"
