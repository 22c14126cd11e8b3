"""Since when a version's first tokens say something about its number of replicas.

Not before as many as wanted are ready, and not while more is open than there are slots: who came
then waited behind what had piled up, and would have with any number. A short crowd counts once the
number has settled, since it is part of the load; one that lasts is a pile again. Worked example, 4
slots, one replica::

    0 s     6 requests, the replica loads     None
    20 s    ready, 6 open                     None: they were held
    26 s    4 open                            26: first tokens count of who comes from now on
    90 s    5 open for 3 s                    26
    120 s   9 open, for 15 s                  None, until they have drained
"""

from controlplane.placement.autoscale import DEFAULT_POLICY, Policy


class Settling:
    """Of all versions; asked for each in every round."""

    def __init__(self, policy: Policy = DEFAULT_POLICY) -> None:
        self._lasts_s = policy.up_after_s
        self._settled: dict[str, tuple[int, float]] = {}  # number of replicas, since when
        self._crowded: dict[str, float] = {}

    def since(
        self, version_id: str, num: int, num_ready: int, num_open: int, num_slots: int, now: float
    ) -> float | None:
        """``num`` are wanted, of ``num_slots`` slots each; None: not settled."""
        crowded_s = self._crowded_s(version_id, num_open > num * num_slots, now)
        known = self._settled.get(version_id)
        is_new = known is None or known[0] != num
        most = 0.0 if is_new else self._lasts_s
        if num_ready < num or (crowded_s is not None and crowded_s >= most):
            self._settled.pop(version_id, None)
            return None
        if known is None or is_new:
            known = self._settled[version_id] = (num, now)
        return known[1]

    def _crowded_s(self, version_id: str, is_crowded: bool, now: float) -> float | None:
        if not is_crowded:
            self._crowded.pop(version_id, None)
            return None
        return now - self._crowded.setdefault(version_id, now)
