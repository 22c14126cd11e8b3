"""The read model on disk: the same rows as folded in memory, however it came to be."""

import os
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import connections

from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.readmodel import models, projector
from controlplane.adapters.readmodel.projector import CODECS, Projector
from controlplane.application.ports import (
    Append,
    Appended,
    EventMeta,
    EventStore,
    IntegrityError,
)
from controlplane.application.sequencer import prepare
from controlplane.projections.base import Row
from controlplane.projections.fold import ALL, fold_rows, state_hash
from controlplane.projections.memory import MemoryRows
from tests.contracts.conftest import POSTGRES
from tests.contracts.stores import Stores, migrated_postgres, postgres_stores, sqlite_stores
from tests.projections.history import every_sample, random_history

META = EventMeta("user:ada", address="10.0.0.1")


@pytest.fixture(scope="module")
def postgres_name(django_db_blocker) -> Iterator[str]:  # type: ignore[no-untyped-def]
    with django_db_blocker.unblock(), migrated_postgres() as name:
        yield name


@pytest.fixture(params=["sqlite", POSTGRES])
def stores(request: pytest.FixtureRequest, database: Path) -> Iterator[Stores]:
    on_disk = (
        sqlite_stores()
        if request.param == "sqlite"
        else postgres_stores(request.getfixturevalue("postgres_name"))
    )
    with on_disk as opened:
        yield opened


@pytest.fixture
def store(stores: Stores) -> EventStore:
    """Holds one of every event and three hundred random ones."""
    store = stores.open()
    history = (*every_sample(), *random_history(7, 300))
    appends = [prepare(Append(stream, None, [event], META)) for stream, event in history]
    outcomes = store._writer.write(lambda: appends)  # as one group: one commit, not hundreds
    assert all(isinstance(outcome, Appended) for outcome in outcomes)
    return store


def kept_hash() -> str:
    rows = MemoryRows()
    rows.load(Projector(DjangoEventStore.__new__(DjangoEventStore))._stored_rows(list(CODECS)))
    return state_hash(rows)


def test_the_tables_hold_the_rows_folded_in_memory(store: EventStore) -> None:
    position = Projector(store).catch_up_all()
    assert position == store.head().position
    assert kept_hash() == state_hash(fold_rows(store.read_all(0, 10_000), ALL))


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_batching_makes_no_difference(store: EventStore, limit: int) -> None:
    """Nor does a new projector for each batch, which has to read its rows from the tables."""
    for _ in range(12):
        Projector(store).catch_up(limit)
    Projector(store).catch_up_all()
    assert kept_hash() == state_hash(fold_rows(store.read_all(0, 10_000), ALL))


def test_a_rebuild_gives_the_same_state(store: EventStore) -> None:
    """Also at a checkpoint in the middle of the log, where it goes on afterwards."""
    projecting = Projector(store)
    projecting.catch_up(150)
    result = projecting.rebuild()
    assert (result.position, result.live) == (150, result.rebuilt)
    projecting.catch_up_all()
    result = Projector(store).rebuild()
    assert (result.position, result.live) == (store.head().position, result.rebuilt)
    assert result.rebuilt == kept_hash()


def test_a_rebuild_leaves_history_as_it_is_where_it_is_right(store: EventStore) -> None:
    Projector(store).catch_up_all()
    statements: list[str] = []

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        statements.append(sql)
        return execute(sql, *rest)

    with connections["default"].execute_wrapper(note):
        Projector(store).rebuild()
    histories = [codec.name for table, codec in CODECS.items() if table.history]
    assert any(f"FROM {name}" in sql for sql in statements for name in histories)
    writes = [sql for sql in statements if sql.startswith(("DELETE", "INSERT"))]
    assert not [sql for sql in writes if any(f" {name} " in f"{sql} " for name in histories)]


def test_a_rebuild_finds_and_mends_a_wrong_row(store: EventStore) -> None:
    running = Projector(store)
    running.catch_up_all()
    right = kept_hash()
    models.Node.objects.update(zone="wrong")
    result = Projector(store).rebuild()
    assert result.live != result.rebuilt == right
    store.append(Append("tenant-x", None, [every_sample()[0][1]], META))
    running.catch_up_all()
    assert not models.Node.objects.filter(zone="wrong").exists()


@pytest.mark.parametrize("wrong", ["changed", "missing", "added"])
def test_a_rebuild_finds_and_mends_wrong_history(store: EventStore, wrong: str) -> None:
    """In the stretch where it is, and beyond the end of the log."""
    Projector(store).catch_up_all()
    right = kept_hash()
    entries = models.AuditEntry.objects.order_by("position")
    if wrong == "changed":
        entries.filter(position=entries[40].position).update(actor="user:eve")
    elif wrong == "missing":
        entries.filter(position=entries[40].position).delete()
    else:
        models.AuditEntry.objects.filter(position=entries[0].position).update(position=10**6)
    result = Projector(store).rebuild()
    assert result.live != result.rebuilt == right == kept_hash()
    again = Projector(store).rebuild()
    assert again.live == again.rebuilt == right


def test_two_projectors_do_not_apply_an_event_twice(store: EventStore) -> None:
    """Whoever finds the checkpoint moved reads the rows again and goes on from there."""
    one, two = Projector(store), Projector(store)
    one.catch_up(10)
    two.catch_up(50)
    assert one.catch_up(20) == 80
    assert two.catch_up(30) == 110
    one.catch_up_all()
    assert kept_hash() == state_hash(fold_rows(store.read_all(0, 10_000), ALL))


def test_rows_of_older_projections_are_rebuilt(
    store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Projector(store).catch_up_all()
    models.Tenant.objects.update(tier="as the old version had it")
    monkeypatch.setattr(projector, "fingerprint", lambda: "tenants:2")
    assert Projector(store).catch_up_all() == store.head().position
    assert not models.Tenant.objects.filter(tier__startswith="as").exists()
    assert models.Checkpoint.objects.get().projections == "tenants:2"


def test_a_failed_save_changes_nothing(store: EventStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and checkpoint are one transaction; the projector goes on when the fault is gone."""
    running = Projector(store)
    running.catch_up(50)
    before = kept_hash()
    with monkeypatch.context() as broken:
        broken.setattr(projector, "_write", _fail)
        with pytest.raises(OSError):
            running.catch_up(50)
    assert kept_hash() == before and models.Checkpoint.objects.get().position == 50
    running.catch_up_all()
    assert kept_hash() == state_hash(fold_rows(store.read_all(0, 10_000), ALL))


def _fail(*args: object) -> None:
    raise OSError("no space")


def test_projecting_stops_at_a_broken_link(stores: Stores, store: EventStore) -> None:
    """All before it is projected and stays readable; what comes after it is not."""
    for statement in {
        "sqlite": ("DROP TRIGGER eventstore_event_no_update",),
        "postgres": ("ALTER TABLE eventstore_event DISABLE TRIGGER ALL",),
    }[stores.name]:
        stores.execute(statement, ())  # type: ignore[misc]
    stores.execute("UPDATE eventstore_event SET reason = 'x' WHERE position = 120", ())  # type: ignore[misc]
    running = Projector(store)
    with pytest.raises(IntegrityError) as found:
        running.catch_up_all()
    assert found.value.position == 120
    assert models.Checkpoint.objects.get().position == 119


def test_every_table_has_a_model_with_the_same_fields() -> None:
    """And the database's types hold what the rows' types may be."""
    for table, codec in CODECS.items():
        model = apps.get_model("readmodel", table.__name__)
        assert model._meta.db_table == codec.name
        assert tuple(field.name for field in model._meta.get_fields()) == codec.columns
        assert model._meta.pk.name == codec.columns[0]


def test_no_row_class_is_forgotten() -> None:
    def leaves(row: type[Row]) -> set[type[Row]]:
        return {leaf for child in row.__subclasses__() for leaf in leaves(child)} or {row}

    assert {row for row in leaves(Row) if "controlplane" in row.__module__} == set(CODECS)


def test_the_command_compares_and_fails_on_a_difference(database: Path) -> None:
    from controlplane import bootstrap

    store = bootstrap.event_store()
    for stream, event in random_history(3, 60):
        store.append(Append(stream, None, [event], META))
    bootstrap.projector().catch_up_all()
    said = StringIO()
    call_command("rebuild_readmodel", stdout=said)
    live, rebuilt = (line.split()[1] for line in said.getvalue().splitlines()[1:3])
    assert live == rebuilt and len(live) == 64
    models.Tenant.objects.update(tier="wrong")
    with pytest.raises(CommandError, match="differ"):
        call_command("rebuild_readmodel", stdout=said)


def test_the_command_that_verifies_names_the_position(database: Path) -> None:
    from controlplane import bootstrap

    store = bootstrap.event_store()
    for stream, event in random_history(3, 10):
        store.append(Append(stream, None, [event], META))
    said = StringIO()
    call_command("verify", stdout=said)
    assert f"position {store.head().position}" in said.getvalue()
    with connections["default"].cursor() as cursor:
        cursor.execute("DROP TRIGGER eventstore_event_no_update")
        cursor.execute("UPDATE eventstore_event SET actor = 'user:eve' WHERE position = 7")
    with pytest.raises(CommandError, match="position 7"):
        call_command("verify")
    store.close()


@pytest.mark.parametrize("command", ["apply", "verify", "whatif"])
def test_a_command_says_that_the_database_is_empty(tmp_path: Path, command: str) -> None:
    """Mostly ENGINE_DATA_DIR names another folder; a traceback would look like damage. And it does
    not begin a data folder there."""
    folder, given = tmp_path / "absent", ("ENGINE_DATABASE_URL", "ENGINE_SECRET_KEY")
    ran = subprocess.run(
        [sys.executable, "manage.py", command],
        env={**os.environ, "ENGINE_DATA_DIR": str(folder), **dict.fromkeys(given, "")},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "is empty. Is ENGINE_DATA_DIR" in ran.stderr and "Traceback" not in ran.stderr
    assert not folder.exists()
