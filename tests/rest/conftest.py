"""An installation with an administrator, and a client that speaks the API."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from controlplane import bootstrap
from controlplane.adapters.access import tokens, users
from controlplane.entrypoints.rest import auditing, reading

PASSWORD = "correct horse battery staple"


class Api:
    """Requests below ``/api/v1/`` as one caller; bodies are JSON unless ``raw`` is given."""

    def __init__(self, token: str = "", client: Client | None = None) -> None:
        self.client = client or Client()
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        headers = {**self.headers, **options.pop("headers", {})}
        extra: dict[str, Any] = {"headers": headers}
        if "raw" in options:
            extra |= {"data": options.pop("raw"), "content_type": options.pop("content_type", JSON)}
        elif body is not None:
            extra |= {"data": body, "content_type": JSON}
        return getattr(self.client, method)(f"/api/v1/{path}", **extra)

    def get(self, path: str, **options: Any) -> Any:
        return self.call("get", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> Any:
        return self.call("post", path, body, **options)

    def put(self, path: str, body: Any = None, **options: Any) -> Any:
        return self.call("put", path, body, **options)

    def patch(self, path: str, body: Any = None, **options: Any) -> Any:
        return self.call("patch", path, body, **options)

    def delete(self, path: str, **options: Any) -> Any:
        return self.call("delete", path, **options)


JSON = "application/json"


@pytest.fixture(autouse=True)
def installation(database: Path) -> Iterator[None]:
    """An empty database of this test alone, and no read model of the last test's log."""
    reading._projector.cache_clear()
    auditing._brake = auditing.Brake()
    yield
    bootstrap.event_store().close()


@pytest.fixture
def admin(installation: None) -> Api:
    """Logged in by cookie, as the dashboard is."""
    return login("root", "admin")


def login(username: str, role: str, tenant_id: str = "") -> Api:
    """A session without the login itself, which would be an event in every test's log."""
    user = users.save_user(username, PASSWORD, role, tenant_id)
    api = Api(client=Client(enforce_csrf_checks=True))
    api.client.force_login(user)
    answer = api.get("session/")
    assert answer.status_code == 200, answer.content
    api.headers["X-CSRFToken"] = answer.json()["csrf_token"]
    return api


def key_of(admin: Api, tenant_id: str, *scopes: str) -> Api:
    """A client with a fresh key of the tenant."""
    role = "admin" if set(scopes) - {"inference"} else "developer"
    body = {"name": "test", "scopes": list(scopes), "role": role}
    answer = admin.post(f"tenants/{tenant_id}/keys/", body)
    assert answer.status_code == 201, answer.content
    assert tokens.split_key(answer.json()["secret"])
    return Api(answer.json()["secret"])


def position_of(answer: Any) -> int:
    return int(answer["X-Log-Position"])
