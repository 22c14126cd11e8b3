"""``manage.py recompute_decision``: ``replay_decision`` by the name that says what it does."""

from controlplane.entrypoints.processes.management.commands import replay_decision


class Command(replay_decision.Command):
    help = "Run the planner again on a decision's inputs (or --all); must agree bit for bit."
