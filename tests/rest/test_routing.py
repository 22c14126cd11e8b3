"""The weights of routing over REST: read, changed, undone, and on record."""

from tests.rest.conftest import Api, key_of, login, position_of
from tests.rest.test_bad_input import problem


def test_weights_are_changed_by_name_and_undone(admin: Api) -> None:
    body = admin.get("routing/weights/").json()
    assert body["weights"] == body["defaults"] and body["weights"]["beta"] == 0.5
    done = admin.patch(
        "routing/weights/", {"beta": 2, "omega": [0.4, 0.2, 0.1, 0.3], "reason": "x"}
    )
    assert done.status_code == 200, done.content
    shown = admin.get("routing/weights/")
    assert shown["ETag"] == '"1"' and shown.json()["weights"]["beta"] == 2.0
    assert shown.json()["weights"]["alpha"] == 1.0
    (entry,) = admin.get(f"audit/?min_position={position_of(done)}").json()["results"]
    assert entry["target"] == "routing-weights" and entry["reason"] == "x"
    thing = "routing weights"
    assert entry["before"] == {thing: {"beta": 0.5, "omega": [0.3, 0.3, 0.1, 0.3]}}
    assert entry["after"][thing]["beta"] == 2.0
    assert admin.post(f"events/{position_of(done)}/undo/", {}).status_code == 200
    body = admin.get("routing/weights/").json()
    assert body["weights"] == body["defaults"]


def test_what_makes_no_sense_is_refused(admin: Api) -> None:
    for wrong in ({"alpha": -1}, {"t_safe": 83}, {"omega": [1, 1, 1, 1]}, {"prefix": 2}):
        assert problem(admin.patch("routing/weights/", wrong), 400) == "invalid_weight", wrong
    assert admin.patch("routing/weights/", {"alpha": "1"}).status_code == 400
    assert admin.patch("routing/weights/", {"delta": 1}).status_code == 400
    stale = admin.patch("routing/weights/", {"beta": 1}, headers={"If-Match": '"3"'})
    assert problem(stale, 412) == "version_conflict"


def test_who_reads_and_who_changes(admin: Api) -> None:
    """The fleet is the operators'; a tenant's own administrator does not see how it is routed."""
    admin.post("tenants/", {"name": "acme"})
    mine = key_of(admin, "acme", "admin:write")
    assert mine.get("routing/weights/").status_code == 403
    assert mine.patch("routing/weights/", {"beta": 1}).status_code == 403
    assert login("eve", "viewer").get("routing/weights/").status_code == 200
    assert login("vic", "viewer").patch("routing/weights/", {"beta": 1}).status_code == 403
    assert login("ops", "operator").patch("routing/weights/", {"beta": 1}).status_code == 200
