"""What surrounds the API: its description, the dashboard's pages, health, the outermost edge."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.management import call_command
from django.test import Client

from controlplane.config.asgi import web
from controlplane.entrypoints.rest.edge import MAX_BODY_BYTES, EdgeGuard
from tests.rest.conftest import Api

ROOT = Path(__file__).resolve().parents[2]


def test_the_description_in_the_repository_is_the_codes_own(tmp_path: Path) -> None:
    path = tmp_path / "openapi.json"
    call_command(
        "spectacular", "--validate", "--fail-on-warn", "--format", "openapi-json", "--file", path
    )
    pinned = json.loads((ROOT / "frontend" / "openapi.json").read_text())
    assert json.loads(path.read_text()) == pinned, (
        "run: manage.py spectacular --format openapi-json --file frontend/openapi.json"
    )


def test_the_schema_and_its_page_are_served_to_those_who_may_look(admin: Api) -> None:
    for path in ("/api/schema", "/api/docs", "/api/docs/"):
        refused = Client().get(path)
        assert refused.status_code == 401 and refused.json()["code"] == "not_authenticated"
        sent = Client().get(path, headers={"Accept": "text/html,*/*;q=0.8"})
        assert (sent.status_code, sent["Location"]) == (302, f"/login?next={path}")
    assert admin.client.get("/api/schema").status_code == 200
    for wanted, begins in (("json", b'{"openapi"'), ("yaml", b"openapi:")):
        told = admin.client.get(f"/api/schema/?format={wanted}")
        assert told.status_code == 200, wanted
        assert b"".join(told.content.split())[:20].startswith(begins), told.content[:20]
    unknown = admin.client.get("/api/schema/?format=xml")
    assert (unknown.status_code, unknown.json()["code"]) == (400, "invalid_parameter")
    unserved = admin.client.get("/api/schema/", headers={"Accept": "image/png"})
    assert (unserved.status_code, unserved.json()["code"]) == (406, "not_acceptable")
    page = admin.client.get("/api/docs")
    assert page.status_code == 200 and b"swagger-ui" in page.content
    assert Client().get("/metrics").status_code == 401
    assert b"engine_log_head" in admin.client.get("/metrics").content


def test_every_page_address_is_the_dashboard(settings: Any, tmp_path: Path) -> None:
    settings.FRONTEND_DIR = tmp_path
    unbuilt = Client().get("/fleet")
    assert unbuilt.status_code == 200 and b"npm run build" in unbuilt.content
    (tmp_path / "index.html").write_text("<title>Engine</title>")
    for address in ("/", "/fleet", "/models/smollm2"):
        answer = Client().get(address)
        assert answer.content == b"<title>Engine</title>", address
        assert answer["Cache-Control"] == "no-cache"
        policy = answer["Content-Security-Policy"]
        assert "script-src 'self';" in policy and "connect-src 'self' http://" in policy
        assert " ws://" in policy and answer["X-Frame-Options"] == "DENY"
    for address in ("/api/nothing", "/v1/models", "/assets/gone.js", "/api/v1/nothing/"):
        answer = Client().get(address)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


def test_an_address_without_its_final_slash_is_told_so() -> None:
    """Also to who may see nothing there: the addresses are no secret, what is at them is."""
    for address in ("/api/v1/models", "/api/v1/models/m/versions", "/api/v1/tenants?limit=3"):
        for method in ("get", "post"):
            answer = getattr(Client(), method)(address)
            assert answer.status_code == 404 and 'ends in "/"' in answer.json()["detail"], address
    for address in ("/api/v1/nothing", "/api/v1/nothing/", "/v1/models"):
        assert Client().get(address).json()["detail"] == "There is nothing here.", address


def test_health_needs_no_account() -> None:
    assert Client().get("/livez").content == b"ok\n"
    ready = Client().get("/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)


@pytest.fixture
async def edge() -> Any:
    transport = httpx.ASGITransport(web, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def test_the_edge_refuses_by_the_head_alone(edge: httpx.AsyncClient) -> None:
    for options, status, code in (
        ({"headers": {"Host": "evil.example"}}, 400, "bad_host"),
        ({"headers": {"Host": ""}}, 400, "bad_host"),
        ({"headers": {f"x-{i}": "1" for i in range(1000)}}, 431, "headers_too_large"),
        ({"headers": {"x-long": "x" * 65536}}, 431, "headers_too_large"),
        ({"headers": [("host", "localhost"), ("host", "evil")]}, 400, "bad_host"),
        ({"headers": {"X-Forwarded-Host": "evil.example"}}, 401, "not_authenticated"),
    ):
        answer = await edge.get("/api/v1/status/", **options)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["code"]) == (status, code), options
        assert answer.headers["content-type"] == "application/problem+json"
    traced = await edge.request("TRACE", "/api/v1/status/")
    assert (traced.status_code, traced.json()["code"]) == (405, "method_not_allowed")
    for path in ("/api/v1/tenants/%00/", "/" + "a" * 5000):
        assert (await edge.get(path)).json()["code"] == "bad_path"


async def test_the_edge_counts_the_body_whatever_its_head_says(edge: httpx.AsyncClient) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 65536

    for headers in ({}, {"Content-Length": "10"}):
        headers = {"Content-Type": "application/json", **headers}
        answer = await edge.post("/api/v1/session/", content=endless(), headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_a_fault_of_ours_is_a_problem_without_its_insides() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("secret detail at 0x7f00")

    transport = httpx.ASGITransport(EdgeGuard(broken, ["localhost"]), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/")
    assert answer.status_code == 500 and answer.json()["code"] == "internal_error"
    assert "secret" not in answer.text


async def test_a_slow_body_of_the_allowed_size_is_read() -> None:
    """The cap counts bytes, not messages."""
    seen = 0

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        nonlocal seen
        while (message := await receive())["more_body"]:
            seen += len(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def exactly() -> Any:
        for _ in range(MAX_BODY_BYTES // 65536):
            yield b" " * 65536
            await asyncio.sleep(0)

    transport = httpx.ASGITransport(EdgeGuard(counting, ["localhost"]))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/", content=exactly())).status_code == 200
    assert seen == MAX_BODY_BYTES
