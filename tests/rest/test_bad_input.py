"""Bad input is a typed 4xx, never a 5xx and never accepted: every row on every write endpoint."""

import gzip
import time
from typing import Any

import pytest
from django.test import Client

from controlplane.entrypoints.rest import referring
from tests.rest.conftest import Api

SPEC: dict[str, Any] = {"version": "v2", "source": "simulated://demo", "gpu_memory": 1 << 30}
ARM = {"name": "a", "version_id": "m@v1", "weight": 1.0}

# Every endpoint that takes a JSON body: method, path, a body that would be accepted.
WRITES: list[tuple[str, str, dict[str, Any]]] = [
    ("post", "session/", {"username": "root", "password": "wrong"}),
    ("post", "tickets/", {"tenant": "acme"}),
    ("post", "tenants/", {"name": "globex"}),
    ("patch", "tenants/acme/", {"tier": "free"}),
    ("post", "tenants/acme/suspend/", {"reason": "x"}),
    ("post", "tenants/acme/resume/", {"reason": "x"}),
    ("put", "tenants/acme/capture/", {"captures_text": True}),
    ("post", "tenants/acme/erase-text/", {"reason": "x"}),
    ("put", "tenants/acme/budgets/b/", {"limit": "5"}),
    ("post", "tenants/acme/budgets/default/reset/", {"reason": "x"}),
    ("post", "tenants/acme/keys/", {"name": "ci"}),
    ("post", "tenants/acme/keys/k/rotate/", {"previous_valid_until": 0.0}),
    ("post", "tenants/acme/keys/k/suspend/", {"reason": "x"}),
    ("post", "tenants/acme/keys/k/resume/", {"reason": "x"}),
    ("post", "models/", {"name": "n"}),
    ("put", "models/m/access/", {"public": True}),
    ("post", "models/m/aliases/", {"alias": "b"}),
    ("post", "models/m/versions/", SPEC),
    ("post", "models/m/versions/v1/retire/", {"reason": "x"}),
    ("post", "models/m/versions/v1/scale/", {"min_replicas": 1, "max_replicas": 2}),
    ("post", "models/m/versions/v1/default/", {"reason": "x"}),
    ("put", "models/m/versions/v1/price/", {"input": "0.15", "output": "0.6"}),
    ("post", "routes/", {"name": "s", "arms": [ARM]}),
    ("put", "routes/r/", {"arms": [ARM]}),
    ("post", "nodes/n1/drain/", {"reason": "x"}),
    ("post", "nodes/n1/undrain/", {"reason": "x"}),
    ("put", "retention/text/", {"days": 7}),
    ("post", "apply/", {"models": []}),
]

# Bodies that no endpoint may accept, with the code each gets everywhere.
BODIES: dict[str, tuple[bytes, str]] = {
    "deep": (b"[" * 20_000, "json_too_deep"),
    "deep objects": (b'{"a":' * 20_000, "json_too_deep"),
    "deep, closed": (b"[" * 5_000 + b"]" * 5_000, "json_too_deep"),
    "lone surrogate": (rb'{"reason": "\ud800"}', "invalid_unicode"),
    "surrogate key": (rb'{"\udfff": 1}', "invalid_unicode"),
    "NUL": (rb'{"reason": "a\u0000b"}', "invalid_unicode"),
    "not UTF-8": (b'{"reason": "\xff\xfe"}', "invalid_unicode"),
    "NaN": (b'{"reason": NaN}', "invalid_number"),
    "infinity": (b'{"reason": -Infinity}', "invalid_number"),
    "1e999": (b'{"reason": 1e999}', "invalid_number"),
    "endless integer": (b'{"reason": ' + b"9" * 5_000 + b"}", "invalid_number"),
    "duplicate key": (b'{"reason": "a", "reason": "b"}', "duplicate_key"),
    "cut off": (b'{"reason": "a', "invalid_json"),
    "not JSON": (b"reason=a", "invalid_json"),
    "trailing": (b'{"reason": "a"} x', "invalid_json"),
    "too large": (b'{"reason": "' + b"x" * (1024 * 1024) + b'"}', "body_too_large"),
}


@pytest.fixture
def api(admin: Api) -> Api:
    admin.post("tenants/", {"name": "acme"})
    admin.post("models/", {"name": "m"})
    admin.post("models/m/versions/", {**SPEC, "version": "v1"})
    assert admin.get("models/m/?min_position=3").status_code == 200
    return admin


def problem(answer: Any, status: int | None = None) -> str:
    """The code of a refusal; a fault of ours, a page of HTML or a success fails the test."""
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.content[:300])
    assert status in (None, answer.status_code), answer.content
    assert answer["Content-Type"] == "application/problem+json"
    body = answer.json()
    assert body["request_id"] and body["status"] == answer.status_code
    assert "Traceback" not in body["detail"] and " at 0x" not in body["detail"]
    return body["code"]


def test_no_endpoint_accepts_a_body_that_cannot_be_trusted(api: Api) -> None:
    started = time.monotonic()
    for method, path, _ in WRITES:
        for name, (body, code) in BODIES.items():
            answer = api.call(method, path, raw=body)
            assert problem(answer) == code, (method, path, name, answer.content)
    assert (time.monotonic() - started) / (len(WRITES) * len(BODIES)) < 0.2


def test_no_endpoint_accepts_an_unknown_field_or_another_shape(api: Api) -> None:
    for method, path, body in WRITES:
        unknown = {**body, "engine_args": ["--trust-remote-code"]}
        assert problem(api.call(method, path, unknown), 400) == "unknown_field", path
        for shape in ([body], "text", 7, True, None):
            code = problem(api.call(method, path, raw=_json(shape)), 400)
            assert code in ("invalid_type", "null"), (path, shape, code)


def test_the_detail_alone_names_the_field(api: Api) -> None:
    """A script may print ``detail`` and nothing else of the problem."""
    answers = {
        "tier_name": api.post("tenants/", {"name": "b", "tier_name": "free"}),
        "gpu_memory": api.post("models/m/versions/", {"version": "v2", "source": "simulated://m"}),
        "arms.0.weight": api.post(
            "routes/", {"name": "r", "arms": [{"name": "a", "version_id": "m@v1"}]}
        ),
    }
    for field, answer in answers.items():
        assert problem(answer, 400) and field in answer.json()["detail"], answer.content


def test_no_endpoint_takes_a_value_of_another_type(api: Api) -> None:
    for method, path, body in WRITES:
        for field, value in body.items():
            for wrong in ({"a": 1}, [[]], 1.5, True, "１２", None):
                if type(wrong) is type(value) or (field, wrong) == ("days", None):
                    continue
                code = problem(api.call(method, path, {**body, field: wrong}))
                allowed = ("invalid_type", "invalid_budget", "invalid_size", "null")
                assert code in allowed, (path, field, wrong)


def test_integers_are_integers(api: Api) -> None:
    for wrong in ("12", "１２", 12.0, True, [12]):
        scale = {"min_replicas": wrong, "max_replicas": 2}
        answer = api.post("models/m/versions/v1/scale/", scale)
        assert problem(answer, 400) == "invalid_type"
        assert answer.json()["errors"][0]["pointer"] == "/min_replicas"


def test_no_endpoint_takes_another_media_type_or_encoding(api: Api) -> None:
    for method, path, _ in WRITES:
        for media_type in ("text/xml", "multipart/form-data; boundary=x", "text/plain"):
            answer = api.call(method, path, raw=b"<a/>", content_type=media_type)
            assert problem(answer, 415) == "unsupported_media_type", path
        packed = gzip.compress(b"{}" * 1000)
        answer = api.call(method, path, raw=packed, headers={"Content-Encoding": "gzip"})
        assert problem(answer, 415) == "unsupported_encoding", path


NAMES = (
    "../../etc", "a/../b", "a\\b", "A", "", " a", "-a", "x" * 300, "a\u202eb", "\u0430cme", "a b",
)  # fmt: skip


def test_names_follow_one_rule(api: Api) -> None:
    for name in NAMES:
        for path, body in (
            ("tenants/", {"name": name}),
            ("models/", {"name": name}),
            ("models/m/aliases/", {"alias": name}),
            ("models/m/versions/", {**SPEC, "version": name}),
            ("routes/", {"name": name, "arms": [ARM]}),
        ):
            assert problem(api.post(path, body), 400) in ("invalid_name", "blank"), (path, name)


def test_sources_are_of_known_schemes(api: Api) -> None:
    for source in ("http://169.254.169.254/x", "http://a\\@b", "//host/x", "file:", "ftp://x/y"):
        answer = api.post("models/m/versions/", {**SPEC, "source": source})
        assert problem(answer, 400) == "source_not_allowed", source


def test_a_text_that_no_node_could_take_is_no_source(api: Api) -> None:
    """Over REST and in a file; a draft model's as well. Nothing is registered."""
    for source in ("pypi://../x", "hf://../..", "pypi://--pre==1",
                   "simulated://x?step_ms=nan"):  # fmt: skip
        answer = api.post("models/m/versions/", {**SPEC, "source": source})
        assert problem(answer, 400) == "invalid_source", source
        text = f"models: [{{name: m2, source: '{source}', gpu_memory: 1GiB}}]"
        answer = api.call("post", "apply/", raw=text, content_type="application/yaml")
        assert problem(answer, 400) == "invalid_source", source
    draft = {"speculation": "draft", "draft_model": "hf://../.."}
    answer = api.post("models/m/versions/", {**SPEC, "source": "hf://a/b@main", **draft})
    assert problem(answer, 400) == "invalid_source"
    assert api.get("models/m2/").status_code == 404


def test_route_weights_are_finite_and_above_nothing(api: Api) -> None:
    for arms in (
        [{**ARM, "weight": -1}],
        [{**ARM, "weight": 0}],
        [{**ARM, "weight": 1e300}],
        [],
        [ARM, ARM],
        [{**ARM, "version_id": "m@v99"}],
        [{**ARM, "name": f"a{i}"} for i in range(33)],
    ):
        assert problem(api.post("routes/", {"name": "s", "arms": arms})) == "invalid_route"


def test_too_many_arms_are_refused_before_their_versions_are_looked_up(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thousand look-ups would take seconds, for a 422."""
    looked_up: list[str] = []
    monkeypatch.setattr(referring, "require_versions", looked_up.extend)
    arms = [{**ARM, "name": f"a{i}"} for i in range(2000)]
    assert problem(api.post("routes/", {"name": "s", "arms": arms})) == "invalid_route"
    assert looked_up == []


def test_budgets_are_amounts_of_known_things(api: Api) -> None:
    path = "tenants/acme/budgets/b/"
    for wrong, code in (
        ({"limit": 5}, "invalid_type"), ({"limit": "-1"}, "invalid_budget"),
        ({"limit": "1e9"}, "invalid_budget"), ({"limit": "1.5"}, "invalid_budget"),
        ({"limit": str(2**62)}, "invalid_budget"), ({"limit": "5", "period": "week"}, None),
        ({"limit": "5", "scope": "org"}, None), ({"limit": "5", "unit": "eggs"}, None),
        ({"limit": "5", "scope": "key"}, None), ({"limit": "5", "target": "x"}, None),
        ({"limit": "1.0000000000001", "unit": "money"}, "invalid_amount"),
        ({"limit": str(10**13), "unit": "money"}, "invalid_budget"),
    ):  # fmt: skip
        assert problem(api.put(path, wrong)) == (code or "invalid_budget"), wrong
    assert problem(api.put("tenants/acme/budgets/A%20b/", {"limit": "1"})) == "invalid_name"


def test_prices_are_decimal_texts(api: Api) -> None:
    path = "models/m/versions/v1/price/"
    for wrong in ("-1", "1e3", "0.0000001", "1001", "NaN", " 1"):
        answer = api.put(path, {"input": "0", "output": wrong})
        assert problem(answer) == "invalid_price", wrong
    assert problem(api.put(path, {"input": "1", "cached_input": "2", "output": "0"})) == (
        "invalid_price"
    )
    assert problem(api.put(path, {"input": 0.15, "output": "1"}), 400) == "invalid_type"


LISTS = (
    "tenants/", "tenants/acme/keys/", "tenants/acme/budgets/", "models/", "models/m/versions/",
    "models/m/aliases/", "routes/", "nodes/", "placements/", "decisions/", "events/", "requests/",
    "usage/", "scalings/", "forecasts/", "preloads/", "preloads/totals/",
)  # fmt: skip


def test_every_list_refuses_what_it_does_not_filter_by(api: Api) -> None:
    for path in (*LISTS, "exports/audit/", "status/", "tenants/acme/"):
        for query in ("_connector=OR%201=1", "name__regex=.*", "order_by=a.b", "tenant_id__in=1"):
            code = problem(api.get(f"{path}?{query}"), 400)
            assert code == "unknown_filter", (path, query)
    assert problem(api.get("events/?stream=a&stream=b"), 400) == "unknown_filter"
    assert problem(api.get("events/?stream=a%00b"), 400) == "invalid_unicode"


def test_every_list_bounds_its_limit_and_cursor(api: Api) -> None:
    for path in LISTS:
        for limit in ("0", "-1", "1000000000", "ten", "１０", "1e1", ""):
            code = problem(api.get(f"{path}?limit={limit}"), 400)
            assert code == "invalid_limit", (path, limit)
    for path in (
        "events/?after=",
        "requests/?after=",
        "decisions/?before=",
        "exports/audit/?upto=",
    ):
        for cursor in ("-1", "x", str(2**63), "1.0"):
            assert problem(api.get(path + cursor), 400) == "invalid_cursor"
    for position in ("99999", "-1", "x"):
        assert problem(api.get(f"tenants/?min_position={position}"), 400) == "invalid_position"


def test_conventions_themselves_are_checked(api: Api) -> None:
    for key in ("", "a b", "x" * 256, "é"):
        answer = api.post("tenants/", {"name": "b"}, headers={"Idempotency-Key": key})
        assert problem(answer, 400) == "invalid_idempotency_key"
    assert problem(api.post("tenants/?dry_run=maybe", {"name": "b"}), 400) == "invalid_choice"
    assert problem(api.post("tenants/?force=true", {"name": "b"}), 400) == "unknown_filter"
    assert api.get("tenants/b/").status_code == 404


def test_a_catalog_file_with_one_mistake_changes_nothing(api: Api) -> None:
    head = api.get("status/").json()["head"]
    bomb = "a: &a [x]\nb: [*a, *a]\n"
    good = "- {name: good, source: 'simulated://x', gpu_memory: 1GiB}\n"
    dangling = "- {name: r, arms: [{name: a, version_id: good@v2, weight: 1}]}"
    for text, code in (
        ("models: [", "invalid_yaml"),
        (bomb, "invalid_yaml"),
        ("[" * 5_000, "json_too_deep"),
        ("models: []\nmodels: []", "duplicate_key"),
        ("models: [{name: a}]", "invalid_type"),
        ("models: [{name: a, env: {}}]", "unknown_field"),
        (f"models:\n{good}- {{name: x, source: 'simulated://x', gpu_memory: lots}}",
         "invalid_size"),
        (f"models:\n{good}- {{name: x, source: 'http://x', gpu_memory: 1GiB}}",
         "source_not_allowed"),
        (f"models:\n{good}- {{name: x, version: 1.0, source: 'simulated://x', gpu_memory: 1}}",
         "invalid_type"),
        (f"models:\n{good}routes: [{{name: r, arms: [{{name: a, version_id: x, weight: .nan}}]}}]",
         "invalid_route"),
        (f"models:\n{good}routes:\n{dangling}",
         "invalid_route"),
        ("models: !!python/object/apply:os.system ['true']", "invalid_yaml"),
        ("1: 2", "invalid_yaml"),
        ("models: 9e999999", "invalid_type"),
        ("a: 2026-13-45", "invalid_yaml"),
        ("!!timestamp 99999-01-01", "invalid_yaml"),
        ("a: !!bool x", "invalid_yaml"),
        ("a: !!int ''", "invalid_yaml"),
    ):  # fmt: skip
        answer = api.call("post", "apply/", raw=text, content_type="application/yaml")
        assert problem(answer) == code, (text, answer.content)
    since = api.get(f"events/?after={head}").json()["results"]
    assert {event["type"] for event in since} == {"CommandRefused"}


def test_unknown_addresses_and_methods_are_problems_too(api: Api) -> None:
    stranger = Api(client=Client(enforce_csrf_checks=True))
    for method in ("get", "post", "delete"):
        assert problem(stranger.call(method, "nothing/", {}), 404) == "not_found"
    assert problem(api.call("post", "status/", {}), 405) == "method_not_allowed"
    assert problem(api.get("tenants/acme/", headers={"Host": "evil.example"}), 400) == "bad_host"
    assert api.get("status/", headers={"Accept": "text/html"}).status_code == 200


def _json(value: Any) -> bytes:
    import json

    return json.dumps(value).encode()
