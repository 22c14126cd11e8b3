"""``manage.py seal``: a checkpoint now, the public keys, or the change to another key.

To change the key, make the new one and have the old one vouch for it::

    manage.py seal --new-key /etc/engine/sealing_key      both sign the next checkpoint
    ENGINE_SEALING_KEY=/etc/engine/sealing_key            in every process, which are then restarted
"""

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.adapters.private_files import write_private
from controlplane.application.notes import NoteError, Signer
from controlplane.application.ports import IntegrityError, StoreUnavailable
from controlplane.application.seal import SealingRefused
from controlplane.domain.policy import WRITE, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand


class Command(DatabaseCommand):
    rule = Rule(WRITE, "system")
    help = "Sign checkpoints of the log and the ledger now; show the public keys, or add one."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--keys", action="store_true", help="Only show the public keys.")
        parser.add_argument(
            "--new-key", type=Path, metavar="FILE", help="Make a key there; both sign once."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if not options["keys"]:
            self._seal(options["new_key"])
        for line in bootstrap.seal_store().public_keys():
            self.stdout.write(line)

    def _seal(self, new_key: Path | None) -> None:
        try:
            successor = self._successor(new_key) if new_key else None
            made = bootstrap.sealer(successor).step(bootstrap.sealed_logs(), now=True)
        except (IntegrityError, StoreUnavailable, SealingRefused, NoteError) as error:
            raise CommandError(f"Nothing was sealed: {error}") from error
        self.stderr.write(f"{made} checkpoints")

    def _successor(self, path: Path) -> Signer:
        if path.exists():
            return Signer.parse(path.read_text())
        made = Signer.generate(settings.CLUSTER_ID)
        write_private(path, f"{made.line}\n")
        return made
