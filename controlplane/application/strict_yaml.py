"""YAML as a person types it, and nothing else of what YAML can be: no anchors, tags, doubled keys.

What comes out is what JSON could hold, so whatever takes it needs no further care.
"""

from typing import Any

import yaml

from controlplane.application import strict_json
from controlplane.application.strict_json import MAX_DEPTH
from controlplane.domain.errors import Invalid

_TOO_DEEP = f"At most {MAX_DEPTH} levels of nesting."


def load(text: str) -> Any:
    """The content; raises Invalid: invalid_yaml, duplicate_key, json_too_deep, invalid_unicode."""
    try:
        _check_structure(text)
        loaded = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if "nesting depth" in str(error):  # libyaml reads ahead and has a limit of its own
            raise Invalid("json_too_deep", _TOO_DEEP) from None
        raise Invalid("invalid_yaml", f"Not YAML: {_place(error)}") from None
    try:
        strict_json.check_text(loaded)
    except strict_json.BadJson as error:
        raise Invalid(error.code, error.detail) from None
    return loaded


class _Loader(yaml.CSafeLoader):
    """The safe loader, which takes no duplicate key and no anchor (ten lines of those expand to
    gigabytes)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if not all(isinstance(key, str) for key in keys):
            raise yaml.constructor.ConstructorError(None, None, "keys are strings", node.start_mark)
        if len(set(keys)) != len(keys):
            line = node.start_mark.line + 1
            raise Invalid("duplicate_key", f"A key is named twice: line {line}.")
        return super().construct_mapping(node, deep=deep)


def _check_structure(text: str) -> None:
    """Depth, anchors and tags, by the flat stream of events, before anything recurses. A tag would
    hand a text to a constructor that never expects it: ``!!timestamp x``, ``!!bool x``."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise Invalid("invalid_yaml", "Anchors and aliases are not accepted.")
        if getattr(event, "tag", None) is not None:
            raise Invalid("invalid_yaml", "Tags are not accepted.")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise Invalid("json_too_deep", _TOO_DEEP)


def _place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "a value is out of range"
    return f"{problem}, line {mark.line + 1}." if mark else f"{problem}."
