"""A version goes only where the agent has the engine that it names."""

from dataclasses import replace

from controlplane.placement.plan import plan
from controlplane.placement.snapshot import NodeView
from tests.placement.fleets import fleet, node, version
from tests.placement.test_plan import places


def having(one: NodeView, *engines: str) -> NodeView:
    return replace(one, engines=engines)


def test_a_node_without_the_engine_is_ruled_out_with_its_reason() -> None:
    """The fuller node would have been the tighter fit; the sentence says why it was not taken."""
    nodes = [node("n1", 10), having(node("n2", 20), "builtin", "vllm")]
    made = plan(fleet(nodes, [version("a", 8, engine="vllm"), version("b", 8)]), 2)
    assert places(made) == {"a.v1.g2.0": "n2/0", "b.v1.g2.0": "n1/0"}
    started = next(one for one in made.started if one.assignment.version_id == "a@v1")
    (lost,) = started.rejections
    assert (lost.node_id, lost.code) == ("n1", "no_engine")
    assert lost.detail == "needs vllm, the node has builtin"
    assert "Ruled out: 1 on a node without its engine." in started.reason


def test_without_any_such_node_it_is_unplaced_and_nobody_is_evicted() -> None:
    """Evicting the best-effort neighbour would not help, so it stays."""
    low = version("low", 8, priority="best-effort")
    first = plan(fleet([node("n1", 10)], [low]), 2)
    assert places(first) == {"low.v1.g2.0": "n1/0"}
    both = [low, version("a", 8, priority="high", engine="vllm")]
    made = plan(fleet([node("n1", 10)], both), 2)
    assert places(made) == {"low.v1.g2.0": "n1/0"}
    (gap,) = made.unplaced
    assert (gap.version_id, gap.code) == ("a@v1", "no_engine")
    assert "1 on a node without its engine" in gap.reason


def test_a_node_may_have_the_other_engine_alone() -> None:
    nodes = [having(node("n1", 10), "vllm"), node("n2", 20)]
    made = plan(fleet(nodes, [version("b", 8)]), 2)
    assert places(made) == {"b.v1.g2.0": "n2/0"}
