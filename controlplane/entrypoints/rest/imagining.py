"""What a changed fleet would look like, as data and as sentences."""

from dataclasses import asdict
from typing import Any

from controlplane import bootstrap
from controlplane.application.whatif import Preview, change_of, sentences


def what_if(query: dict[str, Any], position: int | None) -> dict[str, Any]:
    """``position``: where the log is forked; None: its end. Raises NotFound, Invalid."""
    lose, add, replicas = (_split(query[name]) for name in ("lose_node", "add_node", "replicas"))
    return _body(bootstrap.what_if(change_of(lose, add, replicas, query["load"]), position))


def _split(text: str) -> list[str]:
    return text.split(",") if text else []


def _body(made: Preview) -> dict[str, Any]:
    found = made.outcome
    return {
        "position": made.position,
        "joined": [asdict(one) for one in found.joined],
        "left": [asdict(one) for one in found.left],
        "evicted": [
            {
                "replica_id": one.assignment.replica_id,
                "version_id": one.assignment.version_id,
                "reason": one.reason,
            }
            for one in found.evicted
        ],
        "unplaced": [
            {
                "version_id": one.version_id,
                "num_missing": one.num_missing,
                "code": one.code,
                "reason": one.reason,
            }
            for one in found.unplaced
        ],
        "relieved": [{"version_id": name, "number": number} for name, number in found.relieved],
        "loads": [asdict(one) for one in found.loads],
        "settled": found.settled,
        "sentences": sentences(made),
    }
