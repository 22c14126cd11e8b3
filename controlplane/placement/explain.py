"""Decisions as sentences, made when the decision is made and stored with it."""

from collections import Counter
from collections.abc import Sequence

from controlplane.domain.placement import Candidate, PlacementDecided, Rejection

SENTENCES = {
    "node_lost": "lost",
    "node_absent": "unknown",
    "node_suspect": "not heard lately",
    "node_draining": "draining",
    "too_few_devices": "without enough devices side by side",
    "already_here": "running a replica of it already",
    "backoff": "waiting after failures",
    "anti_affinity": "shared with a model it must not meet",
    "too_small": "too small even when empty",
    "insufficient_memory": "too full",
    "insufficient_time": "promised to other models",
}


def bytes_text(num_bytes: int) -> str:
    """``bytes_text(1610612736) == "1.5 GiB"``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def placed(
    version_id: str, best: Candidate, num_candidates: int, rejections: Sequence[Rejection]
) -> str:
    """Why the replica stands where it stands."""
    terms = {term.name: term.value for term in best.terms}
    fit = f"it leaves {bytes_text(int(terms['free_after_bytes']))} free there"
    others = int(terms["replicas_on_node"])
    spread = "no other replica is on that node" if not others else f"{others} more on that node"
    compared = (
        f"the best of {num_candidates} devices"
        if num_candidates > 1
        else "the only device that can take it"
    )
    ruled_out = f" Ruled out: {_counted(rejections)}." if rejections else ""
    where = f"{best.node_id}/{best.device_index}"
    return f"{version_id} goes to {where}: {compared}; {fit}; {spread}.{ruled_out}"


def relieves(node_id: str, num_replicas: int) -> str:
    """Why a replica more than wanted starts: appended to the sentence of its start."""
    return f" It will take over from one of the {num_replicas} on {node_id}."


def evicted(victim: str, winner: str, priority: str, winner_priority: str) -> str:
    return (
        f"{victim} ({priority}) makes room for {winner} ({winner_priority}), which fits nowhere "
        "else."
    )


def unplaced(
    version_id: str, needed: int, num_missing: int, rejections: Sequence[Rejection]
) -> str:
    """Why a wanted replica runs nowhere."""
    replicas = "1 replica" if num_missing == 1 else f"{num_missing} replicas"
    if not rejections:
        return f"{replicas} of {version_id} cannot be placed: no node has joined."
    failed = next((one.detail for one in rejections if one.code == "backoff"), "")
    return (
        f"{replicas} of {version_id} ({bytes_text(needed)} each) cannot be placed; of "
        f"{len(rejections)} devices: {_counted(rejections)}"
        + (f"; it {failed.partition(';')[0]}." if failed else ".")
    )


def _counted(rejections: Sequence[Rejection]) -> str:
    """``2 too full, 1 draining``, the most frequent first."""
    counts = Counter(rejection.code for rejection in rejections)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number} {SENTENCES.get(code, code)}" for code, number in ordered)


def explain(decision: PlacementDecided) -> list[str]:
    """The whole decision, one sentence for each change and each gap, in its order."""
    sentences = [
        f"Stopped {stop.assignment.replica_id}: {stop.reason}" for stop in decision.stopped
    ]
    sentences += [f"Started {start.assignment.replica_id}: {start.reason}"
                  for start in decision.started]  # fmt: skip
    return sentences + [gap.reason for gap in decision.unplaced]
