"""The share of the crash campaign that every change has to pass, and what the campaign rests on."""

import os
import re
import signal
import subprocess
import sys
import timeit
from pathlib import Path

import pytest

from controlplane.application import failpoints
from controlplane.domain import model, node, placement, route, tenant
from tests.contracts.stores import _server
from tests.crash.campaign import elsewhere
from tests.crash.commands import orders

ROOT = Path(__file__).parents[2]
SEED = os.environ.get("ENGINE_CRASH_SEED", "11")


def python(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )


def campaign(*arguments: str) -> str:
    done = python("-m", "tests.crash.campaign", "--seed", SEED, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(180)
def test_no_kill_at_any_failpoint_loses_or_repeats_anything_on_sqlite() -> None:
    """Each failpoint once, and nearly all victims were killed where they should be."""
    num_points = sum(not elsewhere(point) for point in failpoints.FAILPOINTS)
    said = campaign("--runs", str(num_points))
    assert "violations: 0" in said
    (killed,) = re.findall(r"(\d+) victims", said)
    assert int(killed) >= 0.8 * num_points, said


@pytest.mark.postgres
@pytest.mark.timeout(180)
def test_no_kill_at_any_failpoint_loses_or_repeats_anything_on_postgres() -> None:
    """The first dozen: what differs between the databases is how a group is appended."""
    _server().close()  # skips where there is none
    assert "violations: 0" in campaign("--runs", "12", "--store", "postgres")


def test_the_campaign_sees_a_broken_transaction() -> None:
    """Saving the read model in separate commits is found out by a kill between two of them."""
    sabotage = (
        "import contextlib, sys\n"
        "from tests.crash import campaign\n"
        "set_up = campaign.set_up\n"
        "def broken(folder):\n"
        "    set_up(folder)\n"
        "    from controlplane.adapters.readmodel import projector\n"
        "    projector.transaction = type('T', (), {'atomic': contextlib.nullcontext})\n"
        "campaign.set_up = broken\n"
        "sys.exit(campaign.main(['--point', 'project.checkpoint', '--runs', '4', '--seed', '1']))\n"
    )
    done = python("-c", sabotage)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATION read model at" in done.stdout


def test_every_failpoint_is_in_the_code_once_and_on_the_list() -> None:
    named = [
        name
        for path in (ROOT / "controlplane").rglob("*.py")
        for name in re.findall(r'\bpassing\("([^"]+)"\)', path.read_text())
        if path.name != "failpoints.py"
    ]
    several = {"append.head"}  # one in each database's way of committing
    assert sorted({*named}) == sorted(failpoints.FAILPOINTS)
    assert [name for name in {*named} if named.count(name) > 1 and name not in several] == []


@pytest.mark.parametrize("text", ["append", "append.committed", "append.committed:0", "no.such:1"])
def test_what_names_no_failpoint_is_refused(text: str) -> None:
    """A campaign that kills nobody would prove nothing."""
    with pytest.raises(ValueError, match="ENGINE_FAIL_AT"):
        failpoints.arm(text)


def test_the_variable_kills_a_process_at_the_failpoint(database: Path) -> None:
    """SIGKILL at the third append that is durable: two at most were told so."""
    done = python(
        "-m",
        "tests.contracts.appender",
        "x",
        ENGINE_DATA_DIR=str(database.parent),
        ENGINE_FAIL_AT="append.answered:3",
        DJANGO_SETTINGS_MODULE="controlplane.config.settings",
    )
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) <= 2


def test_a_failpoint_that_is_off_costs_nothing_to_speak_of() -> None:
    """Below a microsecond on any machine; a commit takes a hundred and more."""
    seconds = min(timeit.repeat(lambda: failpoints.passing("append.head"), number=10_000, repeat=5))
    assert seconds / 10_000 < 1e-6


def test_the_workload_sends_every_command_that_people_can_send() -> None:
    """A new command must be added to it: a campaign proves only what it does."""
    sent = {type(order.command) for order in orders(1, 2_000, 1.0)}
    unions = (tenant.TenantCommand, model.ModelCommand, route.RouteCommand, node.NodeCommand)
    assert {kind for union in unions for kind in union.__args__} == sent
    assert placement.DecidePlacement not in sent  # that one the controller's rounds send
