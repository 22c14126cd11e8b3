"""Decisions as sentences, made when the decision is made and stored with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from controlplane.domain.placement import Assignment, Candidate, PlacementDecided, Rejection

if TYPE_CHECKING:
    from controlplane.placement.sharing import Shared

SENTENCES = {
    "node_lost": "lost",
    "node_absent": "unknown",
    "node_suspect": "not heard lately",
    "node_draining": "draining",
    "wrong_class": "of another kind",
    "no_engine": "on a node without its engine",
    "too_few_devices": "with too few devices on one link",
    "too_few_free": "without enough free ones beside it",
    "in_group": "compared as part of a group",
    "already_here": "running a replica of it already",
    "backoff": "waiting after failures",
    "anti_affinity": "shared with a model it must not meet",
    "too_small": "too small even when empty",
    "insufficient_memory": "too full",
    "insufficient_time": "promised to other models",
    "insufficient_host": "on a node without the cores or memory",
}


@lru_cache(maxsize=4096)
def bytes_text(num_bytes: int) -> str:
    """``bytes_text(1610612736) == "1.5 GiB"``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


Counts = Sequence[tuple[str, int]]  # devices by code


def placed(
    placement: Assignment,
    best: Candidate,
    num_candidates: int,
    ruled_out: Counts,
    says_whose: bool = True,
) -> str:
    """Why the replica stands where it stands; ``says_whose``: that only replicas of its version are
    counted, which earlier planners left out."""
    terms = {term.name: term.value for term in best.terms}
    fit = f"it leaves {bytes_text(int(terms['free_after_bytes']))} free there"
    others = int(terms["replicas_on_node"])
    whose = " of it" if says_whose else ""
    spread = f"{others} more{whose} on that node"
    if not others:
        spread = f"no other replica{whose} is on that node"
    places = "groups of devices" if placement.shards else "devices"
    compared = (
        f"the best of {num_candidates} {places}"
        if num_candidates > 1
        else f"the only {'group' if placement.shards else 'device'} that can take it"
    )
    excluded = f" Ruled out: {_counted(ruled_out)}." if ruled_out else ""
    where = _where(placement)
    return f"{placement.version_id} goes to {where}: {compared}; {fit}; {spread}.{excluded}"


def joined(placement: Assignment, fabric: str) -> str:
    """Why a group stands on several nodes."""
    num_nodes = len({one.node_id for one in placement.shards})
    return (
        f"{placement.version_id} goes to {_where(placement)}: no node has {len(placement.shards)} "
        f"devices free on one link; these are on {num_nodes} nodes joined by {fabric}."
    )


def shared(placement: Assignment, place: Shared) -> str:
    """Why the replica stands beside others, on a device that cannot hold all of them at once."""
    size = bytes_text(placement.memory_bytes)
    turns = f"{place.num_sharing} take turns in {bytes_text(place.left_bytes)} there"
    host = f"{bytes_text(place.host_used_bytes)} of {bytes_text(place.host_bytes)} of host memory"
    kept = {
        "warm": "as warm, ready in host memory and swapped in when it is asked for",
        "storage": "to be kept in storage and loaded when it is asked for",
    }.get(placement.tier, "as resident")
    needed = (
        f"without it {host} may be needed"
        if placement.tier == "storage"
        else f"for which {host} may be needed"
    )
    return (
        f"{placement.version_id} goes to {_where(placement)} {kept}: no device has {size} free; "
        f"{turns}, {needed}."
    )


TIER_TEXTS = {"resident": "resident", "warm": "ready in host memory", "storage": "in storage"}


def retiered(
    placement: Assignment, before: str, rate: float, others: Sequence[tuple[str, float]], why: str
) -> str:
    """Why a replica is kept elsewhere from now on; ``others``: who changes place with it, and how
    often each is asked for."""
    beside = ", ".join(f"{name} ({value:.2g})" for name, value in others)
    because = {
        "more_asked": "it is asked for {rate} times a minute"
        + (f", more than {beside} in its place" if beside else ", and there is room"),
        "less_asked": f"it is asked for {{rate}} times a minute, less than {beside}, which takes "
        "its place",
        "room": "all of that device fit there at once",
        "crowded": "not all that were resident there fit beside the others, and it is asked for "
        "least ({rate} a minute)",
        "host_full": "the node's memory does not hold all that may wait there, and it is asked for "
        "least ({rate} a minute)",
    }[why].format(rate=f"{rate:.2g}")
    return (
        f"{placement.version_id} on {_where(placement)} is {TIER_TEXTS[placement.tier]} from now "
        f"on, no longer {TIER_TEXTS[before]}: {because}."
    )


MAY_LEAVE = " It is resident while there is room, and swapped out when others need it."


def not_shared(is_swappable: bool) -> str:
    """Of a gap: why it is not warm either."""
    if not is_swappable:
        return ""
    return " Nor has a device and its host memory room to let it take turns."


def _where(placement: Assignment) -> str:
    """``n1/0``, or ``n1/0+1, n2/0+1`` of a group."""
    if not placement.shards:
        return f"{placement.node_id}/{placement.device_index}"
    by_node: dict[str, list[str]] = {}
    for one in placement.shards:
        by_node.setdefault(one.node_id, []).append(str(one.device_index))
    return ", ".join(f"{node_id}/{'+'.join(found)}" for node_id, found in by_node.items())


def relieves(node_id: str, num_replicas: int) -> str:
    """Why a replica more than wanted starts: appended to the sentence of its start."""
    return f" It will take over from one of the {num_replicas} on {node_id}."


def evicted(victim: str, winner: str, priority: str, winner_priority: str) -> str:
    return (
        f"{victim} ({priority}) makes room for {winner} ({winner_priority}), which fits nowhere "
        "else."
    )


def unplaced(
    version_id: str,
    needed: int,
    num_missing: int,
    ruled_out: Counts,
    rejections: Sequence[Rejection],
) -> str:
    """Why a wanted replica runs nowhere."""
    replicas = "1 replica" if num_missing == 1 else f"{num_missing} replicas"
    if not ruled_out:
        return f"{replicas} of {version_id} cannot be placed: no node has joined."
    failed = next((one.detail for one in rejections if one.code == "backoff"), "")
    return (
        f"{replicas} of {version_id} ({bytes_text(needed)} each) cannot be placed; of "
        f"{sum(number for _, number in ruled_out)} devices: {_counted(ruled_out)}"
        + (f"; it {failed.partition(';')[0]}." if failed else ".")
    )


def _counted(ruled_out: Counts) -> str:
    """``2 too full, 1 draining``, the most frequent first."""
    ordered = sorted(ruled_out, key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number} {SENTENCES.get(code, code)}" for code, number in ordered)


def explain(decision: PlacementDecided) -> list[str]:
    """The whole decision, one sentence for each change and each gap, in its order."""
    sentences = [
        f"Stopped {stop.assignment.replica_id}: {stop.reason}" for stop in decision.stopped
    ]
    sentences += [f"Started {start.assignment.replica_id}: {start.reason}"
                  for start in decision.started]  # fmt: skip
    sentences += [f"Kept {one.assignment.replica_id}: {one.reason}" for one in decision.retiered]
    return sentences + [gap.reason for gap in decision.unplaced]
