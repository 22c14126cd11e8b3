import random

from controlplane.placement.preload import Memory, swaps, victims

SIZES = {"a": 6.0, "b": 4.0, "c": 4.0, "d": 5.0, "e": 7.0}


def memory(*resident: str, room: float = 10.0, busy: tuple[str, ...] = ()) -> Memory:
    return Memory(room, SIZES, resident, busy)


def test_what_is_likelier_takes_the_place_of_the_idlest():
    (swap,) = swaps(memory("a", "b"), {"a": 0.5, "b": 0.1, "c": 0.4})
    assert (swap.model, swap.evicted) == ("c", ("b",))
    assert "in the place of b" in swap.reason


def test_nothing_moves_for_a_gain_within_the_margin():
    assert not list(swaps(memory("a", "b"), {"a": 0.5, "b": 0.1, "c": 0.104}))


def test_all_that_would_leave_counts():
    assert not list(swaps(memory("a", "b"), {"a": 0.3, "b": 0.2, "e": 0.4}))


def test_only_whose_going_helps_leaves():
    """b, the idlest, makes too little room for d, and a makes enough alone."""
    (swap,) = swaps(memory("a", "b"), {"a": 0.3, "b": 0.2, "d": 0.4})
    assert (swap.model, swap.evicted, swap.evicted_rate) == ("d", ("a",), 0.3)


def test_a_smaller_model_still_finds_free_memory_where_a_larger_one_does_not_pay():
    (swap,) = swaps(memory("a"), {"a": 0.5, "e": 0.4, "b": 0.1})
    assert (swap.model, swap.evicted) == ("b", ())


def test_free_memory_is_filled_without_evicting():
    (swap,) = swaps(memory("a"), {"a": 0.5, "b": 0.1})
    assert (swap.model, swap.evicted) == ("b", ())


def test_what_is_busy_stays():
    assert not list(swaps(memory("a", "b", busy=("b",)), {"a": 0.1, "b": 0.1, "c": 0.104}))
    assert victims(memory("a", "b", busy=("a", "b")), "c", {}) is None


def test_what_does_not_fit_at_all_evicts_nothing():
    assert victims(memory("b", room=4.0), "a", {}) is None


def test_memory_is_never_passed_nor_a_better_model_lost():
    draw = random.Random(3)
    for _ in range(300):
        names = [f"m{i}" for i in range(draw.randint(1, 12))]
        sizes = {name: float(draw.randint(1, 5)) for name in names}
        room, resident = float(draw.randint(3, 15)), []
        for name in names:
            if sum(sizes[one] for one in resident) + sizes[name] <= room:
                resident.append(name)
        busy = [name for name in resident if draw.random() < 0.3]
        rates = {name: draw.random() for name in names}
        held = set(resident)
        for swap in swaps(Memory(room, sizes, resident, busy), rates):
            assert not set(swap.evicted) & set(busy)
            assert swap.rate > sum(rates[one] for one in swap.evicted)
            held = (held - set(swap.evicted)) | {swap.model}
            assert sum(sizes[one] for one in held) <= room
