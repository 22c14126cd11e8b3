"""What-if over REST: as data, as of any position, and for those who may read placements."""

from controlplane import bootstrap
from tests.application.test_repack import step, with_holes
from tests.rest.conftest import Api


def test_a_lost_node_over_rest_and_wrong_changes_refused(admin: Api) -> None:
    step(with_holes(bootstrap.event_store()))
    head = bootstrap.event_store().head()
    answer = admin.get(f"placements/what-if/?lose_node=k1&min_position={head.position}")
    body = answer.json()
    assert answer.headers["X-Log-Position"] == str(body["position"]) == str(head.position)
    place = {"version_id": "a@v1", "device_index": 0, "number": 1}
    assert body["left"] == [place | {"node_id": "k1"}]
    assert body["joined"] == [place | {"node_id": "k2"}]
    assert bootstrap.event_store().head() == head
    found = admin.get("placements/what-if/?add_node=k9=k1").json()
    assert found["relieved"] == [{"version_id": "c@v1", "number": 1}]
    assert admin.get("placements/what-if/?lose_node=k1&as_of=0").status_code == 404
    for wrong in (
        "load=0",
        "load=nan",
        "replicas=a@v1",
        "replicas=a@v1=x",
        "add_node=k1=k2",
        "x=1",
    ):
        assert admin.get(f"placements/what-if/?{wrong}").status_code in (400, 422), wrong


def test_nobody_asks_without_a_token(admin: Api) -> None:
    assert Api().get("placements/what-if/?lose_node=k1").status_code == 401
