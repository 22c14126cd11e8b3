"""What moving replicas would gain, over REST, and a decision that tells itself."""

from controlplane import bootstrap
from controlplane.placement.plan import PLANNER
from tests.application.test_repack import step, with_holes
from tests.rest.conftest import Api


def test_the_preview_over_rest_and_the_decision_as_sentences(admin: Api) -> None:
    """The moves as data, a wrong number refused; a decision tells its inputs and itself."""
    step(with_holes(bootstrap.event_store()))
    body = admin.get("placements/repack/?max_moves=4").json()
    (move,) = body["moves"]
    assert {move["from_node"], move["to_node"]} == {"k1", "k2"}
    assert body["placed"] == [{"version_id": "c@v1", "number": 1}]
    assert body["sentences"][0].startswith(f"Move {move['replica_id']} (4.0 GiB) from ")
    assert admin.get("placements/repack/?max_moves=0").status_code == 400
    head = bootstrap.event_store().head().position
    newest = admin.get(f"decisions/?min_position={head}").json()["results"][0]["decision_id"]
    told = admin.get(f"decisions/{newest}/").json()
    assert told["inputs"]["planner"] == PLANNER
    assert any("of c@v1" in one and "cannot be placed" in one for one in told["sentences"])
