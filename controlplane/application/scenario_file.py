"""A scenario as a person writes it: strict YAML into ``simulation.scenario.Scenario``.

Fields are those of the structs there; what is left out has its default, what is unknown is refused,
and every refusal names its place::

    name: small
    seconds: 600
    nodes: [{name: h100, gpu: h100-80gb, count: 2, gpus: 2}]
    models:
      - {name: chat, size: 8b, share: 3, min_replicas: 2, max_replicas: 4}
      - {name: rare, size: 3b, share: 0.05, min_replicas: 0}
    arrivals: {per_second: 3}
    failures: {schedule: [{node: h100-1, at: 200, seconds: 200}]}

    gpu: h100      -> Invalid invalid_scenario at nodes[0].gpu: one of a100-40gb, …
    sahre: 3       -> Invalid invalid_scenario at models[0]: Object contains unknown field `sahre`
"""

import re

import msgspec

from controlplane.application import strict_yaml
from controlplane.domain.errors import Invalid
from controlplane.simulation.scenario import Scenario, check

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)


def parse(text: str) -> Scenario:
    """The scenario; raises Invalid with the path of what is wrong in ``param``."""
    loaded = strict_yaml.load(text)
    if not isinstance(loaded, dict):
        raise Invalid("invalid_scenario", "A scenario is a mapping of names to values.")
    try:
        scenario = msgspec.convert(loaded, Scenario, strict=True)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    return check(scenario)


def _invalid(text: str) -> Invalid:
    found = _AT.match(text)
    what, path = (found["what"], found["path"] or "") if found else (text, "")
    place = f"{path}: " if path else ""
    return Invalid("invalid_scenario", f"{place}{what}.", path or None)
