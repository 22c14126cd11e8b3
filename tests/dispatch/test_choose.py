"""The cheapest replica that can take the request gets it, and every term and reason is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.dispatch.choose import (
    NeverFits,
    ReplicaView,
    RequestView,
    choose,
    health,
    score,
    thermal_factor,
    zone_hops,
)
from controlplane.dispatch.refusals import NotReady
from controlplane.domain.routing import Weights

REQUEST = RequestView(num_prompt_tokens=100, max_output_tokens=10)
A = ReplicaView("a", "n1", prefill_tokens_per_s=1000, decode_step_s=0.02, utilization=0.5)
B = replace(A, replica_id="b", node_id="n2")


def test_the_worked_example_of_the_docstring() -> None:
    """Idle costs 0.30, three waiting 0.60 seconds."""
    weights = Weights(beta=0.0)
    assert score(A, REQUEST, weights).cost == pytest.approx(0.30)
    assert score(replace(B, num_waiting=3), REQUEST, weights).cost == pytest.approx(0.60)
    assert choose([replace(B, num_waiting=3), A], REQUEST, weights).replica_id == "a"


def test_the_cost_is_the_sum_of_its_terms() -> None:
    """Anyone can recompute the decision from what is stored with it."""
    for one in choose([A, replace(B, temperature_c=80.0, resident=False, load_seconds=3.0)],
                      REQUEST).candidates:  # fmt: skip
        terms = one.terms
        seconds = (terms["queue_s"] + terms["prefill_s"] + terms["decode_s"]) / terms["thermal"]
        assert terms["latency"] == pytest.approx(seconds + terms["distance_s"])
        assert one.cost == terms["latency"] + terms["utilization"] + terms["loading"]


@pytest.mark.parametrize(
    "worse",
    [
        {"utilization": 0.9},
        {"num_waiting": 4},
        {"zone_hops": 1},
        {"num_running": 40},
        {"num_local": 40},
        {"temperature_c": 80.0},
        {"prefill_tokens_per_s": 100.0},
        {"decode_step_s": 0.2},
        {"resident": False, "load_seconds": 1.0},
    ],
)
def test_whatever_makes_a_replica_worse_costs(worse: dict[str, float]) -> None:
    assert choose([replace(A, **worse), B], REQUEST).replica_id == "b"  # type: ignore[arg-type]


def test_a_cached_prefix_makes_a_replica_cheaper() -> None:
    assert choose([A, replace(B, num_cached_tokens=80)], REQUEST).replica_id == "b"


def test_alpha_beta_and_gamma_are_what_they_say() -> None:
    """A fast busy node against a slow idle one: the weights decide."""
    fast, slow = replace(A, utilization=1.0), replace(B, utilization=0.0, decode_step_s=0.05)
    assert choose([fast, slow], REQUEST, Weights(alpha=10, beta=0.1)).replica_id == "a"
    assert choose([fast, slow], REQUEST, Weights(alpha=0.1, beta=10)).replica_id == "b"
    cold = replace(A, resident=False, load_seconds=1.0)
    busy = replace(B, num_waiting=5)
    assert choose([cold, busy], REQUEST, Weights(gamma=10)).replica_id == "b"
    assert choose([cold, busy], REQUEST, Weights(gamma=0)).replica_id == "a"


def test_health_follows_its_formula() -> None:
    """0.3 (1-U) + 0.3 free/total + 0.1 (1-T/Tmax) + 0.3 / (1+Q)."""
    view = replace(A, memory_free_bytes=1, memory_total_bytes=4, temperature_c=41.5, num_waiting=1)
    assert health(view) == pytest.approx(0.3 * 0.5 + 0.3 * 0.25 + 0.1 * 0.5 + 0.3 / 2)


def test_equal_costs_go_to_the_healthier_then_to_the_first_id() -> None:
    roomy = replace(B, memory_free_bytes=1)
    assert choose([A, roomy], REQUEST).replica_id == "b"
    assert choose([B, A], REQUEST).replica_id == "a"


def test_hot_nodes_slow_down_from_75_to_the_limit() -> None:
    assert thermal_factor(60) == thermal_factor(75) == 1
    assert thermal_factor(79) == pytest.approx(0.85)
    assert thermal_factor(83) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"state": "loading"}, "not_ready"),
        ({"state": "failed"}, "not_ready"),
        ({"node_status": "suspect"}, "node_suspect"),
        ({"node_status": "lost"}, "node_lost"),
        ({"node_status": "absent"}, "node_absent"),
        ({"age_s": None}, "stale"),
        ({"age_s": 6.1}, "stale"),
        ({"temperature_c": 83.0}, "too_hot"),
        ({"num_blocks": 6}, "kv_too_small"),
    ],
)
def test_who_cannot_take_it_is_rejected_with_the_reason(
    change: dict[str, object], code: str
) -> None:
    """Also when it would be the cheapest; alone, the request is refused with that reason."""
    bad = replace(A, **change)  # type: ignore[arg-type]
    choice = choose([bad, replace(B, num_waiting=50)], REQUEST)
    assert choice.replica_id == "b"
    assert [(one.replica_id, one.code) for one in choice.rejected] == [("a", code)]
    with pytest.raises(NotReady, match=code) as refusal:
        choose([bad, replace(B, state="loading")], REQUEST)
    assert refusal.value.retry_after


def test_what_no_kv_cache_can_hold_is_the_callers_to_mend() -> None:
    """No time to come back; 6 blocks of 16 hold 96 tokens. Also while such a replica loads, but not
    after a replica that did take it has failed."""
    small = [replace(A, num_blocks=6), replace(B, num_blocks=5, state="loading")]
    with pytest.raises(NeverFits, match="maximum context length is 96 tokens") as refusal:
        choose(small, REQUEST)
    assert (refusal.value.code, refusal.value.retry_after) == ("context_length_exceeded", None)
    with pytest.raises(NotReady) as moved:
        choose(small, REQUEST, excluded=frozenset({"c"}))
    assert moved.value.code == "model_not_ready" and moved.value.retry_after


@pytest.mark.parametrize(("num_prompt", "param"), [(90, "max_tokens"), (96, "messages")])
def test_the_field_that_is_too_long_is_named(num_prompt: int, param: str) -> None:
    with pytest.raises(NeverFits) as refusal:
        choose([replace(A, num_blocks=6)], RequestView(num_prompt, 20))
    assert refusal.value.param == param


def test_a_draining_node_serves_only_while_it_is_the_only_one() -> None:
    """Even an expensive other replica is preferred; a replacement still loading is none."""
    draining = replace(A, draining=True)
    choice = choose([draining, replace(B, num_waiting=50)], REQUEST)
    assert choice.replica_id == "b"
    assert [(one.replica_id, one.code) for one in choice.rejected] == [("a", "node_draining")]
    assert choose([draining, replace(B, state="loading")], REQUEST).replica_id == "a"


def test_a_replica_that_failed_this_request_is_not_asked_again() -> None:
    assert choose([A, B], REQUEST, excluded=frozenset({"a"})).replica_id == "b"
    with pytest.raises(NotReady, match="failed_before"):
        choose([A], REQUEST, excluded=frozenset({"a"}))


def test_no_replica_at_all_is_not_ready() -> None:
    with pytest.raises(NotReady):
        choose([], REQUEST)


def test_zones_are_as_far_apart_as_their_paths_differ() -> None:
    assert [zone_hops("eu/r1", other) for other in ("eu/r1", "eu/r2", "us/r1", "eu", "us", "")] == [
        0, 1, 2, 1, 2, 0,
    ]  # fmt: skip
    assert zone_hops("", "eu/r1") == 0


def test_a_burst_between_two_reports_spreads() -> None:
    """Telemetry stands still; what this gateway sent itself is counted."""
    sent = {"a": 0, "b": 0}
    for _ in range(100):
        views = [replace(view, num_local=sent[view.replica_id]) for view in (A, B)]
        sent[choose(views, REQUEST).replica_id] += 1
    assert abs(sent["a"] - sent["b"]) <= 1


def test_a_queue_of_our_own_that_is_gone_since_counts_no_more() -> None:
    """Of what a replica reported, what was ours then is what it is now."""
    report = {"num_running": 1, "num_waiting": 20}
    gone, theirs = replace(A, **report, num_local_then=21), replace(B, **report)
    choice = choose([gone, theirs], REQUEST)
    assert choice.replica_id == "a" and choice.terms["queue_s"] == 0.0
    half = replace(A, **report, num_local_then=14, num_local=14)  # a third are others'
    prefill, slots = 0.1, 6 * 0.2 / 16
    assert score(half, REQUEST).terms["queue_s"] == pytest.approx(20 / 3 * prefill + slots)


def test_a_conversation_is_not_lost_to_others_that_are_past_their_prefill() -> None:
    """What counts of our own requests is what they still compute."""
    request = RequestView(num_prompt_tokens=1000, max_output_tokens=10)
    a, b = (replace(one, num_running=1, num_cached_tokens=n) for one, n in ((A, 800), (B, 0)))
    assert choose([replace(a, num_local=3), b], request).replica_id == "a"
    assert choose([replace(a, num_local=3, num_local_tokens=900), b], request).replica_id == "b"


views = st.builds(
    ReplicaView,
    replica_id=st.sampled_from("abcdef"),
    node_id=st.sampled_from(["n1", "n2"]),
    state=st.sampled_from(["ready", "loading"]),
    node_status=st.sampled_from(["ready", "suspect", "lost"]),
    draining=st.booleans(),
    age_s=st.none() | st.floats(0, 20),
    utilization=st.floats(0, 1),
    temperature_c=st.floats(0, 100),
    num_running=st.integers(0, 64),
    num_waiting=st.integers(0, 64),
    num_blocks=st.integers(0, 20),
    prefill_tokens_per_s=st.floats(0, 1e5),
    decode_step_s=st.floats(0, 1),
)


@given(st.lists(views, max_size=8, unique_by=lambda view: view.replica_id))
def test_the_order_of_candidates_never_matters(candidates: list[ReplicaView]) -> None:
    """Everyone is either scored or rejected; the winner is the cheapest and always ready."""
    try:
        choice = choose(candidates, REQUEST)
    except NotReady:
        return
    assert choose(candidates[::-1], REQUEST).replica_id == choice.replica_id
    assert len(choice.candidates) + len(choice.rejected) == len(candidates)
    assert min(one.cost for one in choice.candidates) == choice.candidates[0].cost
    won = next(view for view in candidates if view.replica_id == choice.replica_id)
    assert won.state == "ready" and won.node_status == "ready"


def test_a_replica_that_must_be_swapped_in_is_taken_if_that_is_in_time() -> None:
    """Its way in counts as seconds of waiting; a resident one is preferred to it, and who cannot
    wait for it is refused. One that was never loaded is sendable where its node holds requests."""
    away = replace(A, resident=False, load_seconds=2.0)
    assert choose([away, B], REQUEST).replica_id == "b"
    assert choose([away, replace(B, num_waiting=30)], REQUEST).replica_id == "a"
    held = replace(away, state="pending", is_held=True)
    assert choose([held], REQUEST).candidates[0].terms["loading"] == 2.0
    with pytest.raises(NotReady, match="not_resident: resident in about 2 s"):
        choose([away], replace(REQUEST, max_wait_s=1.0))
