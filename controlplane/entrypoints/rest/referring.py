"""What an order refers to, and what refers to what it would take away.

An aggregate sees no other one, so this is looked at before the order is decided, in the read model
brought up to the head of the log. Two orders of one moment can still pass each other here (a
version is retired while a route takes it up); the gateway then passes over that arm.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controlplane import bootstrap
from controlplane.domain import model, route
from controlplane.domain.errors import Conflict, Invalid
from controlplane.domain.ids import version_id
from controlplane.domain.policy import Principal
from controlplane.entrypoints.rest import reading
from controlplane.entrypoints.rest.sources import DatabaseSource
from controlplane.projections.catalog import Alias, Model, Version
from controlplane.projections.routes import Route


@dataclass(frozen=True)
class Coming:
    """What the orders of one file make of the catalog together: the tasks of the versions that it
    adds, the versions that it retires, and the arms of the routes that it names."""

    tasks: Mapping[str, str] = field(default_factory=dict)
    retired: frozenset[str] = frozenset()
    arms: Mapping[str, tuple[route.Arm, ...]] = field(default_factory=dict)


NOTHING = Coming()


def check(command: Any) -> None:
    """Raise DomainError for an order by itself that takes a name, refers to a version or retires
    one, and may not."""
    require_free_name(command)
    match command:
        case route.CreateRoute(arms=arms) | route.ChangeArms(arms=arms):
            require_versions(arm.version_id for arm in arms)
        case model.RetireVersion(name=name):
            stream = model.DECIDER.stream(name)
            require_unrouted(command, bootstrap.command_handler().state(model.DECIDER, stream)[1])


# --- arms and their versions ------------------------------------------------------------------
def require_versions(version_ids: Iterable[str], coming: Coming = NOTHING) -> None:
    """Raise Invalid ``invalid_route`` for the first version that is unknown or retired, and for
    versions of which some generate and some embed: no request could go to either of them."""
    reading.wait_for(reading.head())  # a version that its caller has just added must be known
    by_task: dict[str, str] = {}
    for one in version_ids:
        by_task.setdefault(_task_of(one, coming), one)
    if len(by_task) > 1:
        does = " and ".join(f"{one} is to {task}" for task, one in by_task.items())
        raise Invalid("invalid_route", f"{does}; the arms of a route have one task.", "arms")


def _task_of(one: str, coming: Coming) -> str:
    """What a version that can be an arm is for."""
    row = DatabaseSource().get(Version, one)
    if row is None and one not in coming.tasks:
        raise Invalid("invalid_route", f"There is no version '{one}'.", "arms")
    if one in coming.retired or (row and row.retired):
        raise Invalid("invalid_route", f"{one} is retired.", "arms")
    return row.task if row else coming.tasks[one]


def require_unrouted(
    order: model.RetireVersion, state: model.Model | None = None, coming: Coming = NOTHING
) -> None:
    """Raise Conflict ``in_use`` if a route names the version; with the model's ``state`` its
    sentence says, too, if the version is the default."""
    reading.wait_for(reading.head())  # a route that its caller has just changed must be known
    known = {row.name: row.arms for row in DatabaseSource().select(Route)} | dict(coming.arms)
    wanted = version_id(order.name, order.version)
    routes = [name for name, arms in known.items() if any(arm.version_id == wanted for arm in arms)]
    if routes:
        model.check_unused(state or model.Model(), order.name, order.version, sorted(routes))


# --- what a key may ask for -------------------------------------------------------------------
def require_names(names: Sequence[str], reader: Principal) -> None:
    """Raise Invalid ``invalid_models`` for the first name that is no model, route or alias, or
    none that the reader's tenant may use: a key for it would open nothing."""
    if names:
        reading.wait_for(reading.head())  # what its caller has just made must be known
    for name in names:
        models = _models_behind(name)
        if any(_is_hidden(one, reader) for one in models):
            told = f"There is no model, route or alias '{name}'."
            raise Invalid("invalid_models", told, "models")


def _models_behind(name: str) -> set[str]:
    """The models that a name leads to; itself, if it is no route and no alias."""
    source = DatabaseSource()
    if found := source.get(Route, name):
        return {arm.version_id.partition("@")[0] for arm in found.arms}
    alias = source.get(Alias, name)
    return {alias.model} if alias else {name}


def _is_hidden(name: str, reader: Principal) -> bool:
    row = DatabaseSource().get(Model, name)
    return row is None or (reader.confined and not row.access.allows(reader.tenant_id))


# --- names ------------------------------------------------------------------------------------
def require_free_name(command: Any) -> None:
    """Raise Conflict ``name_taken`` if the name that ``command`` gives means something else to a
    client already: models, routes and aliases share one space, and none may shadow another."""
    match command:
        case model.AddAlias(name=owner, alias=name):
            _require_free(name, Model, Route, alias_of=owner, param="alias")
        case model.RegisterModel(name=name):
            _require_free(name, Route, param="name")
        case route.CreateRoute(name=name):
            _require_free(name, Model, param="name")


def _require_free(name: str, *kinds: type[Any], param: str, alias_of: str = "") -> None:
    reading.wait_for(reading.head())  # what its caller has just made must be known
    source = DatabaseSource()
    alias = source.get(Alias, name)
    if alias is not None and alias.model != alias_of:
        raise Conflict("name_taken", f"'{name}' is an alias of model '{alias.model}'.", param)
    for kind in kinds:
        if source.get(kind, name) is not None:
            raise Conflict("name_taken", f"'{name}' is a {kind.__name__.lower()} already.", param)
