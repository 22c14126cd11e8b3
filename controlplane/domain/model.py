"""A model with its versions and aliases. Stream ``model-<name>``.

Resolution reads: alias -> model or route; route -> arm -> version; a bare model name means its
default version, which is the oldest one that is not retired unless one was chosen. The default is
retired last: while others are live, the choice of the next one is a person's.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from controlplane.domain.decider import Command, Decider, Event, State
from controlplane.domain.errors import Conflict, Invalid, NotFound
from controlplane.domain.ids import checked_name, version_id
from controlplane.domain.money import FREE, Price, check_price
from controlplane.domain.policy import ROLES
from controlplane.domain.version_spec import VersionSpec, check_replicas, check_spec


class Access(msgspec.Struct, frozen=True):
    """Who may use the model: every tenant (``public``) or the listed ones; and of their callers
    all, or those with a listed role. Roles only narrow: a tenant's administrator hands out the
    roles in it, so a role that opened a model could be had for the asking."""

    public: bool = True
    tenants: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    def allows(self, tenant_id: str, role: str | None = None) -> bool:
        """``role`` None: may anybody of the tenant?"""
        if not self.public and tenant_id not in self.tenants:
            return False
        return role is None or not self.roles or role in self.roles


OPEN_ACCESS = Access()


# --- events -----------------------------------------------------------------------------------
class ModelRegistered(Event, frozen=True, tag_field="type", tag="ModelRegistered"):
    name: str
    at: float


class ModelVersionAdded(Event, frozen=True, tag_field="type", tag="ModelVersionAdded"):
    name: str
    spec: VersionSpec
    at: float


class ModelVersionScaled(Event, frozen=True, tag_field="type", tag="ModelVersionScaled"):
    name: str
    version: str
    min_replicas: int
    max_replicas: int
    at: float


class ModelVersionRetired(Event, frozen=True, tag_field="type", tag="ModelVersionRetired"):
    name: str
    version: str
    at: float


class ModelDefaultVersionSet(Event, frozen=True, tag_field="type", tag="ModelDefaultVersionSet"):
    name: str
    version: str
    at: float


class ModelAliasAdded(Event, frozen=True, tag_field="type", tag="ModelAliasAdded"):
    name: str
    alias: str
    at: float


class ModelAliasRemoved(Event, frozen=True, tag_field="type", tag="ModelAliasRemoved"):
    name: str
    alias: str
    at: float


class ModelAccessChanged(Event, frozen=True, tag_field="type", tag="ModelAccessChanged"):
    name: str
    access: Access
    at: float


class ModelPriceSet(Event, frozen=True, tag_field="type", tag="ModelPriceSet"):
    """Of requests admitted from now on; those that run end at the price they began under."""

    name: str
    version: str
    price: Price
    at: float


ModelEvent = (
    ModelRegistered
    | ModelVersionAdded
    | ModelVersionScaled
    | ModelVersionRetired
    | ModelDefaultVersionSet
    | ModelAliasAdded
    | ModelAliasRemoved
    | ModelAccessChanged
    | ModelPriceSet
)


# --- state ------------------------------------------------------------------------------------
class Model(State, frozen=True):
    exists: bool = False
    versions: dict[str, VersionSpec] = msgspec.field(default_factory=dict)
    retired: frozenset[str] = frozenset()
    default: str = ""
    aliases: frozenset[str] = frozenset()
    access: Access = OPEN_ACCESS
    prices: dict[str, Price] = msgspec.field(default_factory=dict)


def evolve(model: Model, event: ModelEvent) -> Model:
    match event:
        case ModelRegistered():
            return replace(model, exists=True)
        case ModelVersionAdded(spec=spec):
            return replace(model, versions={**model.versions, spec.version: spec})
        case ModelVersionScaled(version=version, min_replicas=low, max_replicas=high):
            if version not in model.versions:
                return model
            spec = replace(model.versions[version], min_replicas=low, max_replicas=high)
            return replace(model, versions={**model.versions, version: spec})
        case ModelVersionRetired(version=version):
            return replace(model, retired=model.retired | {version})
        case ModelDefaultVersionSet(version=version):
            return replace(model, default=version)
        case ModelAliasAdded(alias=alias):
            return replace(model, aliases=model.aliases | {alias})
        case ModelAliasRemoved(alias=alias):
            return replace(model, aliases=model.aliases - {alias})
        case ModelAccessChanged(access=access):
            return replace(model, access=access)
        case ModelPriceSet(version=version, price=price):
            return replace(model, prices={**model.prices, version: price})
    return model


# --- commands ---------------------------------------------------------------------------------
class RegisterModel(Command, frozen=True):
    name: str
    now: float


class AddVersion(Command, frozen=True):
    name: str
    spec: VersionSpec
    now: float


class ScaleVersion(Command, frozen=True):
    name: str
    version: str
    min_replicas: int
    max_replicas: int
    now: float


class RetireVersion(Command, frozen=True):
    name: str
    version: str
    now: float


class SetDefaultVersion(Command, frozen=True):
    name: str
    version: str
    now: float


class AddAlias(Command, frozen=True):
    name: str
    alias: str
    now: float


class RemoveAlias(Command, frozen=True):
    name: str
    alias: str
    now: float


class ChangeAccess(Command, frozen=True):
    name: str
    access: Access
    now: float


class SetModelPrice(Command, frozen=True):
    name: str
    version: str
    price: Price
    now: float


ModelCommand = (
    RegisterModel
    | AddVersion
    | ScaleVersion
    | RetireVersion
    | SetDefaultVersion
    | AddAlias
    | RemoveAlias
    | ChangeAccess
    | SetModelPrice
)


# --- decisions --------------------------------------------------------------------------------
def decide(model: Model, command: ModelCommand) -> list[Event]:
    if isinstance(command, RegisterModel):
        checked_name(command.name)
        return [] if model.exists else [ModelRegistered(command.name, command.now)]
    if not model.exists:
        raise NotFound("model", command.name)
    match command:
        case AddVersion(name, spec, now):
            return _add_version(model, name, spec, now)
        case ScaleVersion():
            return _scale(model, command)
        case RetireVersion(name, version, now):
            return _retire(model, name, version, now)
        case SetDefaultVersion(name, version, now):
            _require_live(model, version)
            return [] if model.default == version else [ModelDefaultVersionSet(name, version, now)]
        case AddAlias(name, alias, now):
            checked_name(alias, "alias")
            return [] if alias in model.aliases else [ModelAliasAdded(name, alias, now)]
        case RemoveAlias(name, alias, now):
            return [ModelAliasRemoved(name, alias, now)] if alias in model.aliases else []
        case ChangeAccess(name, access, now):
            return _change_access(model, name, access, now)
        case SetModelPrice():
            return _set_price(model, command)
    raise AssertionError(command)


def default_version(model: Model) -> str | None:
    """The version a bare model name means: the chosen one, else the oldest not retired.

    Not the newest: adding a version would move all traffic to weights that no node has loaded.
    """
    if model.default and model.default not in model.retired:
        return model.default
    live = [version for version in model.versions if version not in model.retired]
    return live[0] if live else None


def check_unused(model: Model, name: str, version: str, routes: Sequence[str] = ()) -> None:
    """Raise Conflict ``in_use`` unless the version may be retired: ``routes`` names those with an
    arm of it, and no other live version would have to become the default unasked. A version that
    is retired already is in nobody's way."""
    if version in model.retired:
        return
    uses, steps = [], []
    if routes:
        plural = "s" if len(routes) > 1 else ""
        uses.append(f"an arm of the route{plural} {', '.join(routes)}")
        steps.append(f"take it off the route{plural}")
    if version == default_version(model) and len(model.versions) - len(model.retired) > 1:
        uses.append(f"the default of {name}")
        steps.append("make another version the default")
    if uses:
        told = f"{version_id(name, version)} is {' and '.join(uses)}; {' and '.join(steps)} first."
        raise Conflict("in_use", told)


def price_of(model: Model, version: str) -> Price:
    """What the version costs now; one that was never given a price costs nothing."""
    return model.prices.get(version, FREE)


def _set_price(model: Model, command: SetModelPrice) -> list[Event]:
    _require_live(model, command.version)
    check_price(command.price)
    if price_of(model, command.version) == command.price:
        return []
    return [ModelPriceSet(command.name, command.version, command.price, command.now)]


def _exists(name: str, present: VersionSpec, wanted: VersionSpec) -> str:
    fields = VersionSpec.__struct_fields__
    other = [field for field in fields if getattr(present, field) != getattr(wanted, field)]
    said = f" with another {', '.join(other)}" if other else ", and is retired"
    return f"{name}@{wanted.version} exists{said}. A version never changes: add another one."


def _add_version(model: Model, name: str, spec: VersionSpec, now: float) -> list[Event]:
    present = model.versions.get(spec.version)
    if present == spec and spec.version not in model.retired:
        return []
    if present is not None:
        raise Conflict("version_exists", _exists(name, present, spec))
    check_spec(spec)
    return [ModelVersionAdded(name, spec, now)]


def _retire(model: Model, name: str, version: str, now: float) -> list[Event]:
    _require_version(model, version)
    check_unused(model, name, version)
    return [] if version in model.retired else [ModelVersionRetired(name, version, now)]


def _scale(model: Model, command: ScaleVersion) -> list[Event]:
    spec = _require_live(model, command.version)
    check_replicas(command.min_replicas, command.max_replicas)
    if (spec.min_replicas, spec.max_replicas) == (command.min_replicas, command.max_replicas):
        return []
    return [
        ModelVersionScaled(
            command.name, command.version, command.min_replicas, command.max_replicas, command.now
        )
    ]


def _change_access(model: Model, name: str, access: Access, now: float) -> list[Event]:
    unknown = sorted(set(access.roles) - set(ROLES))
    if unknown:
        raise Invalid("invalid_role", f"roles are some of {', '.join(ROLES)}.", "roles")
    return [] if model.access == access else [ModelAccessChanged(name, access, now)]


def _require_version(model: Model, version: str) -> VersionSpec:
    spec = model.versions.get(version)
    if spec is None:
        raise NotFound("version", version)
    return spec


def _require_live(model: Model, version: str) -> VersionSpec:
    spec = _require_version(model, version)
    if version in model.retired:
        raise Conflict("version_retired", f"Version '{version}' is retired.")
    return spec


DECIDER = Decider("model", Model(), decide, evolve)
