"""The built dashboard in a real browser, against everything that the tests before it have done."""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.absent import skip_without
from tests.e2e.product import ROOT, Product, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ARTIFACTS = ROOT / "tests" / "e2e" / "artifacts"
# The pictures that the READMEs show; ENGINE_UPDATE_SCREENSHOTS=1 replaces them.
SHOWN = ("fleet", "playground")


def browser() -> Path:
    found = [p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))]
    built = (ROOT / "frontend" / "dist" / "index.html").exists()
    if not found or not built or not shutil.which("node"):
        skip_without("Node 20, `make frontend`, and chromium: apt-get install chromium")
    return Path(found[0])


@pytest.fixture
def busy(product, second_node) -> Iterator[None]:
    """Two nodes, more models beside the real one, and somebody who talks to them meanwhile."""
    until(lambda: "node-2" in {n["node_id"] for n in product.get("nodes/")["results"]}, 60)
    for name, gib, replicas in (("support-chat", 1, 2), ("summariser", 0.75, 1)):
        product.post("models/", {"name": name})
        product.post(
            f"models/{name}/versions/",
            {
                "version": "v1",
                "source": "simulated://demo?step_ms=25",
                "gpu_memory": int(gib * 1024**3),
                "min_replicas": replicas,
                "max_replicas": replicas,
            },
        )
        until(lambda name=name: product.placements(f"{name}@v1"), 60, product.logs)
    done = threading.Event()
    talker = threading.Thread(target=keep_talking, args=(product, done))
    talker.start()
    yield
    done.set()
    talker.join(60)


def keep_talking(product: Product, done: threading.Event) -> None:
    client = product.openai()
    while not done.is_set():
        for name in ("support-chat", "summariser"):
            client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "Go on."}], max_tokens=100
            )


def walk(product: Product, script: str) -> None:
    """Run one of the frontend's browser scripts against the running product."""
    chromium = browser()
    ready = product.ready
    done = subprocess.run(
        ["node", f"test/browser/{script}.mjs"],
        cwd=ROOT / "frontend",
        env={
            **os.environ,
            "TOUR_URL": ready["dashboard_url"],
            "TOUR_USER": ready["admin_user"],
            "TOUR_PASSWORD": ready["admin_password"],
            "TOUR_MODEL": ready["model"],
            "TOUR_TENANT": ready["tenant"],
            "TOUR_OUT": str(ARTIFACTS),
            "TOUR_CHROMIUM": str(chromium),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr + product.logs()


def test_a_person_walks_through_every_page(product, busy):
    """Log in, see every page and detail, talk to the model in the playground, in light, dark and on
    a phone: no error in the console, no 5xx, nothing wider than the screen."""
    walk(product, "tour")
    for name in SHOWN:
        assert (ARTIFACTS / f"{name}.png").stat().st_size > 10_000
        if os.environ.get("ENGINE_UPDATE_SCREENSHOTS"):
            shutil.copy(ARTIFACTS / f"{name}.png", ROOT / "deploy" / "screenshots")


def test_a_person_gives_every_kind_of_order(product):
    """Create, change, retire, suspend, revoke, route and drain, all through the dashboard."""
    walk(product, "orders")
