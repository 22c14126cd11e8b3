"""What holds for every write and every read, shown on tenants, models and routes."""

from typing import Any

from controlplane import bootstrap
from controlplane.application.ports import EventMeta
from controlplane.domain import model, node
from controlplane.domain.ids import NodeId
from controlplane.domain.version_spec import VersionSpec
from tests.rest.conftest import Api, key_of, position_of

SPEC = {"version": "v1", "source": "simulated://demo", "gpu_memory": 1 << 30}


def test_a_write_answers_with_its_position_and_can_be_read_there(admin: Api) -> None:
    written = admin.post("tenants/", {"name": "acme", "tier": "premium", "reason": "new customer"})
    assert written.status_code == 201
    receipt = written.json()
    assert receipt["changed"] and receipt["version"] == 1 and written["ETag"] == '"1"'
    assert [event["type"] for event in receipt["events"]] == ["TenantCreated"]
    position = position_of(written)
    read = admin.get(f"tenants/acme/?min_position={position}")
    assert read.status_code == 200 and position_of(read) >= position and read["ETag"] == '"1"'
    assert read.json()["tier"] == "premium"
    event = admin.get("events/?stream=tenant-acme").json()["results"][0]
    assert (event["actor"], event["reason"]) == ("user:root", "new customer")


def test_a_wish_that_is_already_true_changes_nothing(admin: Api) -> None:
    admin.post("models/", {"name": "m"})
    again = admin.post("models/", {"name": "m"})
    assert again.status_code == 201
    assert not again.json()["changed"] and again.json()["events"] == []


def test_a_stale_if_match_is_412_with_the_version_now(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    first = admin.patch("tenants/acme/", {"tier": "free"}, headers={"If-Match": '"1"'})
    assert first.status_code == 200 and first["ETag"] == '"2"'
    stale = admin.patch("tenants/acme/", {"tier": "premium"}, headers={"If-Match": '"1"'})
    assert stale.status_code == 412 and stale["ETag"] == '"2"'
    assert stale.json()["code"] == "version_conflict"
    weak = admin.patch("tenants/acme/", {"tier": "premium"}, headers={"If-Match": 'W/"2"'})
    assert weak.status_code == 200
    anything = admin.patch("tenants/acme/", {"tier": "free"}, headers={"If-Match": "*"})
    assert anything.status_code == 200
    for value in ("17", '"x"', '"-1"', '"1", "2"'):
        bad = admin.patch("tenants/acme/", {"tier": "free"}, headers={"If-Match": value})
        assert (bad.status_code, bad.json()["code"]) == (400, "invalid_if_match")


def test_an_idempotency_key_gives_the_first_answer_again(admin: Api) -> None:
    key = {"Idempotency-Key": "k1"}
    first = admin.post("tenants/", {"name": "acme"}, headers=key)
    again = admin.post("tenants/", {"name": "acme"}, headers=key)
    assert again.status_code == 201 and again.content == first.content
    assert again["Idempotent-Replayed"] == "true" and position_of(again) == position_of(first)
    other = admin.post("tenants/", {"name": "globex"}, headers=key)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
    elsewhere = admin.post("models/", {"name": "acme"}, headers=key)
    assert elsewhere.status_code == 201


def test_a_key_is_issued_once_however_often_it_is_asked_for(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    header = {"Idempotency-Key": "k1"}
    first = admin.post("tenants/acme/keys/", {"name": "ci"}, headers=header)
    again = admin.post("tenants/acme/keys/", {"name": "ci"}, headers=header)
    assert first.json()["secret"].startswith("sk_") and again.json()["secret"] is None
    assert first.json()["key_id"] == again.json()["key_id"]
    position = position_of(first)
    listed = admin.get(f"tenants/acme/keys/?min_position={position}").json()
    assert listed["count"] == 1 and listed["results"][0]["last4"] == first.json()["last4"]
    secret = first.json()["secret"]
    everything = admin.get("events/?limit=1000").content + admin.get("exports/audit/").getvalue()
    assert secret.partition(".")[2].encode() not in everything


def test_a_dry_run_shows_the_events_and_keeps_none(admin: Api) -> None:
    tried = admin.post("tenants/?dry_run=true", {"name": "acme"})
    assert tried.status_code == 200 and tried.json()["dry_run"]
    assert tried.json()["events"][0]["data"]["tenant_id"] == "acme"
    assert admin.get("events/").json()["results"] == []
    admin.post("tenants/", {"name": "acme"})
    admin.post("tenants/acme/keys/?dry_run=true", {"name": "ci"})
    assert admin.get("tenants/acme/keys/?min_position=1").json()["count"] == 0
    refused = admin.post("tenants/?dry_run=true", {"name": "acme"})
    assert (refused.status_code, refused.json()["code"]) == (409, "tenant_exists")


def test_events_are_paged_by_position_both_ways(admin: Api) -> None:
    for index in range(5):
        admin.post("tenants/", {"name": f"t{index}"})
    seen, path = [], "events/?limit=2"
    while path:
        page = admin.get(path).json()
        seen += [event["position"] for event in page["results"]]
        path = page["next"].removeprefix("/api/v1/") if page["next"] else ""
    assert seen == [1, 2, 3, 4, 5]
    newest = admin.get("events/?order=desc&limit=2").json()
    assert [event["position"] for event in newest["results"]] == [5, 4]
    older = admin.get(newest["next"].removeprefix("/api/v1/")).json()
    assert [event["position"] for event in older["results"]] == [3, 2]


def test_lists_count_and_link(admin: Api) -> None:
    for index in range(3):
        last = admin.post("tenants/", {"name": f"t{index}"})
    at = position_of(last)
    page = admin.get(f"tenants/?limit=2&min_position={at}").json()
    assert (page["count"], page["previous"], len(page["results"])) == (3, None, 2)
    rest = admin.get(page["next"].removeprefix("/api/v1/")).json()
    assert [tenant["name"] for tenant in rest["results"]] == ["t2"] and rest["next"] is None


def test_time_travel_shows_what_was(admin: Api) -> None:
    created = admin.post("tenants/", {"name": "acme", "tier": "free"})
    changed = admin.patch("tenants/acme/", {"tier": "premium"})
    before = admin.get(f"tenants/acme/?as_of={position_of(created)}")
    after = admin.get(f"tenants/acme/?as_of={position_of(changed)}")
    assert (before.json()["tier"], after.json()["tier"]) == ("free", "premium")
    assert admin.get("tenants/acme/?as_of=0").status_code == 404
    assert admin.get("tenants/?as_of=2000-01-01T00:00:00Z").json()["count"] == 0
    for value in ("yesterday", "2026-01-01", "99999", "-1"):
        assert admin.get(f"tenants/?as_of={value}").json()["code"] == "invalid_as_of"


def test_models_versions_routes_and_their_refusals(admin: Api) -> None:
    admin.post("models/", {"name": "m"})
    added = admin.post("models/m/versions/", SPEC)
    assert added.status_code == 201, added.content
    admin.post("models/m/aliases/", {"alias": "small"})
    admin.post("models/m/versions/v1/scale/", {"min_replicas": 0, "max_replicas": 3})
    admin.put("models/m/access/", {"public": False, "tenants": ["acme"]})
    scaled = admin.post("models/m/versions/v1/default/", {})
    at = position_of(scaled)
    model = admin.get(f"models/m/?min_position={at}").json()
    assert model["aliases"] == ["small"] and model["default_version"] == "v1"
    assert model["access"] == {"public": False, "tenants": ["acme"], "roles": []}
    version = model["versions"][0]
    assert (version["status"], version["max_replicas"]) == ("idle", 3)
    assert version == admin.get("models/m/versions/v1/").json()
    arms = [{"name": "a", "version_id": "m@v1", "weight": 1}]
    made = admin.post("routes/", {"name": "chat", "arms": arms})
    assert made.status_code == 201, made.content
    route = admin.get(f"routes/chat/?min_position={position_of(made)}").json()
    assert route["arms"] == [{"name": "a", "version_id": "m@v1", "weight": 1.0}]
    nowhere = admin.put("routes/chat/", {"arms": [{**arms[0], "version_id": "m@v9"}]})
    assert (nowhere.status_code, nowhere.json()["code"]) == (422, "invalid_route")
    taken = admin.post("models/m/aliases/", {"alias": "chat"})
    assert (taken.status_code, taken.json()["code"]) == (409, "name_taken")
    for path, body in (("models/", {"name": "chat"}), ("routes/", {"name": "m", "arms": arms})):
        shadow = admin.post(path, body)
        assert (shadow.status_code, shadow.json()["code"]) == (409, "name_taken"), path
    other = admin.post("models/m/versions/", {**SPEC, "max_batch": 7})
    assert (other.status_code, other.json()["code"]) == (409, "version_exists")
    assert admin.delete("routes/chat/").status_code == 200
    assert admin.post("models/m/versions/v1/retire/", {}).status_code == 200


def test_a_version_in_use_is_not_retired(admin: Api) -> None:
    """Whoever asks for the route or the model would get a 404; the sentence says what to do."""
    admin.post("models/", {"name": "m"})
    for version in ("v1", "v2"):
        admin.post("models/m/versions/", {**SPEC, "version": version})
    arms = [{"name": "a", "version_id": "m@v1", "weight": 1},
            {"name": "b", "version_id": "m@v2", "weight": 0}]  # fmt: skip
    for name in ("chat", "beta"):
        admin.post("routes/", {"name": name, "arms": arms})

    def refused(version: str, query: str = "") -> str:
        answer = admin.post(f"models/m/versions/{version}/retire/{query}", {})
        assert (answer.status_code, answer.json()["code"]) == (409, "in_use"), answer.content
        return str(answer.json()["detail"])

    both = "m@v1 is an arm of the routes beta, chat and the default of m; take it off the routes"
    for query in ("", "?dry_run=true"):
        assert refused("v1", query) == f"{both} and make another version the default first."
    admin.delete("routes/beta/")
    assert refused("v2") == "m@v2 is an arm of the route chat; take it off the route first."
    admin.delete("routes/chat/")
    assert refused("v1") == "m@v1 is the default of m; make another version the default first."
    key = {"headers": {"Idempotency-Key": "k"}}
    first = admin.post("models/m/versions/v2/retire/", {}, **key)
    assert first.status_code == 200
    assert admin.post("models/m/versions/v2/retire/", {}, **key).content == first.content
    assert admin.post("models/m/versions/v1/retire/", {}).status_code == 200, "the last live one"


def test_the_arms_of_a_route_are_live_and_of_one_task(admin: Api) -> None:
    admin.post("models/", {"name": "m"})
    for version in ("v1", "v2", "v3"):
        spec = {**SPEC, "version": version, "task": "embed" if version == "v3" else "generate"}
        assert admin.post("models/m/versions/", spec).status_code == 201
    admin.post("models/m/versions/v2/retire/", {})
    live, retired, embeds = (
        {"name": name, "version_id": f"m@{name}", "weight": 1} for name in ("v1", "v2", "v3")
    )
    both = "m@v1 is to generate and m@v3 is to embed; the arms of a route have one task."
    admin.post("routes/", {"name": "chat", "arms": [live]})
    for order in (admin.post, admin.put):
        path, name = ("routes/", {"name": "s"}) if order == admin.post else ("routes/chat/", {})
        for arms, told in (([live, retired], "m@v2 is retired."), ([live, embeds], both)):
            answer = order(path, {**name, "arms": arms})
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_route")
            assert told in answer.json()["detail"]
    assert admin.post("routes/", {"name": "vectors", "arms": [embeds]}).status_code == 201


def test_a_version_has_a_price_that_changes_over_time(admin: Api) -> None:
    admin.post("models/", {"name": "m"})
    admin.post("models/m/versions/", SPEC)
    path, price = "models/m/versions/v1/price/", {"input": "0.15", "output": "0.60"}
    tried = admin.put(f"{path}?dry_run=true", price).json()
    assert tried["events"][0]["type"] == "ModelPriceSet"
    first = admin.put(path, {**price, "cached_input": "0.075", "reason": "list price"})
    assert first.status_code == 200, first.content
    second = admin.put(path, {"input": "0", "output": "0.000001"})

    def shown(query: str) -> dict[str, str]:
        return admin.get(f"models/m/versions/v1/?{query}").json()["price"]

    unpriced = {"input": "0", "cached_input": "0", "output": "0"}
    assert shown(f"as_of={position_of(first) - 1}") == unpriced
    assert shown(f"as_of={position_of(first)}") == {
        "input": "0.15", "cached_input": "0.075", "output": "0.6"
    }  # fmt: skip
    assert shown(f"min_position={position_of(second)}") == {**unpriced, "output": "0.000001"}
    stale = admin.put(path, price, headers={"If-Match": first["ETag"]})
    assert (stale.status_code, stale.json()["code"]) == (412, "version_conflict")
    assert admin.get(f"events/?after={position_of(first) - 1}").json()["results"][0]["reason"] == (
        "list price"
    )


def test_a_list_costs_the_same_queries_however_long(
    admin: Api, django_assert_max_num_queries: Any
) -> None:
    write_something_of_everything()
    for path in ("tenants/", "models/", "routes/", "nodes/", "placements/", "decisions/",
                 "events/", "requests/", "scalings/", "preloads/totals/"):  # fmt: skip
        with django_assert_max_num_queries(7):  # session, user and role are three of them
            assert admin.get(path).status_code == 200, path
    assert len(admin.get("nodes/").json()["results"]) == 3


def write_something_of_everything() -> None:
    handler, meta = bootstrap.command_handler(), EventMeta(actor="system:test")
    for index in range(6):
        name = f"m{index}"
        spec = VersionSpec(version="v1", source="simulated://x", gpu_memory=1)
        for command in (model.RegisterModel(name, 1.0), model.AddVersion(name, spec, 1.0)):
            handler.handle(model.DECIDER, f"model-{name}", command, meta)
    for node_id in map(NodeId, ("n1", "n2", "n3")):
        joined = node.NodeJoined(node_id, "b", "z", (), 1.0)
        record = node.RecordNodeEvents(node_id, (joined,), 1.0)
        handler.handle(node.DECIDER, f"node-{node_id}", record, meta)
    bootstrap.projector().catch_up_all()


def test_a_suspended_tenants_key_administers_nothing(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    key = key_of(admin, "acme", "admin:read")
    assert key.get("tenants/acme/").status_code in (200, 404)
    suspended = admin.post("tenants/acme/suspend/", {"reason": "unpaid"})
    admin.get(f"tenants/acme/?min_position={position_of(suspended)}")
    assert key.get("tenants/acme/").json()["code"] == "tenant_suspended"
    resumed = admin.post("tenants/acme/resume/", {})
    admin.get(f"tenants/acme/?min_position={position_of(resumed)}")
    assert key.get("tenants/acme/").status_code == 200


def test_a_deleted_tenant_is_gone_once_its_keys_are(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    key = admin.post("tenants/acme/keys/", {"name": "ci"}).json()["key_id"]
    assert admin.delete("tenants/acme/").json()["code"] == "in_use"
    assert admin.delete(f"tenants/acme/keys/{key}/").status_code == 200
    gone = admin.delete("tenants/acme/")
    assert admin.get(f"tenants/acme/?min_position={position_of(gone)}").status_code == 404


def test_status_says_how_far_the_read_model_is(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    status = admin.get("status/").json()
    assert status["head"] == 1 and status["projection_lag"] == 1 - status["position"]
    assert status["gateway_url"].startswith("http")
