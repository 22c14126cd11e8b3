"""Why a version runs nowhere, and whether it is worth waiting for.

The planner leaves a gap where it finds no place for a version, and a version all of whose replicas
fail where they are is as good as one that has none. Most gaps close by themselves::

    insufficient_memory              an idle model may make room for it
    failed, last with out_of_memory  it is tried again: ``retry_s`` 10 after the first failure
    failed twice, and loads again    still the same gap, until it is ready: ``retry_s`` 0
    failed with checksum_mismatch    the same files fail the same way: it lasts
    too_small on every device        no model that leaves changes that: it lasts

A replica that loads for the first time where it is, or again after one failure (its worker may have
been killed), is as good as one that never failed, and one whose node is away is placed anew: with
any of them there is no gap. What failed long ago says nothing of a load now.

A version that was never planned has no gap yet. ``tried`` asks the planner then, with the version
alone on the devices that there are: 32 TiB on nodes of 80 GiB fit nowhere, whoever leaves.
"""

from collections.abc import Mapping, Sequence

from controlplane.application.fleet_state import FleetState
from controlplane.application.inference import Gap
from controlplane.application.reconcile import RESERVED_BYTES, node_views
from controlplane.domain.ids import VersionId
from controlplane.domain.node import BACKOFF_LIMIT_S, NO_ROOM, Node
from controlplane.domain.placement import Assignment, PlanInputs, Unplaced
from controlplane.placement.plan import plan
from controlplane.placement.snapshot import FailureView, FleetSnapshot, VersionView

OUT_OF_REACH = frozenset({"too_small", "too_few_devices", "wrong_class", "no_engine"})
LOADING = ("downloading", "loading")
FORGOTTEN_S = 2 * BACKOFF_LIMIT_S  # after a failure: by then it was tried again, or not wanted
NEVER_HEALS = frozenset(
    {
        "access_denied",
        "archive_rejected",
        "checkpoint_mismatch",
        "checksum_mismatch",
        "config_invalid",
        "config_rejected",
        "credentials_missing",
        "draft_model_unsupported",
        "format_not_allowed",
        "insufficient_memory",  # of its own budget, not of the device
        "kv_cache_dtype_unsupported",
        "manifest_invalid",
        "quantization_unsupported",
        "source_invalid",
        "source_missing",
        "tensor_parallel_unsupported",
        "tokenizer_rejected",
        "too_large",
        "weights_malformed",
        "weights_rejected",
    }
)  # codes of failed loads that lie in the version's files or specification, or in who may read them


def gap_of(state: FleetState, version_id: str, now: float) -> Gap | None:
    """None where a replica has a place and does not fail there, or no place was looked for."""
    placed = state.assignments_of(version_id)
    if placed:
        return _failing(state, placed, now)
    for found in state.placement.unplaced:
        if found.version_id == version_id:
            return _judged(found, state.nodes, now)
    return None


def tried(state: FleetState, version_id: str, now: float) -> Gap | None:
    """Why no device could hold the version, were all of them empty; None if one could, or does."""
    spec = state.catalog.spec(VersionId(version_id))
    if spec is None or state.assignments_of(version_id):
        return None
    alone = FleetSnapshot(
        nodes=node_views(state, PlanInputs(reserved_bytes=tuple(RESERVED_BYTES.items()))),
        versions=(VersionView(VersionId(version_id), spec, 1),),
        assigned=(),
        failures=(),
        position=state.position,
        now=now,
    )
    gaps = (_judged(found, state.nodes, now) for found in plan(alone, 0).unplaced)
    return next((gap for gap in gaps if gap.lasts), None)


def _failing(state: FleetState, placed: Sequence[Assignment], now: float) -> Gap | None:
    """Why not to wait for long, where every replica has failed, be it that some load again."""
    known = [_failure(state, one, now) for one in placed]
    found = [one for one in known if one is not None]
    if len(found) < len(known):
        return None
    last = max(found, key=lambda one: (one.at, one.node_id))
    reason = (
        f"{last.version_id} does not load: it failed {last.count} times on {last.node_id}, "
        f"last with {last.code}."
    )
    return _of_failures(reason, found, now)


def _failure(state: FleetState, placed: Assignment, now: float) -> FailureView | None:
    """How the replica failed last where it is; None where that is not what keeps it away."""
    node, said = state.nodes.get(placed.node_id), state.replica_state(placed)
    known = node.failures.get(placed.version_id) if node and node.status == "ready" else None
    if known is None or said not in ("failed", *LOADING):
        return None
    failure = FailureView(placed.version_id, placed.node_id, *known)
    is_old = failure.count < 2 or failure.code == NO_ROOM or now - failure.at > FORGOTTEN_S
    return None if said in LOADING and is_old else failure


def _of_failures(reason: str, failures: Sequence[FailureView], now: float) -> Gap:
    lasts = bool(failures) and all(one.code in NEVER_HEALS for one in failures)
    next_try = min((one.retry_at for one in failures), default=now)
    count = min((one.count for one in failures), default=0)
    return Gap(reason, lasts, max(0.0, next_try - now), count)


def _judged(found: Unplaced, nodes: Mapping[str, Node], now: float) -> Gap:
    if found.code != "backoff":
        codes = {one.code for one in found.rejections}
        return Gap(found.reason, bool(codes) and codes <= OUT_OF_REACH)
    return _of_failures(found.reason, _failures(found, nodes), now)


def _failures(found: Unplaced, nodes: Mapping[str, Node]) -> list[FailureView]:
    """Of the nodes on which it waits to be tried again."""
    waiting = {one.node_id for one in found.rejections if one.code == "backoff"}
    known = {one: nodes[one].failures.get(found.version_id) for one in waiting if one in nodes}
    return [FailureView(found.version_id, one, *last) for one, last in known.items() if last]
