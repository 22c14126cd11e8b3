"""``manage.py rebuild_readmodel``: fold the log anew, compare the result, put it in place."""

from typing import Any

from django.core.management.base import CommandError

from controlplane import bootstrap
from controlplane.application.ports import IntegrityError, StoreUnavailable
from controlplane.domain.event_types import UnknownEvent
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand


class Command(DatabaseCommand):
    rule = Rule(WRITE, "system")
    help = "Rebuild the read model from the log; fails if it differs from the one kept until now."

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            result = bootstrap.projector().rebuild()
        except (IntegrityError, StoreUnavailable, UnknownEvent) as error:
            raise CommandError(f"The log cannot be read: {error}") from error
        self.stdout.write(f"position {result.position}")
        self.stdout.write(f"live     {result.live or '(made by other projections)'}")
        self.stdout.write(f"rebuilt  {result.rebuilt}")
        if result.live and result.live != result.rebuilt:
            raise CommandError(
                "They differ: the read model was wrong. The rebuilt one is in place."
            )
        self.stdout.write("the same" if result.live else "in place")
