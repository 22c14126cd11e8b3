"""Who is on the device: stated rules, and random nodes that always reach what is asked."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.agent.residency import HOST, RESIDENT, STORAGE, Candidate, Moves, decide

TURN = 10.0


def one(name: str, tier: str = RESIDENT, num_bytes: int = 6, **fields: object) -> Candidate:
    values = {"host_bytes": num_bytes, **fields}
    return Candidate(name, 0, num_bytes, tier, **values)  # type: ignore[arg-type]


def moves(*candidates: Candidate, room: int = 10, host: int = 100, now: float = 100.0) -> Moves:
    return decide(candidates, {0: room}, host, TURN, now)


def test_what_is_meant_for_storage_goes_before_what_is_meant_for_the_host() -> None:
    """Though it was used last: the control plane expects the others to be asked for sooner. It is
    parked only where nobody has to be dropped for it."""
    away = one("s", used_at=9.0, intended=2)
    others = [one("w", used_at=1.0, intended=1), one("r")]
    asker = one("x", HOST, waits_since=5.0)
    full = moves(away, *others, asker, one("p", HOST), one("q", HOST), room=18, host=20)
    assert (full.swap_out, full.drop) == ((), ("s",))
    roomy = moves(away, *others, asker, room=18)
    assert (roomy.swap_out, roomy.drop) == (("s",), ())


def test_the_host_drops_first_what_is_meant_for_storage() -> None:
    held = one("w", HOST, used_at=1.0, intended=1), one("s", HOST, used_at=9.0, intended=2)
    assert moves(*held, room=0, host=6).drop == ("s",)


def test_the_example_of_the_modules_docstring() -> None:
    a = one("a", is_busy=True, resident_since=0.0)
    b, c = one("b", HOST, waits_since=0.0), one("c", HOST)
    assert moves(a, b, c, now=4.0).blocked == ("b",)
    done = moves(replace(a, is_busy=False), b, c, now=4.0)
    assert (done.swap_out, done.bring_in, dict(done.reserved)) == (("a",), (), {0: 4})
    leaving = replace(a, is_busy=False, moving="out")
    assert moves(leaving, b, c, now=4.0).swap_out == ()
    arrived = moves(replace(a, tier=HOST, is_busy=False), b, c, now=4.0)
    assert arrived.bring_in == ("b",)
    b = replace(b, tier=RESIDENT, is_busy=True, waits_since=None, resident_since=4.0)
    a, c = replace(a, tier=HOST, waits_since=5.0), replace(c, waits_since=5.0)
    assert moves(a, b, c, now=13.9).swap_out == ()
    assert moves(a, b, c, now=15.0).swap_out == ("b",)


def test_idle_ones_go_first_then_low_priority_then_the_longest_unused() -> None:
    asks = one("asks", HOST, 5, waits_since=99.0, priority="high")
    idle = one("idle", num_bytes=5, used_at=99.0)
    busy = one("busy", num_bytes=5, is_busy=True, used_at=1.0, priority="best-effort")
    assert moves(asks, idle, busy).swap_out == ("idle",)
    low = one("low", num_bytes=5, used_at=99.0, priority="best-effort")
    assert moves(asks, idle, low).swap_out == ("low",)
    older = one("older", num_bytes=5, used_at=50.0)
    assert moves(asks, idle, older).swap_out == ("older",)
    assert moves(asks, busy, one("b2", num_bytes=5, is_busy=True)).swap_out == ("busy",)


def test_a_busy_one_keeps_its_turn_from_equals_and_always_from_lesser_ones() -> None:
    busy = one("busy", is_busy=True, resident_since=95.0)
    assert moves(one("asks", HOST, waits_since=80.0), busy).blocked == ("asks",)
    assert moves(one("asks", HOST, waits_since=80.0), replace(busy, resident_since=0)).swap_out
    lesser = one("asks", HOST, waits_since=0.0, priority="best-effort")
    assert moves(lesser, replace(busy, resident_since=0)).blocked == ("asks",)
    assert moves(one("asks", HOST, waits_since=99.0, priority="high"), busy).swap_out == ("busy",)


def test_a_group_comes_in_where_all_of_its_devices_have_room_or_can_be_given_it() -> None:
    """What is in its way goes on every device or on none, and a group is nobody's victim."""
    rooms = {0: 10, 1: 10}
    wide = one("wide", STORAGE, also_on=(1,), can_park=False, stays=True, waits_since=1.0)
    assert decide([wide], rooms, 100, TURN, 100.0).bring_in == ("wide",)
    assert decide([wide], {0: 10, 1: 5}, 100, TURN, 100.0).blocked == ("wide",)
    assert decide([wide], {0: 10}, 100, TURN, 100.0) == Moves(), "it has no second device"
    first = one("first")
    second = Candidate("second", 1, 6, RESIDENT, host_bytes=6)
    answer = decide([wide, first, second], rooms, 100, TURN, 100.0)
    assert (set(answer.swap_out), answer.reserved) == ({"first", "second"}, {0: 4, 1: 4})
    stuck = replace(second, stays=True)
    answer = decide([wide, first, stuck], rooms, 100, TURN, 100.0)
    assert (answer.swap_out, answer.blocked) == ((), ("wide",))
    both_busy = [replace(each, is_busy=True, priority="best-effort") for each in (first, second)]
    assert decide([wide, *both_busy], rooms, 12, TURN, 100.0).swap_out == ("first", "second")
    assert decide([wide, *both_busy], rooms, 11, TURN, 100.0).blocked == ("wide",)
    there = replace(wide, tier=RESIDENT, waits_since=None)
    asks = Candidate("asks", 1, 6, HOST, host_bytes=6, waits_since=0.0, priority="high")
    assert decide([there, asks], rooms, 100, TURN, 100.0).blocked == ("asks",)


def test_a_full_host_drops_the_idle_and_never_the_unfinished() -> None:
    asks, out = one("asks", STORAGE, waits_since=1.0), one("out")
    idle, kept = one("idle", HOST, used_at=5.0), one("kept", HOST, is_busy=True, waits_since=50.0)
    answer = moves(asks, out, idle, kept, host=12)
    assert (answer.swap_out, answer.drop) == (("out",), ("idle",))
    answer = moves(asks, out, kept, host=11)
    assert (answer.swap_out, answer.drop) == ((), ("out",))
    busy = one("busy", is_busy=True)
    assert moves(asks, busy, host=5).blocked == ("asks",), "its requests would have nowhere to be"


def test_the_host_has_room_for_the_unfinished_before_it_has_for_the_idle() -> None:
    asks = one("asks", HOST, 10, host_bytes=0, waits_since=1.0, priority="high")
    idle, busy = one("idle", num_bytes=5), one("busy", num_bytes=5, is_busy=True)
    answer = moves(asks, idle, busy, host=6)
    assert (answer.swap_out, answer.drop) == (("busy",), ("idle",))
    both = (replace(idle, is_busy=True), busy)
    assert moves(asks, *both, host=6).blocked == ("asks",), "only one of them has a place to go"


def test_free_memory_is_filled_the_expected_first_and_nobody_goes_for_it() -> None:
    cold, warm = one("cold", STORAGE), one("warm", HOST, warm_rank=0)
    assert moves(cold, warm).bring_in == ("warm",)
    assert moves(one("idle"), cold, warm) == Moves()


def test_growing_foreign_memory_puts_idle_ones_out() -> None:
    a, b = one("a", num_bytes=4, used_at=1.0), one("b", num_bytes=4, used_at=2.0)
    assert moves(a, b, room=8) == Moves()
    assert moves(a, b, room=7).swap_out == ("a",)
    assert moves(replace(a, is_busy=True), replace(b, is_busy=True), room=1) == Moves()


def test_a_pair_has_no_host_tier() -> None:
    pair, asks = one("pair", can_park=False), one("asks", HOST, waits_since=1.0)
    assert moves(pair, asks).drop == ("pair",)
    assert moves(replace(pair, is_busy=True), asks).blocked == ("asks",)


nodes = st.lists(
    st.builds(
        Candidate,
        st.sampled_from("abcdefgh"),
        st.integers(0, 1),
        st.integers(1, 10),
        st.sampled_from([RESIDENT, HOST, STORAGE]),
        priority=st.sampled_from(["high", "normal", "best-effort"]),
        host_bytes=st.integers(1, 10),
        is_busy=st.booleans(),
        waits_since=st.sampled_from([None, 10.0, 60.0, 95.0]),
        used_at=st.sampled_from([1.0, 50.0, 99.0]),
        resident_since=st.sampled_from([0.0, 95.0]),
        warm_rank=st.sampled_from([None, 0, 1]),
        can_park=st.booleans(),
    ),
    unique_by=lambda each: each.replica_id,
    max_size=8,
)


def possible(drawn: list[Candidate]) -> list[Candidate]:
    """A node that obeyed until now: nothing over its memory, nothing asked for where it is."""
    free, kept = {0: 10, 1: 10}, []
    for each in drawn:
        if each.tier == RESIDENT and free[each.device_index] < each.num_bytes:
            each = replace(each, tier=STORAGE)
        if each.tier == RESIDENT:
            free[each.device_index] -= each.num_bytes
            each = replace(each, waits_since=None)
        if each.tier == STORAGE or (each.tier == HOST and not each.can_park):
            each = replace(each, tier=STORAGE, is_busy=False)
        if each.tier == HOST and each.is_busy and each.waits_since is None:
            each = replace(each, waits_since=60.0)
        kept.append(each)
    return kept


@settings(deadline=None)
@given(nodes, st.integers(0, 30))
def test_what_is_decided_can_be_done(drawn: list[Candidate], host: int) -> None:
    node = possible(drawn)
    by_id = {each.replica_id: each for each in node}
    answer = decide(node, {0: 10, 1: 10}, host, TURN, 100.0)
    for index in (0, 1):
        after = [c for c in node if c.device_index == index and c.tier == RESIDENT]
        came = [by_id[name] for name in answer.bring_in if by_id[name].device_index == index]
        assert sum(c.num_bytes for c in (*after, *came)) + answer.reserved.get(index, 0) <= 10
    assert all(by_id[name].tier != RESIDENT for name in answer.bring_in)
    assert all(by_id[name].tier == RESIDENT and by_id[name].can_park for name in answer.swap_out)
    assert not any(by_id[name].is_busy for name in answer.drop), "nobody's request is lost"
    moved = (*answer.bring_in, *answer.swap_out, *answer.drop)
    assert len(moved) == len(set(moved))
    held = [c for c in node if c.tier == HOST and c.replica_id not in answer.drop]
    came_out = [by_id[name] for name in answer.swap_out]
    if came_out:
        assert sum(c.host_bytes for c in (*held, *came_out)) <= host


@settings(deadline=None)
@given(nodes, st.integers(0, 30))
def test_whoever_asks_is_resident_in_the_end(drawn: list[Candidate], host: int) -> None:
    """Once those that work are done: moves are carried out, and everybody was let in."""
    node = {each.replica_id: each for each in possible(drawn)}
    asking = {name for name, each in node.items() if each.waits_since is not None}
    now = 100.0
    for _ in range(60):
        now += 1.0
        answer = decide(node.values(), {0: 10, 1: 10}, host, TURN, now)
        for name in (*answer.swap_out, *answer.drop):
            tier = HOST if name in answer.swap_out else STORAGE
            node[name] = replace(node[name], tier=tier)
        for name in answer.bring_in:
            came = {"tier": RESIDENT, "waits_since": None, "is_busy": False, "used_at": now}
            node[name] = replace(node[name], **came)  # type: ignore[arg-type]
            asking.discard(name)
        for name, each in node.items():
            if each.tier == RESIDENT:
                node[name] = replace(each, is_busy=False)
    assert not asking


def test_what_takes_turns_is_loaded_once_in_the_place_of_idle_ones() -> None:
    """So that it is ready in the host; a busy one, and what is to stay, is left alone."""
    new = one("new", STORAGE, prepares=True)
    idle = one("idle", host_bytes=6)
    assert moves(idle, new).swap_out == ("idle",)
    left = one("idle", HOST, used_at=99.0)
    assert moves(left, new).bring_in == ("new",), "whoever left for it does not come back first"
    assert moves(one("idle", host_bytes=6, is_busy=True), new) == Moves()
    assert moves(one("idle", host_bytes=6, stays=True), new) == Moves()
    assert moves(idle, one("known", STORAGE)) == Moves(), "loaded before: nobody asks for it"


def test_what_is_to_stay_is_put_out_for_nobody() -> None:
    found = moves(one("kept", stays=True), one("asks", HOST, waits_since=0.0))
    assert (found.swap_out, found.blocked) == ((), ("asks",))
