"""What does not come about, with real processes: shown with its reason, and acted on where it can
be. No weights are needed: the models are simulated, and one cannot be fetched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import joining
from tests.e2e.product import Product, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MIB = 1 << 20


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """node-1 is drained; node-2 keeps 1 GiB of its 3 free, of which no planner knows: on a CPU the
    control plane takes all memory that a node offers."""
    data_dir = tmp_path_factory.mktemp("stuck")
    with Product(data_dir, "--simulated", "--devices", "cpu:3GiB") as running:
        special = {"devices": "cpu:3GiB", "reserved_memory": "1GiB", "file_roots": str(data_dir)}
        with joining(running, "node-2", **special):
            until(lambda: "node-2" in {one["node_id"] for one in nodes(running)}, 90, running.logs)
            running.post("nodes/node-1/drain/", {"reason": "test"})
            until(lambda: {one["node_id"] for one in placed(running, "simulated@v1")} == {"node-2"},
                  240, running.logs)  # fmt: skip
            yield running


def nodes(product: Product) -> list[dict[str, Any]]:
    return product.get("nodes/")["results"]


def placed(product: Product, version_id: str) -> list[dict[str, Any]]:
    rows = product.results(f"placements/?version_id={version_id}")
    return [row for row in rows if row["desired"]]


def add(product: Product, name: str, source: str, gpu_memory: int) -> None:
    product.post("models/", {"name": name})
    spec = {"version": "v1", "source": source, "gpu_memory": gpu_memory, "min_replicas": 1}
    product.post(f"models/{name}/versions/", spec)


def version(product: Product, name: str) -> dict[str, Any]:
    (found,) = product.get(f"models/{name}/")["versions"]
    return found


def decisions(product: Product, version_id: str) -> list[dict[str, Any]]:
    return product.get(f"decisions/?version_id={version_id}&limit=100")["results"]


def failures(product: Product) -> list[float]:
    """When node-2 told of each."""
    events = product.results("events/?stream=node-node-2&type=ReplicaFailed")
    return [event["data"]["at"] for event in events]


def test_a_source_that_cannot_be_fetched_is_tried_again_without_decisions(
    product: Product, tmp_path: Path
) -> None:
    """Three tries, 10 s and 20 s apart: one decision, and the model says why and when again."""
    add(product, "gone", f"file://{product.data_dir}/nowhere", 100 * MIB)
    until(lambda: len(failures(product)) >= 3, 300, product.logs)
    until(lambda: version(product, "gone")["status"] == "failed", 10, product.logs)
    shown = version(product, "gone")
    assert shown["reason"].startswith("download_failed") and "nowhere" in shown["reason"]
    assert 35 < shown["retry_at"] - max(failures(product)) < 45
    assert len(decisions(product, "gone@v1")) == 1
    product.post("models/gone/versions/v1/retire/")
    until(lambda: not placed(product, "gone@v1"), 30, product.logs)


def test_a_replica_that_waits_for_room_is_stuck_and_moves_where_there_is_some(
    product: Product,
) -> None:
    """The planner counts 2 GiB free on node-2, its agent 1: after a minute it is stuck, everywhere
    that is shown, and no decision is made. Once node-1 takes work, one is."""
    add(product, "wide", "simulated://wide", 1536 * MIB)
    until(lambda: placed(product, "wide@v1"), 30, product.logs)
    (row,) = until(lambda: [one for one in placed(product, "wide@v1") if one["waiting"]], 30)
    assert (row["node_id"], row["observed"], row["stuck_since"]) == ("node-2", "pending", None)
    (stuck,) = until(
        lambda: [one for one in placed(product, "wide@v1") if one["stuck_since"]], 300, product.logs
    )
    assert stuck["stuck_code"] == "not_resident"
    assert "needs 1.5 GiB" in stuck["stuck_reason"]
    assert "memory held by simulated.v1" in stuck["stuck_reason"]
    shown = version(product, "wide")
    assert (shown["status"], shown["stuck_replicas"]) == ("loading", 1)
    assert shown["reason"].startswith("Stuck on node-2: needs")
    (node,) = [one for one in nodes(product) if one["node_id"] == "node-2"]
    assert [one["stuck_code"] for one in node["replicas"] if one["stuck_since"]] == ["not_resident"]
    url = f"http://127.0.0.1:{product.port('controller')}/metrics"
    gauges = httpx.get(url, trust_env=False).text
    assert 'engine_stuck_replicas{code="not_resident"} 1.0' in gauges
    assert len(decisions(product, "wide@v1")) == 1

    product.post("nodes/node-1/undrain/")
    until(lambda: [one["node_id"] for one in product.placements("wide@v1")] == ["node-1"],
          60, product.logs)  # fmt: skip
    moved, _ = decisions(product, "wide@v1")
    (stop,) = [one for one in moved["stopped"] if one["assignment"]["version_id"] == "wide@v1"]
    assert (stop["code"], stop["assignment"]["node_id"]) == ("no_room", "node-2")
    assert version(product, "wide")["stuck_replicas"] == 0
