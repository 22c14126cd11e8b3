"""The only place that chooses adapters: builds each process from its parts."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import DatabaseError, connections

from controlplane.adapters import simulated
from controlplane.adapters.access import text_keys
from controlplane.adapters.access.issuers import read_issuers
from controlplane.adapters.access.jwt_tokens import JwtVerifier
from controlplane.adapters.checkpoint_file import CheckpointFiles
from controlplane.adapters.clock import ManualClock, SystemClock
from controlplane.adapters.eventstore.store import DjangoEventStore
from controlplane.adapters.export.destinations import destination_of
from controlplane.adapters.export.formats import format_of
from controlplane.adapters.ledger.arrivals import LedgerArrivals
from controlplane.adapters.ledger.reconcile import StandingCheck
from controlplane.adapters.ledger.seals import DjangoSealStore, RequestRecords
from controlplane.adapters.ledger.soundness import file_findings, usage_findings
from controlplane.adapters.ledger.store import LedgerStore
from controlplane.adapters.ledger.texts import TextStore, text_findings
from controlplane.adapters.natsbus.checkpoints import CheckpointStream
from controlplane.adapters.natsbus.connection import connect
from controlplane.adapters.natsbus.subscriber import NodeSubscriber
from controlplane.adapters.private_files import kept_private
from controlplane.adapters.readmodel.fleet_folding import FleetFolding
from controlplane.adapters.readmodel.models import Decision
from controlplane.adapters.readmodel.projector import Projector
from controlplane.adapters.readmodel.timeline import RowsFolding, Timeline
from controlplane.application import erase, repack, simulated_log, whatif
from controlplane.application.archive import Archived, archive
from controlplane.application.check import Checked, Copies, StoredLog, check_everything
from controlplane.application.demand import DemandWatch, Forecaster
from controlplane.application.export_scan import Source
from controlplane.application.exports import ExportError
from controlplane.application.fleet import FleetLoads, OnLoad
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.notes import PublicKey, Signer
from controlplane.application.ports import Clock, EventStore, StoreUnavailable
from controlplane.application.proving import Finding
from controlplane.application.records import LOGS, REQUESTS
from controlplane.application.retain import MAX_SEGMENTS, Retention, Upkeep
from controlplane.application.seal import EventRecords, Sealer
from controlplane.domain.decider import Event
from controlplane.domain.errors import Invalid
from controlplane.projections.fold import Folder
from controlplane.simulation.whatif import Change
from controlplane.verify import verify_export


@cache
def clock() -> Clock:
    return SystemClock()


@cache
def event_store() -> EventStore:
    """The process's one store: what its threads append at once is committed together."""
    return DjangoEventStore(clock())


@cache
def signer() -> Signer:
    """What checkpoints and exports are signed with: the configured key, or one made once."""
    path: Path = settings.SEALING_KEY or settings.DATA_DIR / "sealing_key"
    if settings.SEALING_KEY:
        return Signer.parse(path.read_text())
    return Signer.parse(kept_private(path, lambda: Signer.generate(settings.CLUSTER_ID).line))


def seal_store() -> DjangoSealStore:
    return DjangoSealStore()


def checkpoint_files() -> CheckpointFiles:
    """The checkpoints' copies beside the data."""
    return CheckpointFiles(settings.DATA_DIR / "checkpoints")


def sealed_logs() -> list[StoredLog]:
    return [EventRecords(event_store()), RequestRecords()]


def export_source(log: str) -> Source:
    """Raises ExportError where this machine's key is not the one that the logs are sealed with."""
    known = seal_store().public_keys()
    if known and signer().public.line not in known:
        raise ExportError("This machine's key has sealed nothing here: set ENGINE_SEALING_KEY.")
    records = {one.log: one for one in sealed_logs()}[log]
    return Source(settings.CLUSTER_ID, records, seal_store(), signer(), clock())


async def checkpoints_on_bus() -> dict[str, list[str]]:
    """The newest checkpoint of each log that the bus holds; raises BusUnavailable."""
    bus = await connect(settings.NATS_URL, settings.NATS_CREDS, "verify", timeout_s=5)
    try:
        found = {log: await CheckpointStream(bus).last(log) for log in LOGS}
    finally:
        await bus.close()
    return {log: [note] if note else [] for log, note in found.items()}


def check_store(keys: Sequence[PublicKey] = (), elsewhere: Copies | None = None) -> Checked:
    """Everything stored against chain, seals and copies. ``keys`` are trusted beside our own;
    ``elsewhere``: more copies of checkpoints than the files beside the data."""
    trusted = [signer().public, *keys]
    copies = {"the file beside the data": checkpoint_files().notes, **(elsewhere or {})}
    with _beside(text_findings, usage_findings, file_findings) as also:
        return check_everything(
            sealed_logs(),
            seal_store(),
            trusted,
            copies,
            unreadable=(StoreUnavailable, DatabaseError, UnicodeError),
            also=also,
        )


@contextmanager
def _beside(*checks: Callable[[], Iterator[Finding]]) -> Iterator[list[Callable[[], Any]]]:
    """Begin them now, on a thread of their own: the database does all of their work, and the
    other half of a check is Python's. Each of the results waits for its own."""
    pool = ThreadPoolExecutor(1, "beside")
    try:
        begun = [pool.submit(_with_own_connections, check) for check in checks]
        yield [partial(_findings, one) for one in begun]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _with_own_connections(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    finally:
        connections.close_all()  # of this thread


def _findings(begun: "Future[list[Finding]]") -> Iterator[Finding]:
    return iter(begun.result())


def sealer(successor: Signer | None = None) -> Sealer:
    """Signs with the key, and with its ``successor`` too if there is one."""
    signers = [signer(), successor] if successor else [signer()]
    return Sealer(settings.CLUSTER_ID, seal_store(), signers, clock(), checkpoint_files())


@cache
def command_handler() -> CommandHandler:
    return CommandHandler(event_store(), clock())


def finish_erasure(tenant_id: str) -> int:
    """Destroy the tenant's text keys that the log says are erased; how many there were."""
    return erase.finish(command_handler(), text_keys, clock(), tenant_id)


def archive_into(
    place: str, before: float, most: int = 1_000, form: str = "jsonl"
) -> Archived | None:
    """Move out requests sealed before that time into a folder, or bucket, below ``place``."""
    keys = [signer().public]
    return archive(
        export_source(REQUESTS),
        seal_store(),
        format_of(form, REQUESTS),
        lambda name: destination_of(f"{place.rstrip('/')}/{name}"),
        lambda folder: verify_export(folder, keys),
        before,
        most,
    )


def retention() -> Retention:
    """For one thread. Requests stay where there is no place for their archive."""
    place: str = settings.ENV.archive
    into = partial(archive_into, place, most=MAX_SEGMENTS) if place else None
    return Retention(command_handler(), clock(), seal_store(), TextStore(), into)


def upkeep() -> Upkeep:
    """For one thread of the controller."""
    return Upkeep(retention(), lambda: erase.finish_all(command_handler(), text_keys, clock()))


def demand_watch() -> DemandWatch:
    """For the controller's threads."""
    return DemandWatch(LedgerArrivals(), clock(), _forecaster)


def _forecaster() -> Forecaster:
    """Imported when it is first needed: every other process does without statsmodels."""
    from controlplane.adapters import forecasting

    return forecasting.Forecaster(forecasting.LIVE_REFIT_BINS)


@cache
def jwt_verifier() -> JwtVerifier:
    """Of the web process; remembers keys and tokens."""
    return JwtVerifier(read_issuers(settings.JWT_ISSUERS))


def projector() -> Projector:
    """Writes the read model; for one thread at a time."""
    return Projector(event_store())


@cache
def timeline() -> Timeline[Folder]:
    """The read model's rows as of any position."""
    return Timeline(event_store(), RowsFolding())


@cache
def fleet_timeline() -> Timeline[FleetState]:
    """The planner's view of the fleet as of any position."""
    return Timeline(event_store(), FleetFolding())


def repack_preview(max_moves: int, seconds: float) -> repack.Preview:
    """What moving at most so many replicas would gain, for the log as it is now."""
    from controlplane.adapters.packing import solve  # scipy takes its time to import

    newest = Decision.objects.order_by("-position").values_list("position", flat=True).first()
    store = event_store()
    inputs = repack.newest_inputs(store, newest)
    fleet = fleet_timeline().at(store.head().position)
    return repack.preview(
        fleet, inputs, lambda stated: solve(stated, seconds), max_moves, clock().now()
    )


def write_simulation(folder: Path, events: Sequence[tuple[str, Event]]) -> int:
    """A new data folder whose log holds the events, each recorded at its own time, and the read
    model made from it; the log's end. Raises FolderInUse."""
    with simulated.database(folder):
        clock = ManualClock()
        store = DjangoEventStore(clock)
        simulated_log.write(store, clock, events)
        head = Projector(store).catch_up_all()
        store.close()
        return head


def what_if(change: Change, position: int | None = None) -> whatif.Preview:
    """What the change would do to the fleet as of a position of the log; None: as it is now."""
    store = event_store()
    head = store.head().position
    upto = head if position is None else position
    if upto > head:
        raise Invalid("invalid_position", f"The log ends at position {head}.")
    decided = Decision.objects.filter(position__lte=upto).order_by("-position")
    inputs = repack.newest_inputs(store, decided.values_list("position", flat=True).first())
    now = clock().now() if position is None else whatif.recorded_at(store, position)
    return whatif.preview(fleet_timeline().at(upto), inputs, change, now)


def ledger() -> LedgerStore:
    """A gateway's ledger, with a writer thread and a connection of its own."""
    return LedgerStore()


def usage() -> StandingCheck:
    """Adds usage up and checks it; for one thread."""
    return StandingCheck(clock())


@cache
def heard_loads() -> FleetLoads:
    """The newest telemetry that a web process has heard, for its GETs and its dashboards alike."""
    return FleetLoads()


async def listen_to_nodes(on_load: OnLoad) -> None:
    """Call ``on_load`` for each telemetry message until cancelled; waits for a bus that is down."""
    bus = await connect(settings.NATS_URL, settings.NATS_CREDS, "web")
    try:
        await NodeSubscriber(bus, on_load).start()
        await asyncio.Event().wait()
    finally:
        await bus.close()
