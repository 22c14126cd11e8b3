"""A recorded choice is what ``choose`` makes again of what it saw, to the last bit, for ever."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.dispatch.choose import (
    Choice,
    NoReplica,
    ReplicaView,
    RequestView,
    choose,
    explain,
)
from controlplane.dispatch.record import (
    FORMULA,
    SAMPLED,
    Dispatch,
    decode,
    dispatch_of,
    encode,
    is_sampled,
    recompute,
)
from controlplane.dispatch.told import sentences
from controlplane.domain.routing import Weights

MANY = settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
GOLDEN = Path(__file__).parent / "golden"


def _figure(high: float) -> st.SearchStrategy[float]:
    return st.floats(0, high, allow_subnormal=False)


@st.composite
def replica_views(draw: st.DrawFn, number: int) -> ReplicaView:
    return ReplicaView(
        f"r{number}",
        f"n{draw(st.integers(0, 3))}",
        state=draw(st.sampled_from(("ready", "ready", "ready", "loading"))),
        node_status=draw(st.sampled_from(("ready", "ready", "ready", "suspect"))),
        draining=draw(st.booleans()),
        age_s=draw(st.none() | _figure(8)),
        utilization=draw(_figure(1)),
        temperature_c=draw(_figure(90)),
        memory_free_bytes=draw(st.integers(0, 2**37)),
        memory_total_bytes=2**37,
        num_running=draw(st.integers(0, 40)),
        num_waiting=draw(st.integers(0, 9)),
        num_local=draw(st.integers(0, 60)),
        num_local_then=draw(st.integers(0, 60)),
        num_local_tokens=draw(st.integers(0, 9000)),
        num_blocks=draw(st.sampled_from((0, 10, 10_000))),
        prefill_tokens_per_s=draw(st.sampled_from((0.0, 1000.0)) | _figure(1e5)),
        decode_step_s=draw(_figure(0.1)),
        num_cached_tokens=draw(st.integers(0, 600)),
        resident=draw(st.booleans()),
        load_seconds=draw(_figure(30)),
        is_held=draw(st.booleans()),
        zone_hops=draw(st.integers(0, 3)),
    )


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    views = [draw(replica_views(number)) for number in range(draw(st.integers(0, 6)))]
    if views and draw(st.booleans()):  # equal costs, which health and the name decide
        views.append(
            replace(views[0], replica_id="twin", memory_free_bytes=draw(st.integers(0, 9)))
        )
    request = RequestView(draw(st.integers(1, 900)), draw(st.integers(1, 300)), draw(_figure(60)))
    weights = Weights(*(draw(_figure(10)) for _ in range(3)))
    excluded = frozenset(draw(st.sets(st.sampled_from(("r0", "r1", "r2")))))
    try:
        return choose(views, request, weights, excluded)
    except NoReplica as none:
        return none.choice


def recorded(choice: Choice) -> Dispatch:
    return dispatch_of(choice, 0, 1, 1_700_000_000.25, SAMPLED, 812)


@MANY
@given(choices())
def test_what_was_stored_is_chosen_again_to_the_last_bit(choice: Choice) -> None:
    """Through its JSON, in which every float comes back as it was."""
    stored = decode(encode(recorded(choice)))
    assert stored == recorded(choice)
    assert recompute(stored) == ()


@MANY
@given(choices())
def test_the_quick_choice_is_the_explained_one(choice: Choice) -> None:
    """``choose`` looks at costs alone; ``explain`` ranks all candidates by all of their terms."""
    whole = explain(choice.views, choice.request, choice.weights, choice.excluded)
    assert (choice.replica_id, choice.node_id) == (whole.replica_id, whole.node_id)
    assert len(whole.candidates) + len(whole.rejected) == len(choice.views)
    told = sentences(recorded(choice))
    assert len(told) == (len(whole.candidates) or 1) + len(whole.rejected)


@MANY
@given(choices())
def test_a_record_that_was_changed_is_found_out(choice: Choice) -> None:
    """In what it saw, or in what it says came of it."""
    stored = recorded(choice)
    if not choice.replica_id:
        return
    best = stored.outcome.candidates[0]
    dearer = replace(best, cost=best.cost + 1.0)  # costs are below 1e8 here
    outcome = replace(stored.outcome, candidates=(dearer, *stored.outcome.candidates[1:]))
    (found,) = recompute(replace(stored, outcome=outcome))
    assert (found.path, found.stored) == ("outcome.candidates[0].cost", best.cost + 1.0)
    seen = [replace(one, decode_step_s=one.decode_step_s + 0.5) for one in stored.replicas]
    if stored.weights.alpha > 1e-3:
        assert recompute(replace(stored, replicas=tuple(seen)))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("dispatch_*.json")), ids=lambda p: p.stem)
def test_stored_records_of_every_formula_are_read(path: Path) -> None:
    """As a database of an older release has them; those of this formula are made again."""
    stored = decode(path.read_bytes())
    assert stored.replicas and stored.outcome.candidates
    if stored.formula == FORMULA:
        assert recompute(stored) == ()
        assert encode(stored) == path.read_bytes().rstrip()


def test_there_is_a_golden_record_of_this_formula() -> None:
    formulas = {decode(path.read_bytes()).formula for path in GOLDEN.glob("dispatch_*.json")}
    assert FORMULA in formulas


def test_a_share_of_ids_is_sampled_and_a_larger_share_holds_it() -> None:
    """By the id alone: every gateway agrees, and raising the share drops nothing."""
    ids = [f"req-{number}" for number in range(20_000)]
    one, ten = ({name for name in ids if is_sampled(name, share)} for share in (0.01, 0.1))
    assert 150 < len(one) < 250 and 1_800 < len(ten) < 2_200 and one < ten
    assert not any(is_sampled(name, 0.0) for name in ids)
    assert all(is_sampled(name, 1.0) for name in ids)


def test_the_sentences_name_every_replica_and_its_reason() -> None:
    a = ReplicaView("a", "n1", prefill_tokens_per_s=1000, decode_step_s=0.02, utilization=0.5)
    views = [
        replace(a, num_cached_tokens=80),
        replace(a, replica_id="b", node_id="n2", num_waiting=3),
        replace(a, replica_id="c", node_id="n3", temperature_c=83.5),
    ]
    told = sentences(recorded(choose(views, RequestView(100, 10))))
    assert told == [
        "a on n1 was the cheapest of 2 that could take the request, of 3 replicas: cost 0.470 = "
        "0.220 for its latency in seconds (queue 0.000, prefill 0.020, decode 0.200) + 0.250 for "
        "its use. It has 80 of 100 prompt tokens cached.",
        "b on n2 would have cost 0.850, 0.380 more: by its latency (+0.380).",
        "c on n3 was ruled out (too_hot): 83.5 C, the limit is 83 C.",
    ]
