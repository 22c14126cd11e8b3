"""Every way in has an access rule: what has none is not there."""

import re

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from controlplane.adapters.natsbus.credentials import node_permissions
from controlplane.domain.policy import ACTIONS, READ, RESOURCES, ROLES, WRITE, rows
from controlplane.entrypoints.processes.ruled_command import RuledCommand
from tests.architecture.access import MISSING, bus_subjects, covers, ways

OPEN = {
    ("web", "/api/v1/session/"),
    ("web", "/api/v1/session/methods/"),
    ("web", "/livez"),
    ("web", "/readyz"),
    ("web", "/"),
    ("web", "/…"),
    ("gateway", "/health"),
    ("gateway", "/livez"),
    ("gateway", "/readyz"),
}


def test_every_way_in_has_a_rule() -> None:
    """Addresses, websockets, the gateway's paths, commands and bus subjects, probes and docs
    included."""
    found = list(ways())
    assert [way for way in found if MISSING in way.rule] == []
    assert {way.surface for way in found} == {"web", "websocket", "gateway", "command", "bus"}
    assert len(found) > 65


def test_nothing_is_open_but_logging_in_probes_and_the_dashboards_files() -> None:
    assert {(way.surface, way.address) for way in ways() if way.rule == "open"} == OPEN


def test_every_resource_is_asked_for_somewhere_and_every_word_is_known() -> None:
    """No row of the table is dead, and every cell holds actions that exist."""
    asked = {word for way in ways() for word in way.rule.split()}
    assert set(RESOURCES) - asked == set()
    for resource, *cells in rows():
        assert len(cells) == len(ROLES) + 1
        assert {word for cell in cells for word in re.findall(r"\w+", cell)} <= set(ACTIONS)
        assert resource in RESOURCES


def test_a_command_without_a_rule_or_beyond_the_role_does_not_run(settings) -> None:
    class Lawless(RuledCommand):
        def handle(self, *args: object, **options: object) -> None:
            raise AssertionError("it ran")

    with pytest.raises(CommandError, match="forbidden"):
        call_command(Lawless())
    settings.CLI_ROLE = "auditor"
    with pytest.raises(CommandError, match="may not write system"):
        call_command("bus_config")


def test_a_node_reaches_no_subject_of_another_node() -> None:
    """Of all kinds of subject, those of node n2 are closed to n1, but for what all nodes share."""
    others = [one.replace(".n", ".n2") for one in bus_subjects() if re.search(r"\.n(\.|$)", one)]
    allowed = node_permissions("n1")
    for subject in others:
        granted = [one for one in (*allowed.publish, *allowed.subscribe) if covers(one, subject)]
        assert granted == [], subject
    assert len(others) >= 7


def test_readers_of_the_table_find_reading_wherever_writing_is() -> None:
    """Whoever may change a thing may see it, tickets (which nobody lists) apart."""
    for resource, *cells in rows():
        if resource != "ticket":
            assert all(READ in cell for cell in cells if WRITE in cell), resource
