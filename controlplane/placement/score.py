"""How good a feasible device is; higher is better, and every term is stored.

score = - 10 x replicas of this version on the node        (spread over nodes before all else)
        -  2 x replicas of this version in the zone         (then over zones)
        +  1 x labels it wants beside it that are there      (affinity)
        +  1 - free memory afterwards / capacity             (best fit: leave large holes whole)

Worked example, devices of 80 GB, a version of 30 GB that runs on n1 in zone z1 already::

    n1/1  z1  40 GB free    1 - 10/80 - 10 - 2 = -11.125
    n2/0  z1  80 GB free    1 - 50/80      - 2 =  -1.625
    n3/0  z2  80 GB free    1 - 50/80          =   0.375
    n3/1  z2  35 GB free    1 -  5/80          =   0.9375   chosen
"""

from controlplane.domain.placement import Candidate, ScoreTerm
from controlplane.placement.feasible import Fleet, Slot
from controlplane.placement.snapshot import VersionView

NODE_WEIGHT = 10.0
ZONE_WEIGHT = 2.0
AFFINITY_WEIGHT = 1.0
FIT_WEIGHT = 1.0


def score(fleet: Fleet, slot: Slot, version: VersionView) -> float:
    """The sum of the terms; of several devices that it would take, the first stands for all."""
    node_id, zone, version_id = slot.node.node_id, slot.node.zone, version.version_id
    on_node = fleet.num_on_node.get((node_id, version_id), 0)
    in_zone = fleet.num_in_zone.get((zone, version_id), 0)
    affinity = _labels_met(slot, version) if version.spec.colocation.affinity else 0
    return (
        FIT_WEIGHT * _fit(slot, version)
        + AFFINITY_WEIGHT * affinity
        - NODE_WEIGHT * on_node
        - ZONE_WEIGHT * in_zone
    )


def candidate(fleet: Fleet, slot: Slot, version: VersionView, total: float) -> Candidate:
    """The same, term by term, for those that are stored; ``total`` is what ``score`` gave."""
    node = slot.node
    terms = (
        ScoreTerm("fit", _fit(slot, version)),
        ScoreTerm("free_after_bytes", float(slot.free_bytes - version.shard_bytes)),
        ScoreTerm(
            "replicas_on_node",
            float(fleet.num_on_node.get((node.node_id, version.version_id), 0)),
        ),
        ScoreTerm(
            "replicas_in_zone", float(fleet.num_in_zone.get((node.zone, version.version_id), 0))
        ),
        ScoreTerm("affinity", float(_labels_met(slot, version))),
    )
    return Candidate(node.node_id, slot.device.index, total, terms)


def _fit(slot: Slot, version: VersionView) -> float:
    return 1 - (slot.free_bytes - version.shard_bytes) / max(1, slot.device.capacity_bytes)


def _labels_met(slot: Slot, version: VersionView) -> int:
    beside: set[str] = set()
    for resident in slot.residents.values():
        beside.update(resident.version.spec.colocation.labels)
    return len(beside.intersection(version.spec.colocation.affinity))
