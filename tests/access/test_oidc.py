"""Signing in to the dashboard by OpenID Connect: a real web process, a real small provider."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.access.issuer import OTHER_KEY, claims, hs256, raw, token
from tests.access.provider import CLIENT_ID, CLIENT_SECRET, Provider
from tests.live.test_process import ROOT, Web

PASSWORD = "correct horse battery staple"
ADMIN = {"sub": "1", "preferred_username": "ann", "owner": "operators", "roles": ["ml-admins"]}


class Installation:
    """One web process with a provider; ``root`` is a local administrator."""

    def __init__(self, folder: Path, provider: Provider) -> None:
        self.provider = provider
        environment = {
            "ENGINE_OIDC_ISSUER": provider.url,
            "ENGINE_OIDC_CLIENT_ID": CLIENT_ID,
            "ENGINE_OIDC_CLIENT_SECRET": CLIENT_SECRET,
            "ENGINE_OIDC_NAME": "Example ID",
            "ENGINE_OIDC_ALGORITHMS": "ES256",
            "ENGINE_OIDC_ROLES": json.dumps({"ml-admins": "admin", "ml-users": "developer"}),
            "ENGINE_BOOTSTRAP_PASSWORD": PASSWORD,
            "ENGINE_DATABASE_URL": "",
        }
        whole = {**os.environ, **environment, "ENGINE_DATA_DIR": str(folder)}
        for command in (["migrate", "-v0"], ["create_admin", "--username", "root"]):
            subprocess.run([sys.executable, "manage.py", *command], cwd=ROOT, env=whole, check=True,
                           capture_output=True)  # fmt: skip
        self.web = Web(folder, **environment).wait()
        self.root = self.browser()
        body = {"username": "root", "password": PASSWORD}
        answer = self.root.post("/api/v1/session/", json=body)
        self.root.headers["X-CSRFToken"] = answer.json()["csrf_token"]
        for name in ("operators", "acme"):
            assert self.root.post("/api/v1/tenants/", json={"name": name}).status_code == 201

    def browser(self) -> httpx.Client:
        return httpx.Client(base_url=self.web.url, follow_redirects=True, timeout=20)

    def sign_in(self, **changes: Any) -> tuple[httpx.Client, httpx.Response]:
        """A browser that has been to the provider and back, and where it has landed."""
        self.provider.claims = ADMIN | changes
        browser = self.browser()
        return browser, browser.get("/sso/oidc/login/")

    def audit(self, query: str = "") -> list[dict[str, Any]]:
        head = self.root.get("/api/v1/status/").json()["head"]
        path = f"/api/v1/audit/?min_position={head}&{query}"
        return list(self.root.get(path).json()["results"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Provider().serving() as provider:
        made = Installation(tmp_path_factory.mktemp("oidc"), provider)
        try:
            yield made
        finally:
            made.web.process.terminate()
            made.web.process.wait(20)


@pytest.fixture(autouse=True)
def honest(site: Installation) -> Iterator[None]:
    yield
    site.provider.forge = lambda token: token


def session(browser: httpx.Client) -> dict[str, Any] | None:
    answer = browser.get("/api/v1/session/")
    return answer.json() if answer.status_code == 200 else None


def test_the_login_page_is_told_of_the_provider(site: Installation) -> None:
    methods = site.browser().get("/api/v1/session/methods/").json()["methods"]
    assert methods == [{"name": "Example ID", "url": "/sso/oidc/login/"}]


def test_a_user_of_the_provider_is_signed_in_with_the_claims_role(site: Installation) -> None:
    """The operators' owner reaches the fleet; a deep link is kept; all of it is in the audit."""
    browser, landed = site.sign_in()
    assert landed.url.path == "/"
    found = session(browser)
    assert found is not None
    assert (found["username"], found["role"], found["tenant_id"]) == ("oidc:ann", "admin", "")
    headers = {"X-CSRFToken": found["csrf_token"]}
    made = browser.post("/api/v1/models/", json={"name": "m"}, headers=headers)
    assert made.status_code == 201, made.text
    actions = [(entry["action"], entry["actor"]) for entry in site.audit()[:3]]
    assert actions[:2] == [("ModelRegistered", "user:oidc:ann"), ("SignedIn", "user:oidc:ann")]
    assert actions[2][0] == "DashboardUserSaved"


def test_an_owner_that_is_a_tenant_confines_and_a_role_follows_the_provider(
    site: Installation,
) -> None:
    """At the next login, with the same user."""
    user = {"sub": "2", "preferred_username": "bob", "owner": "acme"}
    browser, _ = site.sign_in(**user, roles=["ml-admins"])
    found = session(browser)
    assert found is not None and (found["role"], found["tenant_id"]) == ("admin", "acme")
    assert browser.get("/api/v1/nodes/").status_code == 403
    assert browser.get("/api/v1/tenants/operators/").status_code == 404
    browser, _ = site.sign_in(**user, roles=["ml-users"])
    found = session(browser)
    assert found is not None
    assert (found["username"], found["role"]) == ("oidc:bob", "developer")


def test_a_name_at_the_provider_takes_over_no_local_user(site: Installation) -> None:
    """Nor another user of the provider."""
    browser, _ = site.sign_in(sub="3", preferred_username="root", roles=["ml-users"])
    found = session(browser)
    assert found is not None and found["username"] == "oidc:root"
    browser, landed = site.sign_in(sub="4", preferred_username="root", roles=["ml-admins"])
    assert landed.url.query == b"error=oidc_name_taken" and session(browser) is None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"roles": []}, "oidc_no_role"),
        ({"roles": ["admin"]}, "oidc_no_role"),
        ({"roles": None}, "oidc_no_role"),
        ({"owner": "nobody"}, "oidc_no_tenant"),
        ({"owner": "ACME"}, "oidc_no_tenant"),
        ({"owner": None}, "oidc_failed"),
        ({"owner": ["acme"]}, "oidc_failed"),
        ({"aud": "another-client"}, "oidc_failed"),
        ({"iss": "https://id.example"}, "oidc_failed"),
        ({"exp": int(time.time()) - 100}, "oidc_failed"),
        (
            {"iat": int(time.time()) + 86_400},
            "oidc_failed",
        ),  # it may be collected long before it runs
    ],
)
def test_whom_the_provider_does_not_vouch_for_is_sent_back(
    site: Installation, changes: dict[str, Any], error: str
) -> None:
    """To the login page, which says why; nobody is signed in, and the refusal is recorded."""
    if "aud" in changes:
        aud = changes.pop("aud")
        site.provider.forge = lambda _: site.provider.sign(aud=aud, **ADMIN)
    browser, landed = site.sign_in(sub="5", preferred_username="eve", **changes)
    assert (landed.url.path, landed.url.query) == ("/login", f"error={error}".encode())
    assert session(browser) is None
    assert site.audit("action=SignIn")[0]["code"] == error


def forged(site: Installation) -> list[str]:
    """ID tokens that the provider's own key has not signed as they are."""
    mine = {"iss": site.provider.url, "aud": CLIENT_ID, **ADMIN}
    kid = site.provider.newest
    unsigned = raw({"alg": "none", "kid": kid}, claims(**mine)).rpartition(".")[0] + "."
    good = site.provider.sign(**(mine | {"roles": ["ml-users"]}))
    return [
        unsigned,
        token(OTHER_KEY, kid=kid, **mine),
        hs256(CLIENT_SECRET.encode(), kid),
        good.rpartition(".")[0] + ".AAAA",
        site.provider.sign(**mine).rpartition(".")[0] + "." + good.rpartition(".")[2],
        "",
        "not a token",
    ]


def test_a_forged_id_token_signs_nobody_in(site: Installation) -> None:
    """Although it comes from the token endpoint itself."""
    for text in forged(site):
        site.provider.forge = lambda _, text=text: text
        browser, landed = site.sign_in()
        assert landed.url.path == "/login", text
        assert session(browser) is None


def test_a_callback_that_nobody_asked_for_signs_nobody_in(site: Installation) -> None:
    """Without a state, with another browser's, with an error of the provider."""
    for query in ("", "code=x", "code=x&state=y", "error=access_denied", "error=%00"):
        browser = site.browser()
        answer = browser.get(f"/sso/oidc/login/callback/?{query}")
        assert answer.status_code < 500, (query, answer.text[:300])
        assert session(browser) is None
    assert site.browser().get("/sso/other/login/").status_code == 404


def test_an_account_is_not_connected_to_a_local_user(site: Installation) -> None:
    """A page that sends a signed-in administrator to connect attaches nothing."""
    site.provider.claims = ADMIN | {"sub": "9", "preferred_username": "mallory"}
    landed = site.root.get("/sso/oidc/login/?process=connect")
    assert landed.url.query == b"error=oidc_failed"
    found = session(site.root)
    assert found is not None and found["username"] == "root"


def test_the_redirect_after_login_stays_on_this_site(site: Installation) -> None:
    site.provider.claims = ADMIN
    landed = site.browser().get("/sso/oidc/login/?next=https://evil.example/")
    assert landed.url.host == "127.0.0.1" and landed.url.port == site.web.port


def test_no_secret_of_the_login_is_in_the_processes_log(site: Installation) -> None:
    site.sign_in()
    text = site.web.log()
    for secret in (CLIENT_SECRET, PASSWORD, "id_token", "eyJ"):
        assert secret not in text
