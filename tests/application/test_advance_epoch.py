"""``manage.py advance_epoch``: what an operator does after a restore."""

from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from controlplane import bootstrap
from controlplane.application.ports import CONTROLLER_LEASE


def lead(holder: str, ttl: float) -> int:
    store, clock = bootstrap.event_store(), bootstrap.clock()
    lease = store.acquire_lease(CONTROLLER_LEASE, holder, ttl, clock.now())
    assert lease is not None
    return lease.epoch


def test_the_next_leader_is_past_what_the_nodes_accepted(
    database: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Never back: a smaller number changes nothing but who leads next."""
    call_command("advance_epoch", "5")
    assert capsys.readouterr().out == "the next controller leads with epoch 6\n"
    assert lead("a", 0.0) == 6
    call_command("advance_epoch", "2")
    assert lead("a", 0.0) == 7


def test_not_while_a_controller_leads(database: Path) -> None:
    assert lead("a", 60.0) == 1
    with pytest.raises(CommandError, match="Controller a leads"):
        call_command("advance_epoch", "5")


@pytest.mark.parametrize("text", ["0", "-1", "many", str(2**63)])
def test_what_is_no_epoch_is_refused(database: Path, text: str) -> None:
    with pytest.raises((CommandError, SystemExit)):
        call_command("advance_epoch", text)
