"""Starting, refusing, stopping and starting again, with the simulated backend."""

import json
import stat
import subprocess
import sys

import pytest

from tests.e2e.product import ROOT, Product, environment, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

READY = {
    "dashboard_url", "api_url", "admin_user", "admin_password", "admin_token", "tenant",
    "api_key", "model", "pids",
}  # fmt: skip


def test_a_whole_life(tmp_path):
    """ready.json is complete and private; a second demo is refused; SIGTERM ends all within 10 s
    and leaves no process; the next start has the same secrets, ports, log and nothing twice."""
    product = Product(tmp_path / "life", "--simulated")
    with product:
        first = product.ready
        assert set(first) == READY
        assert stat.S_IMODE(product.ready_file.stat().st_mode) == 0o600
        assert set(first["pids"]) == {"nats", "web", "gateway", "controller", "gpuagent-1"}
        assert_refused(product)
        product.post("tenants/", {"name": "kept"})
        family = product.family()
        assert len(family) >= 6
        assert product.stop() <= 10.0
    until(lambda: not any(process.is_running() for process in family), 2)
    assert not product.ready_file.exists()

    with product:
        again = product.ready
        assert {k: v for k, v in again.items() if k != "pids"} == {
            k: v for k, v in first.items() if k != "pids"
        }
        created = [e["data"]["tenant_id"] for e in product.results("events/?type=TenantCreated")]
        assert sorted(created) == ["demo", "kept", "operators"]
        assert list(product.results("events/?type=CommandRefused")) == []
        added = list(product.results("events/?type=ModelVersionAdded"))
        assert [event["actor"] for event in added] == ["system:demo"]
        assert "sk_" not in json.dumps(list(product.results("events/")))  # no secret in the log


def assert_refused(product: Product) -> None:
    second = subprocess.run(
        [sys.executable, "manage.py", "demo"],
        cwd=ROOT,
        env=environment(product.data_dir),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode != 0
    assert "is running on" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_killed_demo_leaves_no_process(tmp_path):
    """kill -9 of the supervisor itself: the kernel ends the rest, workers included."""
    product = Product(tmp_path / "killed", "--simulated")
    with product:
        family = product.family()
        family[0].kill()
        until(lambda: not any(alive(process) for process in family[1:]), 5)


def alive(process) -> bool:
    return process.is_running() and process.status() != "zombie"
