"""The whole configuration goes out as one file and into an empty system, to the same hash."""

import shutil
from collections.abc import Iterator
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from django.core.management import CommandError, call_command
from msgspec.structs import replace

from controlplane import bootstrap
from controlplane.application.catalog_file import CatalogFile, RoutingEntry
from controlplane.domain import retention
from controlplane.domain.routing import Weights
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
    assert admin.put("tenants/acme/capture/", {"captures_text": True}).status_code == 200
    weights = {"beta": 2.0, "omega": [0.25, 0.25, 0.25, 0.25]}
    assert admin.patch("routing/weights/", weights).status_code == 200
    for kind, days in (("requests", 730), ("text", None)):
        assert admin.put(f"retention/{kind}/", {"days": days}).status_code == 200
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
    settings_before = settings(admin)
    digest = admin.get("apply/")["X-Configuration-Hash"]
    with elsewhere() as other:
        done = apply(other, text)
        assert done.status_code == 200, done.content
        assert other.get("apply/")["X-Configuration-Hash"] == digest
        assert configured() == before
        assert other.get("models/m/").json()["default_version"] == "v1"
        assert other.get("tenants/umbrella/").json()["suspended_reason"] == "unpaid: 3 bills"
        assert settings(other) == settings_before
        again = apply(other, text).json()
        assert again["changed"] == 0
        second = other.get("apply/").content.decode()
        assert without_heading(second) == without_heading(without_keys(text))


def settings(api: Api) -> tuple[Any, ...]:
    """Those of the installation, and whether each tenant's text is captured."""
    weights = {k: v for k, v in api.get("routing/weights/").json().items() if k != "version"}
    kept = [(one["kind"], one["days"]) for one in api.get("retention/").json()["results"]]
    captured = [one["captures_text"] for one in api.get("tenants/").json()["results"]]
    return weights, kept, captured


def test_settings_of_the_installation_are_in_the_file(admin: Api) -> None:
    """All weights, once one is not as at first; of what is kept, what is kept otherwise."""
    text = configure(admin)
    file = yaml.safe_load(text)
    assert (
        set(file["routing"])
        == set(Weights.__struct_fields__)
        == set(RoutingEntry.__struct_fields__)
    )
    assert file["routing"]["beta"] == 2.0 and file["routing"]["alpha"] == 1.0
    assert file["retention"] == {"requests": 730, "text": None}
    assert [one.get("captures_text") for one in file["tenants"]] == [True, None, None]


def test_a_file_may_name_every_kind_that_is_kept() -> None:
    kinds, _ = get_args(get_type_hints(CatalogFile)["retention"])
    assert set(get_args(kinds)) == set(retention.KINDS)


def test_a_new_installation_has_no_settings_in_its_file_nor_in_its_hash(admin: Api) -> None:
    """So a file without them keeps its hash."""
    answer = admin.get("apply/")
    assert answer.content.decode().endswith("format: 1\nend: true\n")
    assert answer["X-Configuration-Hash"] == sha256(b"[[],[],[]]").hexdigest()


def test_a_file_says_what_it_changes_of_the_settings_and_no_more(admin: Api) -> None:
    """Weights and kinds that it leaves out stay; one without any changes nothing, as ever."""
    configure(admin)
    assert apply(admin, "format: 1\ntenants: [{name: acme}]\nend: true").json()["changed"] == 0
    said = (
        "routing: {alpha: 3}\nretention: {text: 7}\ntenants: [{name: acme, captures_text: false}]"
    )
    assert apply(admin, said).json()["changed"] == 3
    weights, kept, captured = settings(admin)
    assert (weights["weights"]["alpha"], weights["weights"]["beta"]) == (3.0, 2.0)
    assert kept == [("requests", 730), ("text", 7)] and not any(captured)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ("routing: {alpha: -1}", "invalid_weight"),
        ("routing: {alpha: [1, 2]}", "invalid_type"),
        ("routing: {omega: 1}", "invalid_type"),
        ("routing: {zeta: 1}", "unknown_field"),
        ("retention: {text: 0}", "invalid_days"),
        ("retention: {logs: 7}", "invalid_type"),
        ("tenants: [{name: acme, captures_text: 'yes'}]", "invalid_type"),
    ],
)
def test_wrong_settings_are_refused(admin: Api, bad: str, code: str) -> None:
    assert problem(apply(admin, bad)) == code
    assert changes() == []


def test_a_file_captures_no_text_for_who_may_not(admin: Api) -> None:
    """An operator may set the weights, but neither retention nor capture, by hand or by file."""
    admin.post("tenants/", {"name": "acme"})
    operator, before = login("ops", "operator"), changes()
    for refused in ("retention: {text: 7}", "tenants: [{name: acme, captures_text: true}]"):
        assert problem(apply(operator, refused), 403) == "forbidden"
    assert changes() == before
    assert apply(operator, "routing: {beta: 2}").json()["changed"] == 1


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
