"""What is taken away is gone on every process within a second: two gateways and the web."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from controlplane.adapters.access.tokens import sign_ticket
from controlplane.application.ports import Append
from controlplane.domain import model, tenant
from controlplane.domain.audit import DashboardUserSaved
from controlplane.domain.model import Access, ChangeAccess
from tests.live.test_process import Web
from tests.openai.stack import META, GatewayProcess, Stack, until
from tests.openai.wire import CLIENT

SCOPES = ("inference", "admin:read")


class Doors:
    """Every process that a key opens: what each answers to it."""

    def __init__(self, stack: Stack, second: GatewayProcess, web: Web) -> None:
        self.second, self.web = second, web
        self.addresses = [
            f"{stack.gateway.url}/v1/models",
            f"{second.url}/v1/models",
            f"{web.url}/api/v1/status/",
        ]

    def answers(self, key: str) -> list[httpx.Response]:
        headers = {"Authorization": f"Bearer {key}"}
        return [CLIENT.get(address, headers=headers) for address in self.addresses]

    def open(self, key: str) -> list[bool]:
        return [answer.status_code == 200 for answer in self.answers(key)]

    def seconds_until(self, key: str, opened: bool) -> float:
        """Until all doors are open, or all are closed, from now."""
        began = time.monotonic()
        until(lambda: self.open(key) == [opened] * 3, 1.0, 0.01)
        return time.monotonic() - began


@pytest.fixture(scope="module")
def doors(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("second")
    second = GatewayProcess(folder, stack.environment)
    second.start()
    environment = {**stack.environment, "ENGINE_DATA_DIR": str(stack.directory)}
    web = Web(folder, **environment).wait()
    try:
        yield Doors(stack, second, web)
    finally:
        second.stop()
        web.process.terminate()
        web.process.wait(20)


def order(stack: Stack, name: str, command: tenant.TenantCommand) -> None:
    stack.order(tenant.DECIDER, f"tenant-{name}", command)


def id_of(key: str) -> str:
    return key.removeprefix("sk_").partition(".")[0]


def test_a_key_is_closed_and_opened_again_everywhere_within_a_second(
    stack: Stack, doors: Doors
) -> None:
    """Suspended, resumed, rotated without overlap, revoked; and its neighbour never notices."""
    stack.add_tenant("doors")
    key, neighbour = (stack.add_key("doors", SCOPES, role="admin") for _ in range(2))
    assert doors.open(key) == [True] * 3
    key_id, took = id_of(key), {}
    for name, opened, command in (
        ("suspended", False, tenant.SuspendApiKey("doors", key_id, "test", time.time())),
        ("resumed", True, tenant.ResumeApiKey("doors", key_id, time.time())),
    ):
        order(stack, "doors", command)
        took[name] = doors.seconds_until(key, opened)
    fresh = stack.rotate("doors", key, time.time())
    took["rotated"] = doors.seconds_until(key, False)
    assert doors.open(fresh) == [True] * 3
    order(stack, "doors", tenant.RevokeApiKey("doors", key_id, time.time()))
    took["revoked"] = doors.seconds_until(fresh, False)
    assert doors.open(neighbour) == [True] * 3
    print({name: round(seconds, 3) for name, seconds in took.items()})  # shown with -rP
    assert max(took.values()) < 1.0, took


def test_with_an_overlap_both_secrets_open_every_door(stack: Stack, doors: Doors) -> None:
    """Also before the log has told the gateways of the new one."""
    old = stack.add_key("doors", SCOPES, role="admin")
    assert doors.open(old) == [True] * 3
    new = stack.rotate("doors", old, time.time() + 2)
    assert doors.open(new) == doors.open(old) == [True] * 3
    until(lambda: doors.open(old) == [False] * 3, 4.0)
    assert doors.open(new) == [True] * 3


def test_a_suspended_tenant_is_out_everywhere_within_a_second(stack: Stack, doors: Doors) -> None:
    stack.add_tenant("paused")
    key = stack.add_key("paused", SCOPES, role="admin")
    assert doors.open(key) == [True] * 3
    order(stack, "paused", tenant.SuspendTenant("paused", "unpaid", time.time()))
    doors.seconds_until(key, False)
    order(stack, "paused", tenant.ResumeTenant("paused", time.time()))
    doors.seconds_until(key, True)


def test_a_model_that_is_closed_to_a_tenant_is_gone_from_every_list(
    stack: Stack, doors: Doors
) -> None:
    """Within a second, on both gateways."""
    key = stack.add_key("acme")
    gateways = doors.addresses[:2]

    def listed() -> list[bool]:
        headers = {"Authorization": f"Bearer {key}"}
        lists = [CLIENT.get(address, headers=headers).json()["data"] for address in gateways]
        return ["cold" in {one["id"] for one in data} for data in lists]

    assert listed() == [True, True]
    for access, shown in ((Access(False, ("other",)), False), (Access(), True)):
        change = ChangeAccess("cold", access, time.time())
        stack.order(model.DECIDER, "model-cold", change)
        until(lambda shown=shown: listed() == [shown] * 2, 1.0, 0.01)


def test_a_ticket_ends_with_the_right_of_whoever_it_was_made_for(stack: Stack) -> None:
    """A dashboard user whose role changes, a key that is suspended: within a second, not after
    the ticket's ten minutes. One made after the change is good."""
    url = f"{stack.gateway.url}/v1/models"

    def status(ticket: str) -> int:
        return CLIENT.get(url, headers={"Authorization": f"Bearer {ticket}"}).status_code

    key = stack.add_key("acme")
    by_user = sign_ticket("acme", "user:dora", time.time()).text
    by_key = sign_ticket("acme", f"key:{id_of(key)}", time.time()).text
    assert (status(by_user), status(by_key)) == (200, 200)
    saved = DashboardUserSaved("dora", "developer", "viewer", "", time.time())
    stack.store.append(Append("access", None, [saved], META))
    order(stack, "acme", tenant.SuspendApiKey("acme", id_of(key), "test", time.time()))
    until(lambda: (status(by_user), status(by_key)) == (401, 401), 1.0, 0.01)
    assert status(sign_ticket("acme", "user:dora", time.time()).text) == 200
    assert status(sign_ticket("acme", "user:dora", time.time(), role="viewer").text) == 403


def test_no_secret_is_in_any_processes_log_or_in_the_event_log(stack: Stack, doors: Doors) -> None:
    """Of all keys, rotated ones too, that these tests have issued and used."""
    logs = [stack.gateway.log, doors.second.log, doors.web.log()]
    logs += [event.data.decode() for event in stack.store.read_all(0, 10_000)]
    assert len(stack.secrets) > 10
    for secret in stack.secrets:
        assert not any(secret in text for text in logs)


def test_an_unknown_key_and_another_tenants_secret_open_nothing(
    stack: Stack, doors: Doors, tmp_path: Path
) -> None:
    """One key's id with another key's secret is nobody's."""
    first, second = (stack.add_key("acme", SCOPES, role="admin") for _ in range(2))
    mixed = f"{first.partition('.')[0]}.{second.partition('.')[2]}"
    assert doors.open(first) == [True] * 3
    for wrong in (mixed, "sk_" + "0" * 12 + "." + "x" * 43, first[:-1], f"{first}x"):
        answers = doors.answers(wrong)
        assert [answer.status_code for answer in answers] == [401] * 3
