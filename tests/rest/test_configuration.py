"""The whole configuration goes out as one file and into an empty system, to the same hash."""

import shutil
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from msgspec.structs import replace

from controlplane import bootstrap
from controlplane.projections.base import Row, key_of
from controlplane.projections.catalog import Alias, Model, Version
from controlplane.projections.routes import Route
from controlplane.projections.tenants import Tenant
from tests.conftest import pointed_at
from tests.rest.conftest import Api, login
from tests.rest.conftest import key_of as api_key_of
from tests.rest.test_bad_input import problem

SPEC = {"version": "v1", "source": "simulated://demo", "gpu_memory": 1 << 30}
BARE = "models: [{name: m, version: ''}]"
HAPPENED = {"created_at", "updated_at", "version", "added_at_position", "num_keys"}


def configure(admin: Api) -> str:
    """Something of everything that belongs to a configuration; its file."""
    admin.post("tenants/", {"name": "acme", "tier": "premium"})
    admin.post("models/", {"name": "m"})
    for name, rule in (
        ("all", {"limit": "1000", "period": "day"}),
        ("m", {"limit": "12.5", "unit": "money", "scope": "model", "target": "m"}),
    ):
        assert admin.put(f"tenants/acme/budgets/{name}/", rule).status_code == 200
    admin.post("tenants/", {"name": "umbrella"})
    admin.post("tenants/umbrella/suspend/", {"reason": "unpaid: 3 bills"})
    admin.post("tenants/", {"name": "idle", "tier": "free"})
    for version in ("v2", "v1", "v0"):  # the oldest is the default unless one is chosen
        body = {**SPEC, "version": version, "max_replicas": 4, "priority": "high"}
        assert admin.post("models/m/versions/", body).status_code == 201
    admin.post("models/m/versions/v1/scale/", {"min_replicas": 0, "max_replicas": 3})
    admin.put("models/m/versions/v1/price/", {"input": "0.15", "output": "0.60"})
    admin.post("models/m/versions/v1/default/", {})
    admin.post("models/m/versions/v2/retire/", {})
    admin.post("models/m/aliases/", {"alias": "small"})
    admin.put("models/m/access/", {"public": False, "tenants": ["acme"]})
    admin.post("models/", {"name": "bare"})
    admin.post("models/bare/aliases/", {"alias": "nothing-yet"})
    admin.post("models/", {"name": "gone"})
    admin.post("models/gone/versions/", SPEC)
    admin.post("models/gone/versions/v1/retire/", {})
    arms = [{"name": "a", "version_id": "m@v1", "weight": 1},
            {"name": "b", "version_id": "m@v0", "weight": 9.5}]  # fmt: skip
    admin.post("routes/", {"name": "chat", "arms": arms, "sticky": False})
    api_key_of(admin, "acme", "inference")
    head = admin.get("status/").json()["head"]
    admin.get(f"tenants/?min_position={head}")
    answer = admin.get("apply/")
    assert answer["X-Configuration-Hash"] in answer.content.decode()
    return answer.content.decode()


@pytest.fixture
def elsewhere(migrated_file: Path, tmp_path: Path) -> Iterator[Any]:
    """``with elsewhere():`` the installation is another one, and empty."""
    from contextlib import contextmanager

    @contextmanager
    def other() -> Iterator[Api]:
        path = tmp_path / "other.sqlite3"
        shutil.copy(migrated_file, path)
        forget()
        with pointed_at(path):
            yield login("root", "admin")
            forget()

    yield other


def forget() -> None:
    from controlplane.entrypoints.rest import reading

    bootstrap.event_store().close()
    reading._projector.cache_clear()
    for part in vars(bootstrap).values():
        if hasattr(part, "cache_clear"):
            part.cache_clear()


def changes() -> list[str]:
    """The types of the log's events, without those that only say who asked for what."""
    only_said = {"CommandRefused", "SignedIn", "DashboardUserSaved"}
    recorded = bootstrap.event_store().read_all(0, 10_000)
    return [one.type for one in recorded if one.type not in only_said]


def apply(api: Api, text: str, query: str = "") -> Any:
    answer = api.call("post", f"apply/{query}", raw=text, content_type="application/yaml")
    if answer.status_code == 200:
        api.get(f"tenants/?min_position={answer['X-Log-Position']}")
    return answer


def configured() -> list[Row]:
    """The rows that a configuration makes, without what only happened."""
    rows = bootstrap.timeline().at(bootstrap.event_store().head().position).rows
    found: list[Row] = []
    for table in (Tenant, Model, Version, Alias, Route):
        hidden = {
            name: type(getattr(row, name))()
            for row in rows.all(table)
            for name in set(row.__struct_fields__) & HAPPENED
            if isinstance(getattr(row, name), (int, float))
        }
        found += [replace(row, **hidden) for row in sorted(rows.all(table), key=key_of)]
    return found


def test_a_file_of_everything_makes_an_empty_system_the_same(admin: Api, elsewhere: Any) -> None:
    text, before = configure(admin), configured()
    digest = admin.get("apply/")["X-Configuration-Hash"]
    with elsewhere() as other:
        done = apply(other, text)
        assert done.status_code == 200, done.content
        assert other.get("apply/")["X-Configuration-Hash"] == digest
        assert configured() == before
        assert other.get("models/m/").json()["default_version"] == "v1"
        assert other.get("tenants/umbrella/").json()["suspended_reason"] == "unpaid: 3 bills"
        again = apply(other, text).json()
        assert again["changed"] == 0
        second = other.get("apply/").content.decode()
        assert without_heading(second) == without_heading(without_keys(text))


def without_heading(text: str) -> str:
    return text[text.index("format:") :]


def without_keys(text: str) -> str:
    return text.replace(
        "  keys:\n  - name: test\n    role: developer\n    scopes:\n    - inference\n", ""
    )


def test_the_command_does_the_same(admin: Api, elsewhere: Any, tmp_path: Path) -> None:
    text = configure(admin)
    call_command("apply", "--export", stdout=(out := StringIO()))
    assert out.getvalue() == text
    path = tmp_path / "all.yaml"
    path.write_text(text)
    with elsewhere():
        call_command("apply", str(path), stdout=(out := StringIO()))
        digest = out.getvalue().splitlines()[-1].removeprefix("configuration ")
        assert digest in text
        call_command("apply", str(path), stdout=(out := StringIO()))
        assert out.getvalue().startswith("nothing to change\n")


def test_applied_where_it_came_from_it_changes_nothing(admin: Api) -> None:
    text = configure(admin)
    assert apply(admin, text).json()["changed"] == 0


def test_keys_are_named_without_their_secrets_and_none_is_made(admin: Api, elsewhere: Any) -> None:
    text = configure(admin)
    key = admin.get("tenants/acme/keys/").json()["results"][0]
    assert "keys:" in text and "without their secrets" in text and key["key_id"] not in text
    with elsewhere() as other:
        apply(other, text)
        assert other.get("tenants/acme/keys/").json()["count"] == 0


def test_half_a_file_changes_nothing(admin: Api, elsewhere: Any, tmp_path: Path) -> None:
    """Wherever it is cut: after a line, within one, and before its very last character."""
    text = configure(admin)
    cuts = [index for index, letter in enumerate(text) if letter == "\n"]
    cuts = [at for at in cuts if at < len(text) - 1] + [len(text) // 2, len(text) - 7]
    with elsewhere() as other:
        for cut in cuts:
            half = text[:cut]
            if "format:" not in half:
                continue  # a heading alone is an empty file
            answer = apply(other, half)
            assert answer.status_code in (400, 422), half[-80:]
        assert changes() == []
        path = tmp_path / "half.yaml"
        path.write_text(text[: cuts[-2]])
        with pytest.raises(CommandError):
            call_command("apply", str(path))
        assert changes() == []


def test_a_file_with_one_mistake_changes_nothing(admin: Api) -> None:
    text = "tenants: [{name: acme}]\nmodels: [{name: m, source: 'ftp://x', gpu_memory: 1}]"
    assert problem(apply(admin, text)) == "source_not_allowed"
    for bad, code in (
        ("format: 2\nend: true", "unknown_format"),
        ("format: 1\ntenants: [{name: acme}]", "incomplete_file"),
        ("models: [{name: m, source: 'simulated://x'}]", "invalid_type"),
        ("models: [{name: m, gpu_memory: 1}]", "invalid_type"),
        ("tenants: [{name: acme, tier: gold}]", "invalid_tier"),
    ):
        assert problem(apply(admin, bad)) == code, bad
    assert changes() == []


def test_a_file_gives_nobody_rights(admin: Api) -> None:
    """An operator may change models but no tenant, by hand or by file."""
    operator = login("ops", "operator")
    refused = apply(operator, f"{BARE}\ntenants: [{{name: acme}}]")
    assert problem(refused, 403) == "forbidden"
    assert changes() == []
    assert apply(operator, BARE).json()["changed"] == 1
    assert changes() == ["ModelRegistered"]


def test_the_past_is_exported_as_it_was(admin: Api) -> None:
    text = configure(admin)
    position = admin.get("status/").json()["head"]
    admin.patch("tenants/acme/", {"tier": "free"})
    admin.delete("routes/chat/")
    assert admin.get(f"apply/?as_of={position}").content.decode() == text
