"""``manage.py advance_epoch``: what an operator does after a restore."""

from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from controlplane import bootstrap
from controlplane.adapters.readmodel.models import AuditEntry
from controlplane.application.ports import CONTROLLER_LEASE, StoreUnavailable


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


def test_the_audit_says_who_moved_it_on_and_why(database: Path) -> None:
    """With the epoch before and after; what moves nothing is no event, and no key is kept."""
    lead("a", 0.0)
    key = "sk_0123456789ab.abcdefgh12345678"
    call_command("advance_epoch", "5", "--reason", f"restored with {key}")
    call_command("advance_epoch", "5")
    bootstrap.projector().catch_up_all()
    (entry,) = AuditEntry.objects.filter(action="EpochAdvanced").values()
    assert entry["actor"].startswith("cli:")
    assert (entry["reason"], entry["target"]) == ("restored with [secret]", "controller-epoch")
    assert entry["before"] == {"controller epoch": {"epoch": 1}}
    assert entry["after"] == {"controller epoch": {"epoch": 5}}


def test_nothing_is_advanced_that_cannot_be_recorded(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object) -> None:
        raise StoreUnavailable("store_full", "no room")

    lead("a", 0.0)
    monkeypatch.setattr(bootstrap.event_store(), "append", down)
    with pytest.raises(CommandError, match="Nothing was changed"):
        call_command("advance_epoch", "5")
    assert lead("b", 0.0) == 2


def test_not_while_a_controller_leads(database: Path) -> None:
    assert lead("a", 60.0) == 1
    with pytest.raises(CommandError, match="Controller a leads"):
        call_command("advance_epoch", "5")


@pytest.mark.parametrize("text", ["0", "-1", "many", str(2**63)])
def test_what_is_no_epoch_is_refused(database: Path, text: str) -> None:
    with pytest.raises((CommandError, SystemExit)):
        call_command("advance_epoch", text)
