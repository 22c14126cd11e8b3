"""A model that is scaled to zero, asked for over the whole product: woken once, all answered."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.product import Product, until

LOAD_S = 2.0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Without the real model: what a node computes is not the point here."""
    directory: Path = tmp_path_factory.mktemp("cold")
    with Product(directory, "--simulated", "--devices", "cpu:4GiB") as running:
        yield running


def add_model(product: Product, name: str, **fields: Any) -> None:
    product.post("models/", {"name": name})
    spec = {"version": "v1", "source": f"simulated://{name}?load_ms={LOAD_S * 1000:.0f}",
            "gpu_memory": 1 << 28, "min_replicas": 0, "max_replicas": 2} | fields  # fmt: skip
    product.post(f"models/{name}/versions/", spec)
    with product.openai() as client:
        until(lambda: name in {one.id for one in client.models.list()}, 5)


def lines_of(product: Product, model: str) -> list[str]:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3,
            "stream": True}  # fmt: skip
    headers = {"Authorization": f"Bearer {product.ready['api_key']}"}
    url = f"{product.ready['api_url']}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=30, trust_env=False) as one:
        assert one.status_code == 200, one.read()
        return [line for line in one.iter_lines() if line]


def test_requests_for_a_cold_model_wake_it_once_and_are_answered(small: Product) -> None:
    add_model(small, "nap")
    with ThreadPoolExecutor(4) as pool, small.openai() as client:
        streaming = pool.submit(lines_of, small, "nap")
        asking = [
            pool.submit(client.completions.create, model="nap", prompt="Hi", max_tokens=2)
            for _ in range(3)
        ]
        answers = [one.result(30) for one in asking]
        lines = streaming.result(30)
    assert [one.usage.completion_tokens for one in answers] == [2, 2, 2]
    assert lines[0].startswith(": waiting reason=model_loading position=")
    assert lines[-1] == "data: [DONE]"
    (scaled,) = small.get("scalings/?version_id=nap@v1")["results"]
    assert (scaled["before"], scaled["after"], scaled["code"]) == (0, 1, "woken")
    (decision,) = small.get("decisions/?version_id=nap@v1")["results"]
    assert len(decision["started"]) == 1
    replica_id = decision["started"][0]["assignment"]["replica_id"]
    assert small.get(f"placements/{replica_id}/explain/")["scaling"] == scaled
    replayed = small.get(f"decisions/{decision['decision_id']}/replay/")
    assert replayed["equal"], replayed["differences"]
    records = [one for one in small.results("requests/") if one["version_id"] == "nap@v1"]
    assert [one["outcome"] for one in records] == ["ok"] * 4
    (missed,) = small.get("preloads/?version_id=nap@v1")["results"]
    assert missed["outcome"] == "missed"


def test_what_cannot_be_loaded_in_time_is_refused_at_once_and_loaded_all_the_same(
    small: Product,
) -> None:
    """So that whoever comes again, as told, finds it; what is idle makes room for it."""
    add_model(small, "big", gpu_memory=2_900 << 20, max_replicas=1)
    url = f"{small.ready['api_url']}/v1/completions"
    headers = {"Authorization": f"Bearer {small.ready['api_key']}", "X-Latency-Class": "realtime"}
    body = {"model": "big", "prompt": "Hi", "max_tokens": 2}
    answer = httpx.post(url, json=body, headers=headers, timeout=10, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_cold")
    assert 10 < int(answer.headers["retry-after"]) < 20
    until(lambda: small.placements("big@v1"), 15, small.logs)
    again = httpx.post(url, json=body, headers=headers, timeout=10, trust_env=False)
    assert again.status_code == 200, again.text


def test_a_load_that_can_never_succeed_ends_the_wait_with_its_code(small: Product) -> None:
    """Within seconds, and not at the end of the five minutes that a batch request waits."""
    source = "simulated://torn?load_ms=200&load_fails=checksum_mismatch"
    add_model(small, "torn", source=source)
    url = f"{small.ready['api_url']}/v1/completions"
    headers = {"Authorization": f"Bearer {small.ready['api_key']}", "X-Latency-Class": "batch"}
    body = {"model": "torn", "prompt": "Hi", "max_tokens": 2}
    answer = httpx.post(url, json=body, headers=headers, timeout=20, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
    assert "last with checksum_mismatch" in answer.json()["error"]["message"]
