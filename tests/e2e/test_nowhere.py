"""The only node falls silent for good, with real processes: nobody waits for what cannot come."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import psutil
import pytest

from tests.e2e.product import Product, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SLOW = {"source": "simulated://slow?step_ms=50", "gpu_memory": 100 << 20, "max_output_tokens": 1000}
TOLD_S = 25.0  # lost after 15, and 3 without a place
NUM_TOKENS = 600  # of 30 seconds


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("nowhere")
    with Product(folder, "--simulated", "--devices", "cpu:3GiB") as running:
        running.post("models/", {"name": "slow"})
        running.post("models/slow/versions/", {"version": "v1", "min_replicas": 1, **SLOW})
        until(lambda: running.placements("slow@v1"), 60, running.logs)
        until(lambda: asked(running, 1) == "1", 60, running.logs)
        yield running


def asked(product: Product, num_tokens: int) -> str:
    """How many tokens came, or the message that it was refused with."""
    client = product.openai().with_options(max_retries=0)
    try:
        answer = client.completions.create(model="slow", prompt="Hello", max_tokens=num_tokens)
    except openai.APIStatusError as error:
        assert error.status_code == 503, error
        return error.message
    assert answer.usage is not None
    return str(answer.usage.completion_tokens)


@contextmanager
def asleep(product: Product) -> Iterator[None]:
    """SIGSTOP of the agent and its workers."""
    agent = psutil.Process(product.pids["gpuagent-1"])
    stopped = [agent, *agent.children(recursive=True)]
    for one in stopped:
        one.suspend()
    try:
        yield
    finally:
        for one in stopped:
            one.resume()


def test_what_was_in_flight_is_told_what_a_new_request_is(product: Product) -> None:
    """In the same words, and long before its class's time to wait is over."""
    with ThreadPoolExecutor(2) as pool, asleep(product):
        began = time.monotonic()
        told = [pool.submit(asked, product, NUM_TOKENS) for _ in range(2)]
        reasons = {one.result(60) for one in told}
        assert time.monotonic() - began < TOLD_S
        reasons.add(asked(product, NUM_TOKENS))
    (reason,) = reasons
    assert "cannot be placed" in reason
    until(lambda: asked(product, 1) == "1", 60, product.logs)


def test_a_node_that_restarts_is_waited_for(product: Product) -> None:
    """Its agent is killed under a request, and started again by its supervisor."""
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(asked, product, NUM_TOKENS)
        time.sleep(3)
        psutil.Process(product.pids["gpuagent-1"]).kill()
        assert told.result(100) == str(NUM_TOKENS)
