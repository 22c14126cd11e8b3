"""A recorded choice in sentences: the winner, what each other candidate cost more, and by which
term, and the rule that lost each of the rest.

::

    r1 on n1 was the cheapest of 2 that could take the request, of 3 replicas: cost 0.850 =
      0.600 s until the answer's end (queue 0.300, prefill 0.100, decode 0.200) + 0.250 for ...
    r2 on n2 would have cost 1.200, 0.350 more: by its queue (+0.300) and its use (+0.050).
    r3 on n3 was ruled out (too_hot): 83.5 C, the limit is 83 C.
"""

from controlplane.dispatch.choose import ReplicaView, Scored
from controlplane.dispatch.record import FOLLOWED, REFUSED, SPARE, Dispatch

WHY = {
    FOLLOWED: "Kept because this attempt follows one that was lost or refused.",
    REFUSED: "Kept because no replica took the request.",
    SPARE: "Kept because the gateway had few to keep.",
}
_PARTS = (("latency", "its latency"), ("utilization", "its use"), ("loading", "its loading"))
_LATENCY = (("queue_s", "queue"), ("prefill_s", "prefill"), ("decode_s", "decode"))
NOTHING = 5e-4  # below what three digits show


def sentences(dispatch: Dispatch, is_whole: bool = True) -> list[str]:
    """Why it was kept if it was not sampled, the winner, then, where it ``is_whole``, one of each
    other replica."""
    outcome = dispatch.outcome
    seen = {one.replica_id: one for one in dispatch.replicas}
    told = [WHY[dispatch.why]] if dispatch.why in WHY else []
    if not outcome.candidates:
        told.append(f"None of {_replicas(len(dispatch.replicas))} could take the request.")
    else:
        winner = outcome.candidates[0]
        told.append(_winner(dispatch, winner, seen[winner.replica_id]))
        told += [_loser(one, winner) for one in outcome.candidates[1:] if is_whole]
    return told + [
        f"{one.replica_id} on {one.node_id} was ruled out ({one.code}): {one.detail}."
        for one in outcome.rejected
        if is_whole
    ]


def _winner(dispatch: Dispatch, winner: Scored, view: ReplicaView) -> str:
    able, every = len(dispatch.outcome.candidates), len(dispatch.replicas)
    chosen = (
        f"was the cheapest of {able} that could take the request, of {_replicas(every)}"
        if able > 1
        else f"was the only one that could take the request, of {_replicas(every)}"
    )
    terms = winner.terms
    inner = ", ".join(f"{name} {terms[key]:.3f}" for key, name in _LATENCY)
    factor = f", over {terms['thermal']:.2f} for heat" if terms["thermal"] < 1 else ""
    away = f", distance {terms['distance_s']:.3f}" if terms["distance_s"] else ""
    cost = f"{terms['latency']:.3f} for its latency in seconds ({inner}{factor}{away})"
    cost += f" + {terms['utilization']:.3f} for its use"
    if terms["loading"]:
        cost += f" + {terms['loading']:.3f} for its loading"
    cached = min(view.num_cached_tokens, dispatch.request.num_prompt_tokens)
    prefix = f" It has {cached} of {dispatch.request.num_prompt_tokens} prompt tokens cached."
    return (
        f"{winner.replica_id} on {winner.node_id} {chosen}: cost {winner.cost:.3f} = {cost}."
        f"{prefix if cached else ''}"
    )


def _loser(one: Scored, winner: Scored) -> str:
    place = f"{one.replica_id} on {one.node_id}"
    more = one.cost - winner.cost
    if one.cost == winner.cost:
        by = (
            f"health {one.health:.3f} is below {winner.health:.3f}"
            if one.health != winner.health
            else "health is the same too, and the name decided"
        )
        return f"{place} would have cost the same; its {by}."
    terms, least = one.terms, winner.terms
    gaps = ((name, terms[key] - least[key]) for key, name in _PARTS)
    more_by = [f"{name} ({gap:+.3f})" for name, gap in gaps if abs(gap) >= NOTHING]
    if not more_by:
        return f"{place} would have cost {one.cost:.3f}, less than 0.001 more."
    return f"{place} would have cost {one.cost:.3f}, {more:.3f} more: by {' and '.join(more_by)}."


def _replicas(number: int) -> str:
    return "1 replica" if number == 1 else f"{number} replicas"
