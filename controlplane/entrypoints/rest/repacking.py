"""What moving replicas together would gain, as data and as sentences."""

from typing import Any

from controlplane.application.repack import Preview
from controlplane.domain.wording import count_of
from controlplane.placement.explain import bytes_text


def body(made: Preview) -> dict[str, Any]:
    found = made.repack
    return {
        "moves": [
            {
                "replica_id": one.assignment.replica_id,
                "version_id": one.assignment.version_id,
                "memory_bytes": one.assignment.memory_bytes,
                "from_node": one.assignment.node_id,
                "from_device": one.assignment.device_index,
                "to_node": one.node_id,
                "to_device": one.device_index,
            }
            for one in found.moves
        ],
        "moved_bytes": found.moved_bytes,
        "num_unplaced": made.num_unplaced,
        "placed": [{"version_id": name, "number": number} for name, number in found.placed],
        "emptied": [{"node_id": node, "device_index": index} for node, index in found.emptied],
        "sentences": sentences(made),
    }


def sentences(made: Preview) -> list[str]:
    found = made.repack
    if not found.moves:
        return ["No move would gain anything."]
    lines = [
        f"Move {one.assignment.replica_id} ({bytes_text(one.assignment.memory_bytes)}) from "
        f"{one.assignment.node_id}/{one.assignment.device_index} to "
        f"{one.node_id}/{one.device_index}."
        for one in found.moves
    ]
    fitting = sum(number for _, number in found.placed)
    lines.append(
        f"{count_of(len(found.moves), 'move')} of {bytes_text(found.moved_bytes)}: room for "
        f"{fitting} of {count_of(made.num_unplaced, 'missing replica')}, and "
        f"{count_of(len(found.emptied), 'device')} emptied."
    )
    return lines
