"""The retention policy over REST."""

from controlplane import bootstrap
from tests.rest.conftest import Api, login
from tests.rest.test_bad_input import problem


def test_the_policy_is_shown_set_and_on_record(admin: Api) -> None:
    listed = admin.get("retention/").json()["results"]
    assert [(one["kind"], one["days"]) for one in listed] == [("requests", 396), ("text", 30)]
    assert [one["goes"] for one in listed] == [False, True]  # no place for archives is set
    order = {"days": 7, "reason": "our promise"}
    assert admin.put("retention/text/?dry_run=true", order).json()["changed"] is True
    done = admin.put("retention/text/", order)
    assert done.json()["events"][0]["data"]["days_before"] == 30
    shown = admin.get("retention/text/")
    assert (shown.json()["days"], shown["ETag"]) == (7, '"1"')
    assert admin.put("retention/text/", order, headers={"If-Match": '"0"'}).status_code == 412
    entry = admin.get(f"audit/?outcome=done&min_position={done['X-Log-Position']}").json()[
        "results"
    ][0]
    assert (entry["action"], entry["reason"]) == ("RetentionSet", "our promise")
    assert entry["before"] == {"retention text": {"days": 30}}


def test_for_ever_is_null_and_an_undo_takes_it_back(admin: Api) -> None:
    done = admin.put("retention/requests/", {"days": None})
    assert admin.get("retention/requests/").json()["days"] is None
    assert admin.post(f"events/{done['X-Log-Position']}/undo/", {}).status_code == 200
    assert admin.get("retention/requests/").json()["days"] == 396


def test_what_is_no_policy_is_refused(admin: Api) -> None:
    for days in (0, 36_501):
        assert problem(admin.put("retention/text/", {"days": days}), 400) == "invalid_days"
    assert admin.put("retention/text/", {"days": "7"}).status_code == 400
    assert admin.put("retention/text/", {}).status_code == 400
    assert problem(admin.put("retention/events/", {"days": 7}), 404)
    assert problem(admin.get("retention/events/"), 404) == "retention_not_found"


def test_only_the_installations_administrators_set_it(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    before = bootstrap.event_store().head().position
    assert login("otto", "operator").get("retention/").status_code == 200
    assert problem(login("olga", "operator").put("retention/text/", {"days": 1}), 403)
    for method in ("get", "put"):
        own = login(f"tina-{method}", "admin", "acme")
        answer = own.call(method, "retention/text/", {"days": 1} if method == "put" else None)
        assert problem(answer, 403) == "forbidden"
    assert bootstrap.event_store().head().position >= before
