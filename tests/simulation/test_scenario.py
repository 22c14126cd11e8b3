"""Scenarios as files: the examples are right, and what is wrong is named with its place."""

from pathlib import Path

import pytest

from controlplane.application.scenario_file import parse
from controlplane.domain.errors import Invalid
from controlplane.simulation.control import Control
from controlplane.simulation.hardware import (
    GIB,
    GPU_CLASSES,
    Efficiency,
    ModelShape,
    load_seconds,
    step_cost,
)
from controlplane.simulation.scenario import MONDAY, Catalogue, Tier

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "scenarios"
GOOD = """
name: small
seconds: 600
nodes: [{name: h100, gpu: h100-80gb, count: 2, gpus: 2}]
models: [{name: chat, size: 8b, share: 3}]
arrivals: {per_second: 3}
"""


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_a_scenario_that_the_product_takes(path: Path) -> None:
    """Its tenants, models and nodes pass the domain's own rules, and everything is placed."""
    scenario = parse(path.read_text())
    assert scenario.name == path.stem
    control = Control()
    control.found(scenario, MONDAY)
    control.place(MONDAY)
    assert control.unplaced() == set()


def test_the_week_is_48_gpus_and_200_models() -> None:
    week = parse((EXAMPLES / "week.yaml").read_text())
    assert sum(group.gpus for group in week.node_ids().values()) == 48
    assert len(week.entries()) == 200
    assert week.arrivals.per_second * 86_400 * 30 == pytest.approx(47e6, rel=0.001)


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("gpu: h100-80gb", "gpu: h100", "nodes[0].gpu"),
        ("size: 8b", "size: 9b", "models[0].size"),
        ("share: 3", "share: 0", "models[0].share"),
        ("share: 3", "sahre: 3", "models[0]"),
        ("share: 3", "share: much", "models[0].share"),
        ("seconds: 600", "seconds: 0", "seconds"),
        ("seconds: 600", "seconds: .nan", "seconds"),
        ("per_second: 3", "per_second: -1", "arrivals.per_second"),
        ("per_second: 3", "per_second: 3, classes: {urgent: 1}", "arrivals.classes.urgent"),
        ("per_second: 3", "per_second: 3, max_prompt: 900000", "arrivals.max_prompt"),
        ("name: small", "name: small\nbatching: none", "batching"),
        ("name: small", "name: small\nmodle: exact", None),
        ("name: small", "name: small\nmode: fluid", "mode"),
        (
            "name: small",
            "name: small\nfailures: {schedule: [{node: h100-3, at: 1}]}",
            "failures.schedule[0].node",
        ),
        ("count: 2", "count: 0", "nodes[0].count"),
        ("name: small", "name: small\ncatalogue: {mix: {}, tiers: []}", "catalogue.mix"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(old: str, new: str, path: str | None) -> None:
    assert parse(GOOD).name == "small"
    with pytest.raises(Invalid) as error:
        parse(GOOD.replace(old, new))
    assert error.value.code == "invalid_scenario"
    assert error.value.param == path
    assert path is None or path in error.value.message


def test_yaml_is_strict() -> None:
    for text, code in (
        ("name: a\nname: b\n", "duplicate_key"),
        ("name: &x a\nother: *x\n", "invalid_yaml"),
        ("[1, 2]", "invalid_scenario"),
        (": :", "invalid_yaml"),
    ):
        with pytest.raises(Invalid) as error:
            parse(text)
        assert error.value.code == code


def test_a_catalogue_spreads_sizes_over_popularity() -> None:
    week = parse((EXAMPLES / "week.yaml").read_text())
    entries = week.entries()
    assert [one.share for one in entries[:3]] == [1.0, 1 / 2, 1 / 3]
    for some in (entries[:100], entries[100:]):
        assert sum(one.size == "8b" for one in some) == pytest.approx(20, abs=1)
    named = Catalogue(mix={"1b": 2, "3b": 1}, tiers=(Tier(3, 2, 4, "high"),))
    assert named.zipf == 1.0


def test_hardwares_worked_examples() -> None:
    shape = ModelShape(8e9, 16_000_000_000, 128 * 1024)
    cost = step_cost(GPU_CLASSES["h100-80gb"], shape, Efficiency())
    assert cost.seconds(1, 1000) == pytest.approx(0.0089, abs=0.0001)
    assert cost.seconds(32, 32_000) == pytest.approx(0.0106, abs=0.0001)
    assert cost.seconds(512, 512) == pytest.approx(0.0186, abs=0.0001)
    assert load_seconds(shape, Efficiency(), False) == pytest.approx(16.8)
    assert load_seconds(shape, Efficiency(), True) == pytest.approx(9.33, abs=0.01)
    assert shape.num_kv_tokens(10 * GIB) == 0
