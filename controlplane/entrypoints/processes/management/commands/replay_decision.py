"""``manage.py replay_decision ID``: make a placement decision again and compare every bit."""

from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError, CommandParser

from controlplane import bootstrap
from controlplane.adapters.readmodel.models import Decision
from controlplane.application.replay import Replay, replay_all
from controlplane.domain.policy import READ, Rule
from controlplane.entrypoints.processes.database_command import DatabaseCommand
from controlplane.entrypoints.rest.replaying import replay_at
from controlplane.placement.plan import PLANNER


class Command(DatabaseCommand):
    rule = Rule(READ, "decision")
    help = "Make a decision (or --all) again from its recorded inputs; says equal, or where not."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("decision_id", nargs="?", metavar="ID")
        parser.add_argument("--all", action="store_true", help="Every decision of the log.")

    def handle(self, *args: Any, **options: Any) -> None:
        if bool(options["decision_id"]) == options["all"]:
            raise CommandError("Name a decision, or say --all.")
        num_equal = num_different = num_unknown = 0
        for done in _replays(options["decision_id"]):
            num_equal += done.equal
            num_different += not done.equal and done.comparable
            num_unknown += not done.equal and not done.comparable
            self._say(done, options["all"])
        if options["all"]:
            self.stdout.write(
                f"{num_equal} equal, {num_different} different, {num_unknown} not comparable"
            )
        if num_different:
            raise CommandError("This planner decides otherwise, or the log was changed.")

    def _say(self, done: Replay, only_different: bool) -> None:
        if done.equal and only_different:
            return
        verdict = "equal, bit for bit" if done.equal else "different"
        if not done.equal and not done.inputs_recorded:
            verdict = "not the same, but its inputs were not recorded then"
        elif not done.equal and not done.comparable:
            verdict = f"not the same, but planner {done.planner} made it, and this is {PLANNER}"
        self.stdout.write(f"{done.decision_id} (position {done.position}): {verdict}")
        for one in done.differences:
            self.stdout.write(f"  {one.path}: {one.stored!r} stored, {one.replayed!r} now")


def _replays(decision_id: str | None) -> Iterator[Replay]:
    if decision_id is None:
        yield from replay_all(bootstrap.event_store())
        return
    bootstrap.projector().catch_up_all()  # ids are looked up in the read model
    found = Decision.objects.filter(decision_id=decision_id).first()
    if found is None:
        raise CommandError(f"There is no decision '{decision_id}'.")
    yield replay_at(found.position)
