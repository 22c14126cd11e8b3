"""From the name a client asked for to one exact version: alias -> route -> arm -> version.

Precedence of a name: an exact pin ``name@version``; a route; a model (its default version); an
alias, which stands for its model's name, so a route of that name applies to it too. Never is one
model given for another: what cannot be served is refused by name.

Arms are chosen by **weighted rendezvous hashing**. Each arm draws ``u`` in (0, 1) from a hash of
(route, arm, user) and scores ``-weight / ln(u)``; the highest score wins, which gives arm i with
probability ``w_i / sum(w)``. (Wang & Ravishankar 1998 for the hashing; the weighting by
exponential variables is Efraimidis & Spirakis 2006.) Worked example, weights a = 1, b = 1::

    user ann: u_a = 0.60 -> 1.96, u_b = 0.20 -> 0.62      ann gets a
    b's weight is raised to 2: b scores 1.24, ann stays    at 4: b scores 2.49, ann moves to b

An arm's scores depend on its own weight alone, so a change of one weight moves users only to or
from that arm: exactly the share that must move. An arm whose version is retired is passed over in
the same way; one whose version is not loaded is not, or the shares of an experiment would depend on
who loads faster. Rejected: a hash ring (needs hundreds of points per arm for even shares) and
``hash(user) % 100 < pct`` (with three arms or more, a change of one weight shifts the borders
between the others).
"""

import hashlib
from dataclasses import dataclass, field
from math import log

import msgspec

from controlplane.dispatch.refusals import ModelNotFound, NoAccess
from controlplane.domain import model, route
from controlplane.domain.decider import Event
from controlplane.domain.ids import VersionId, version_id
from controlplane.domain.model import Model, ModelAliasAdded, ModelAliasRemoved
from controlplane.domain.money import Price
from controlplane.domain.route import Arm, Route
from controlplane.domain.version_spec import VersionSpec


@dataclass
class Catalog:
    """Models, routes and aliases as folded from the log; ``apply`` is its evolve, in place."""

    models: dict[str, Model] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)  # alias -> models, oldest first

    def apply(self, event: Event) -> None:
        """Take in one event of any kind; other aggregates' events change nothing."""
        if isinstance(event, model.ModelEvent):
            name = event.name
            self.models[name] = model.evolve(self.models.get(name, Model()), event)
            self._apply_alias(event)
        elif isinstance(event, route.RouteEvent):
            self.routes[event.name] = route.evolve(self.routes.get(event.name, Route()), event)

    def _apply_alias(self, event: Event) -> None:
        if isinstance(event, ModelAliasAdded):
            self.aliases.setdefault(event.alias, []).append(event.name)
        elif isinstance(event, ModelAliasRemoved):
            names = self.aliases.get(event.alias, [])
            self.aliases[event.alias] = [name for name in names if name != event.name]

    def spec(self, wanted: VersionId) -> VersionSpec | None:
        """The specification of a version, retired or not."""
        name, _, version = wanted.partition("@")
        known = self.models.get(name)
        return known.versions.get(version) if known else None

    def is_live(self, wanted: str) -> bool:
        """Whether it can be asked for: there is such a version, and it is not retired."""
        name, _, version = wanted.partition("@")
        known = self.models.get(name)
        return known is not None and version in known.versions and version not in known.retired

    def price(self, wanted: VersionId) -> Price:
        """What a request admitted now for this version costs."""
        name, _, version = wanted.partition("@")
        return model.price_of(self.models.get(name, Model()), version)


class Caller(msgspec.Struct, frozen=True):
    """Who asks. ``models``: the names that this caller's key may ask for, empty for all."""

    tenant_id: str
    role: str
    models: tuple[str, ...] = ()

    def may_ask_for(self, requested: str, model_name: str) -> bool:
        """By the name asked for (of a route, an alias, a model) or by the model that answers."""
        name = requested.partition("@")[0]
        return not self.models or name in self.models or model_name in self.models


class Resolved(msgspec.Struct, frozen=True):
    """``route`` and ``arm`` are empty unless a route decided."""

    requested: str
    route: str
    arm: str
    model: str
    version_id: VersionId
    spec: VersionSpec


def resolve(
    catalog: Catalog, requested: str, caller: Caller, user: str | None, request_id: str = ""
) -> Resolved:
    """The version that answers. ``user`` None, or a route that is not sticky, draws per request.

    Raises ModelNotFound, NoAccess.
    """
    name, pinned, version = requested.partition("@")
    if pinned:
        return _of_version(catalog, requested, name, version, caller)
    if not _is_route(catalog, name) and not _is_model(catalog, name):
        name = _alias_target(catalog, name)
    if _is_route(catalog, name):
        return _by_route(catalog, requested, name, caller, user, request_id)
    chosen = model.default_version(catalog.models[name]) if name in catalog.models else None
    if chosen is None:
        raise not_found(requested)
    return _of_version(catalog, requested, name, chosen, caller)


def choose_arm(route_name: str, arms: tuple[Arm, ...], key: str) -> Arm:
    """The arm of ``key``; arms of weight 0 are never chosen (the domain ensures one above 0)."""
    live = [arm for arm in arms if arm.weight > 0]
    return max(live, key=lambda arm: (_score(route_name, arm, key), arm.name))


def visible_names(catalog: Catalog, caller: Caller) -> list[str]:
    """Every model, route and alias the caller may ask for, sorted, for ``/v1/models``."""
    candidates = {*catalog.models, *catalog.routes, *catalog.aliases}
    return sorted(name for name in candidates if _may_see(catalog, name, caller))


def _may_see(catalog: Catalog, name: str, caller: Caller) -> bool:
    try:
        resolve(catalog, name, caller, None, name)
    except ModelNotFound:
        return False
    return True


def _score(route_name: str, arm: Arm, key: str) -> float:
    digest = hashlib.blake2b(f"{route_name}\0{arm.name}\0{key}".encode(), digest_size=8).digest()
    uniform = ((int.from_bytes(digest) >> 11) + 0.5) / 2**53  # strictly between 0 and 1
    return -arm.weight / log(uniform)


def _is_route(catalog: Catalog, name: str) -> bool:
    return name in catalog.routes and catalog.routes[name].exists


def _is_model(catalog: Catalog, name: str) -> bool:
    return name in catalog.models and catalog.models[name].exists


def _alias_target(catalog: Catalog, name: str) -> str:
    """The model an alias stands for; of two models with one alias, that which had it first."""
    targets = catalog.aliases.get(name)
    return targets[0] if targets else name


def _by_route(
    catalog: Catalog, requested: str, name: str, caller: Caller, user: str | None, request_id: str
) -> Resolved:
    route_state = catalog.routes[name]
    key = user if user and route_state.sticky else request_id
    arms = tuple(one for one in route_state.arms if one.weight and catalog.is_live(one.version_id))
    if not arms:
        raise not_found(requested)
    arm = choose_arm(name, arms, key)
    model_name, _, version = arm.version_id.partition("@")
    found = _of_version(catalog, requested, model_name, version, caller)
    return Resolved(requested, name, arm.name, found.model, found.version_id, found.spec)


def _of_version(
    catalog: Catalog, requested: str, name: str, version: str, caller: Caller
) -> Resolved:
    known = catalog.models.get(name)
    spec = known.versions.get(version) if known else None
    if known is None or spec is None or version in known.retired:
        raise not_found(requested)
    permitted = known.access.allows(caller.tenant_id, caller.role)
    if not (permitted and caller.may_ask_for(requested, name)):
        raise NoAccess(not_found(requested).message)
    return Resolved(requested, "", "", name, version_id(name, version), spec)


def not_found(requested: str) -> ModelNotFound:
    """In the same words for a foreign model, an absent one and a retired one."""
    return ModelNotFound(f"The model '{requested}' does not exist or you do not have access to it.")
