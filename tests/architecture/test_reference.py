"""What a person can set, read or meet is written down, and the writing is up to date."""

import re

import pytest

from tests.architecture.reference import (
    ROOT,
    agent_metrics,
    filled,
    metrics,
    sections,
)


@pytest.mark.parametrize("readme", ["controlplane/README.md", "gpuagent/README.md"])
def test_the_reference_is_up_to_date(readme):
    """Settings, commands, metrics and events are as the code has them; else run the generator."""
    text = (ROOT / readme).read_text()
    assert filled(text, sections()[readme]) == text, "run python -m tests.architecture.reference"


@pytest.mark.parametrize("readme", ["controlplane/README.md", "gpuagent/README.md"])
def test_nothing_lacks_a_description(readme):
    """Every setting, command and metric says what it is."""
    for name, part in sections()[readme].items():
        bare = [line for line in part.splitlines() if "MISSING" in line]
        assert bare == [], name


def test_every_metric_on_the_grafana_dashboard_exists():
    """No panel asks for a name that nothing exports."""
    text = (ROOT / "deploy/grafana/engine.json").read_text()
    asked = set(re.findall(r"\bengine[:_][a-z_]+\b", text))
    exported = set()
    for one in [*metrics(), *agent_metrics()]:
        suffixes = ("_bucket", "_sum", "_count") if one.kind == "histogram" else ("",)
        exported |= {one.name + suffix for suffix in suffixes}
    assert asked - exported == set()
    assert len(asked) > 10


def test_the_metrics_of_every_process_are_in_the_table():
    """The controller's, whose names are put together, and what two processes tell alike."""
    table = sections()["controlplane/README.md"]["metrics"]
    for line in (
        "| `engine_controller_leader` | gauge | controller | 1 on the controller that leads. |",
        "| `engine_projection_lag_events` | gauge | web, controller | Events not projected yet. |",
        "| `engine_gateway_websockets` | gauge | gateway | Open token websockets. |",
        "| `engine_node_gpu_power_watts` | gauge | controller | Power drawn. |",
    ):
        assert line in table.splitlines()
