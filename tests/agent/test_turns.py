"""Device time by weight: guarantees hold, idle time is used, nobody starves."""

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuagent.agent.turns import Turns

Share = tuple[int, str]  # guaranteed percent, priority


def turns(shares: dict[str, Share]) -> Turns:
    made = Turns()
    for name, (percent, priority) in shares.items():
        made.join(name, percent, priority)
    return made


def seconds(
    made: Turns, working: Iterable[str], steps: dict[str, float], total: float
) -> Counter[str]:
    """Device time of each in ``total`` seconds in which these always have work."""
    held: Counter[str] = Counter()
    weights = working if isinstance(working, dict) else dict.fromkeys(working, 1.0)
    while held.total() < total:
        chosen = made.choose(weights)
        made.charge(chosen, steps[chosen])
        held[chosen] += steps[chosen]
    return held


EXAMPLE: dict[str, Share] = {"a": (50, "high"), "n": (0, "normal"), "b": (0, "best-effort")}
STEPS = dict.fromkeys("anb", 0.02)


def test_the_worked_example() -> None:
    made = turns(EXAMPLE)
    held = seconds(made, ["a", "n", "b"], STEPS, 40.0)
    assert {name: round(held[name] / 40, 3) for name in held} == pytest.approx(
        {"a": 0.950, "n": 0.045, "b": 0.005}, abs=0.002
    )
    held = seconds(turns(EXAMPLE), ["n", "b"], STEPS, 40.0)
    assert held["n"] / held.total() == pytest.approx(10 / 11, abs=0.01)
    assert seconds(turns(EXAMPLE), ["b"], STEPS, 1.0)["b"] == pytest.approx(1.0)


def test_a_realtime_request_takes_what_nobody_was_promised() -> None:
    """100 : 1 beside batch work of an equal model, and never what another was promised."""
    made = turns({"now": (0, "normal"), "bulk": (0, "normal")})
    held = seconds(made, {"now": 10.0, "bulk": 0.1}, dict.fromkeys(("now", "bulk"), 0.02), 40.0)
    assert held["bulk"] / 40 == pytest.approx(1 / 101, abs=0.003)
    held = seconds(made, {"now": 1.0, "bulk": 1.0}, dict.fromkeys(("now", "bulk"), 0.02), 40.0)
    assert held["bulk"] == pytest.approx(20, abs=0.5)
    made = turns({"own": (60, "high"), "now": (0, "normal")})
    held = seconds(made, {"own": 0.1, "now": 10.0}, dict.fromkeys(("own", "now"), 0.02), 40.0)
    assert held["own"] / 40 >= 0.6


def test_long_steps_do_not_take_more_of_the_device() -> None:
    held = seconds(
        turns({"slow": (0, "normal"), "fast": (0, "normal")}),
        ["slow", "fast"], {"slow": 0.1, "fast": 0.01}, 20.0,
    )  # fmt: skip
    assert held["slow"] == pytest.approx(held["fast"], abs=0.2)


def test_who_returns_waits_for_one_step_and_has_saved_nothing() -> None:
    made = turns(EXAMPLE)
    seconds(made, ["b"], STEPS, 60.0)
    assert made.choose({"a": 1.0, "b": 1.0}) == "a", (
        "a best-effort model had the device for a minute"
    )
    made.charge("a", 0.02)
    other = turns({"x": (0, "normal"), "y": (0, "normal")})
    seconds(other, ["x"], {"x": 0.02}, 60.0)
    held = seconds(other, ["x", "y"], dict.fromkeys("xy", 0.02), 10.0)
    assert held["y"] == pytest.approx(5.0, abs=0.1), "half, and not the minute that it missed"


def test_who_leaves_gives_its_share_to_the_others() -> None:
    made = turns(EXAMPLE)
    made.leave("a")
    made.leave("unknown")
    assert made.weight("n") == pytest.approx(100 * 10 / 11)


def test_more_than_everything_promised_still_leaves_a_turn() -> None:
    made = turns({"a": (70, "high"), "c": (70, "high"), "b": (0, "best-effort")})
    held = seconds(made, ["a", "c", "b"], dict.fromkeys("acb", 0.001), 60.0)
    assert held["b"] > 0


models = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(
        st.integers(0, 25), st.sampled_from(["normal", "best-effort"]), st.floats(0.002, 0.05)
    ),
    min_size=1,
)


@settings(max_examples=60, deadline=None)
@given(models, st.data())
def test_a_guarantee_holds_however_the_neighbours_come_and_go(
    drawn: dict[str, tuple[int, str, float]], data: st.DataObject
) -> None:
    """``g`` has 40 % and always work; the others, 60 % promised at most between them, whenever
    they like. It never falls behind by more than a longest step of each beside it."""
    shares: dict[str, Share] = {"g": (40, "high")}
    left = 60
    for name, (percent, priority, _) in drawn.items():
        percent = min(percent, left)
        left -= percent
        shares[name] = (percent, "high" if percent else priority)
    steps = {name: step for name, (_, _, step) in drawn.items()} | {"g": 0.02}
    made, held, now = turns(shares), 0.0, 0.0
    for _ in range(20):
        others = data.draw(st.lists(st.sampled_from(sorted(drawn)), unique=True))
        for _ in range(15):
            chosen = made.choose(dict.fromkeys(["g", *others], 1.0))
            made.charge(chosen, steps[chosen])
            now += steps[chosen]
            held += steps[chosen] if chosen == "g" else 0.0
            assert held >= 0.4 * now - 0.05 * (len(drawn) + 1)
