"""``manage.py advance_epoch``: lead on past what the nodes accepted before the database went back.

A node refuses whatever is older than the last desired state that it accepted, by epoch and then by
generation. After a restore both are lower than what it has, and nothing tells a restored database
from a copy of one that is still in use: so no controller does this by itself. With all controllers
stopped::

    manage.py advance_epoch 5       the next one to lead has epoch 6; EpochAdvanced(2 -> 5)
    manage.py advance_epoch 3       it still has 6: nothing to record

The event is recorded first, so that no epoch is advanced of which the audit does not know.
"""

import argparse
from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.adapters.eventstore.models import Lease
from controlplane.application.ports import CONTROLLER_LEASE, Append, EventMeta, StoreUnavailable
from controlplane.domain.audit import EPOCH, EpochAdvanced, redacted
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand
from controlplane.entrypoints.processes.ruled_command import cli_principal

MAX_EPOCH = 2**53 - 1


class Command(DatabaseCommand):
    rule = Rule(WRITE, "system")
    help = "After a restore: let the next controller lead with an epoch above the one given."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("epoch", type=_epoch, help="The newest that a node has accepted.")
        parser.add_argument("--reason", default="", help="Kept in the audit.")

    def handle(self, *args: Any, **options: Any) -> None:
        now, past = bootstrap.clock().now(), options["epoch"]
        lease = Lease.objects.filter(name=CONTROLLER_LEASE).first()
        if lease is not None and lease.expires_at > now:
            raise CommandError(f"Controller {lease.holder} leads. Stop all controllers first.")
        before = lease.epoch if lease else 0
        epoch = max(past, before)
        if epoch != before:
            _record(EpochAdvanced(before, epoch, now), options["reason"])
        about = {"holder": "", "epoch": epoch, "expires_at": 0.0}
        Lease.objects.update_or_create(name=CONTROLLER_LEASE, defaults=about)
        self.stdout.write(f"the next controller leads with epoch {epoch + 1}")


def _record(event: EpochAdvanced, reason: str) -> None:
    meta = EventMeta(cli_principal().actor, reason=redacted(reason))
    try:
        bootstrap.event_store().append(Append(EPOCH, None, [event], meta))
    except StoreUnavailable as error:
        raise CommandError(f"Nothing was changed: {error}") from error


def _epoch(text: str) -> int:
    number = int(text)
    if not 1 <= number <= MAX_EPOCH:
        raise argparse.ArgumentTypeError(f"{text} is no epoch")
    return number
