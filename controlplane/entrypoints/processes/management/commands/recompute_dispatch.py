"""``manage.py recompute_dispatch ID``: choose a request's replica again and compare every bit."""

from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane.adapters.ledger import dispatches
from controlplane.dispatch.record import FORMULA, Dispatch, recompute
from controlplane.domain.policy import READ, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand


class Command(DatabaseCommand):
    rule = Rule(READ, "request")
    help = (
        "Choose a request's replicas (or --all) again from what was seen; must agree bit for bit."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("request_id", nargs="?", metavar="ID")
        parser.add_argument("--all", action="store_true", help="Every one that is stored.")

    def handle(self, *args: Any, **options: Any) -> None:
        if bool(options["request_id"]) == options["all"]:
            raise CommandError("Name a request, or say --all.")
        num_equal = num_different = num_unknown = 0
        for request_id, one in _stored(options["request_id"]):
            found = recompute(one)
            num_equal += not found
            num_different += bool(found) and one.formula == FORMULA
            num_unknown += bool(found) and one.formula != FORMULA
            if found or not options["all"]:
                self._say(request_id, one)
        if options["all"]:
            self.stdout.write(
                f"{num_equal} equal, {num_different} different, {num_unknown} not comparable"
            )
        if num_different:
            raise CommandError("This router chooses otherwise, or the record was changed.")

    def _say(self, request_id: str, one: Dispatch) -> None:
        found = recompute(one)
        verdict = "different" if found else "equal, bit for bit"
        if found and one.formula != FORMULA:
            verdict = f"not the same, but formula {one.formula} made it, and this is {FORMULA}"
        chosen = one.outcome.replica_id or "no replica"
        self.stdout.write(
            f"{request_id} (choice {one.choice}, attempt {one.attempt}, {chosen}): {verdict}"
        )
        for difference in found:
            self.stdout.write(
                f"  {difference.path}: {difference.stored!r} stored, {difference.recomputed!r} now"
            )


def _stored(request_id: str | None) -> Iterator[tuple[str, Dispatch]]:
    if request_id is None:
        yield from dispatches.every()
        return
    found = dispatches.of_request(request_id)
    if found is None:
        raise CommandError(f"There is no request '{request_id}'.")
    if not found:
        raise CommandError(f"How '{request_id}' was dispatched was not kept.")
    yield from ((request_id, one) for one in found)
