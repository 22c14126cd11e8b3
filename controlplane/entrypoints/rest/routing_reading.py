"""The weights of routing, as the log has them, now or as of a position."""

import msgspec

from controlplane import bootstrap
from controlplane.domain import routing
from controlplane.domain.decider import fold
from controlplane.entrypoints.rest import moments, reading


def weights(as_of: str | None) -> reading.Found:
    """With the version of their stream."""
    recorded = bootstrap.event_store().read_stream(routing.STREAM)
    if as_of is not None:
        upto = moments.position_of(as_of)
        recorded = [one for one in recorded if one.position <= upto]
    state = fold(routing.DECIDER, (one.event for one in recorded))
    return reading.Found(
        {
            "weights": msgspec.to_builtins(state.weights),
            "defaults": msgspec.to_builtins(routing.DEFAULT_WEIGHTS),
        },
        len(recorded),
    )
