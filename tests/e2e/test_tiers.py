"""More models on a device than fit at once, over the whole product and with a real model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import MODEL_CACHE
from tests.e2e.product import Product, until

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(500)]

MIB = 1 << 20
NAMES = ("one", "two", "three")
QUESTION = "Name three colours."


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """A device for the demo's own model and one of three others, which take turns."""
    arguments = ("--devices", "cpu:2700MiB", "--model-cache", str(MODEL_CACHE))
    with Product(tmp_path_factory.mktemp("crowded"), *arguments) as running:
        (own,) = running.get("models/smollm2/")["versions"]
        for name in NAMES:
            add_model(running, name, own)
        until(lambda: placed(running).keys() >= set(NAMES), 60, running.logs)
        yield running


def add_model(product: Product, name: str, own: dict[str, Any]) -> None:
    """The same weights and number formats as the demo's own."""
    product.post("models/", {"name": name})
    same = {field: own[field] for field in ("source", "quantization", "kv_cache_dtype")}
    spec = {**same, "version": "v1", "gpu_memory": 1_000 * MIB, "max_batch": 2,
            "max_prompt_tokens": 512, "max_output_tokens": 256,
            "residency": "swappable"}  # fmt: skip
    product.post(f"models/{name}/versions/", spec)


def placed(product: Product) -> dict[str, dict[str, Any]]:
    rows = product.results("placements/")
    return {row["version_id"].partition("@")[0]: row for row in rows if row["desired"]}


def ask(product: Product, model: str) -> str:
    with product.openai(timeout=200.0) as client:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=12,
            temperature=0,
        )
    return answer.choices[0].message.content or ""


def test_all_are_placed_and_answer_as_the_resident_one_does(crowded: Product) -> None:
    """Greedy answers of the same weights are the same, whoever was on the device before; requests
    for all of them at once are all answered, and none is left waiting anywhere."""
    rows = placed(crowded)
    tiers = [rows[name]["tier"] for name in NAMES]
    assert tiers.count("resident") == 1 and tiers.count("warm") == 2, tiers
    assert rows["smollm2"]["tier"] == "resident"
    warm = next(name for name in NAMES if rows[name]["tier"] == "warm")
    told = crowded.get(f"placements/{rows[warm]['replica_id']}/explain/")
    assert "as warm, ready in host memory" in told["reason"], told
    until(lambda: all(crowded.placements(f"{name}@v1") for name in NAMES), 180, crowded.logs)

    resident = ask(crowded, "smollm2")
    for _ in range(2):
        assert {name: ask(crowded, name) for name in NAMES} == dict.fromkeys(NAMES, resident)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda name: ask(crowded, name), NAMES * 2))
    assert answers == [resident] * 6
    records = [
        one for one in crowded.results("requests/") if one["version_id"].partition("@")[0] in NAMES
    ]
    assert {one["outcome"] for one in records} == {"ok"}


def test_the_decisions_are_replayed_bit_for_bit(crowded: Product) -> None:
    for decision in crowded.results("decisions/"):
        replayed = crowded.get(f"decisions/{decision['decision_id']}/replay/")
        assert replayed["equal"], replayed["differences"]
