"""What a person can set, read or meet is written down, and the writing is up to date."""

import json
import re

import pytest
import yaml

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


DASHBOARD, ALERTS = "deploy/grafana/engine.json", "deploy/prometheus/alerts.yml"


def asked(file: str) -> set[str]:
    """The metrics that a file of ``deploy`` names."""
    return set(re.findall(r"\bengine[:_][a-z_]+\b", (ROOT / file).read_text()))


def exported() -> set[str]:
    """The names of all metrics, as they are shown."""
    names = set()
    for one in [*metrics(), *agent_metrics()]:
        suffixes = ("_bucket", "_sum", "_count") if one.kind == "histogram" else ("",)
        names |= {one.name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize(("file", "least"), [(DASHBOARD, 10), (ALERTS, 4)])
def test_every_metric_that_is_watched_exists(file: str, least: int) -> None:
    """No panel and no alert asks for a name that nothing exports."""
    assert asked(file) - exported() == set()
    assert len(asked(file)) >= least


def test_what_is_stuck_is_watched() -> None:
    """Every gauge of it has a panel and an alert; no two panels lie on each other."""
    stuck = {name for name in exported() if "_stuck_" in name}
    assert stuck and stuck <= asked(DASHBOARD) & asked(ALERTS)
    panels = json.loads((ROOT / DASHBOARD).read_text())["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    taken = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels]
    assert len(set(taken)) == len(taken)


def test_every_alert_leads_to_a_row_of_the_runbook() -> None:
    """And says how grave it is; Prometheus is told of the file."""
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    rows = (ROOT / "deploy/runbook.md").read_text()
    rules = [one for group in yaml.safe_load((ROOT / ALERTS).read_text())["groups"]
             for one in group["rules"]]  # fmt: skip
    assert len({one["alert"] for one in rules}) == len(rules) >= 4
    for one in rules:
        assert one["labels"]["severity"] in ("warning", "critical"), one
        assert one["expr"].count("(") == one["expr"].count(")") > 0, one
        assert f"\n| {one['annotations']['runbook']}" in rows, one
        assert one["annotations"]["summary"]
