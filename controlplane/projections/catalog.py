"""Models, their versions and aliases. How a version stands in the fleet: see ``standing``."""

from operator import attrgetter
from typing import ClassVar

from msgspec.structs import asdict, replace

from controlplane.domain import model as domain
from controlplane.domain.ids import version_id
from controlplane.domain.model import Access
from controlplane.domain.money import FREE, Price
from controlplane.domain.version_spec import Colocation, Needs, VersionSpec
from controlplane.projections.base import Projection, Recorded, Row, Rows

NOT_PLANNED = "No plan has been made for it yet."


class Model(Row, frozen=True):
    """``default_version`` is what a bare model name means now: the chosen one, else the oldest
    that is not retired, else None."""

    name: str
    created_at: float
    version: int
    default_version: str | None = None
    chosen_default: str = ""
    aliases: tuple[str, ...] = ()
    access: Access = domain.OPEN_ACCESS


class Version(Row, frozen=True, kw_only=True):
    """The fields of ``VersionSpec``, what it costs now, and the version's standing.
    ``added_at_position`` orders."""

    indexed: ClassVar = ("model",)

    version_id: str
    model: str
    version: str
    source: str
    format: str
    sha256: str
    gpu_memory: int
    tensor_parallel: int
    max_batch: int
    max_prompt_tokens: int
    max_output_tokens: int
    quantization: str
    kv_cache_dtype: str
    priority: str
    min_replicas: int
    max_replicas: int
    policy: str
    colocation: Colocation
    draft_model: str
    speculation: str
    swap_bytes: int | None
    disaggregation: str
    guaranteed_percent: int
    needs: Needs
    residency: str
    engine: str
    task: str
    max_inputs: int
    created_at: float
    added_at_position: int
    price: Price = FREE
    retired: bool = False
    status: str = "unplaced"
    ready_replicas: int = 0
    desired_replicas: int = 0
    reason: str = NOT_PLANNED
    stuck_replicas: int = 0
    retry_at: float | None = None

    @property
    def spec(self) -> VersionSpec:
        return VersionSpec(**{name: getattr(self, name) for name in VersionSpec.__struct_fields__})


class Alias(Row, frozen=True):
    """A second name of a model. A name means one model: the one it was given to last."""

    indexed: ClassVar = ("model",)

    alias: str
    model: str
    created_at: float


def _registered(rows: Rows, event: domain.ModelRegistered, recorded: Recorded) -> None:
    rows.put(Model(event.name, event.at, recorded.version))


def _change(rows: Rows, name: str, recorded: Recorded, **fields: object) -> None:
    """Change the model's row, and say again what its bare name means."""
    model = rows.get(Model, name)
    if model is not None:
        model = replace(model, version=recorded.version, **fields)
        default = _default_version(rows, model)
        if default != model.default_version:
            model = replace(model, default_version=default)
        rows.put(model)


_added = attrgetter("added_at_position")


def _default_version(rows: Rows, model: Model) -> str | None:
    live = [row for row in rows.find(Version, "model", model.name) if not row.retired]
    if model.chosen_default in [row.version for row in live]:
        return model.chosen_default
    return min(live, key=_added).version if live else None


def _version_added(rows: Rows, event: domain.ModelVersionAdded, recorded: Recorded) -> None:
    row = Version(
        version_id=version_id(event.name, event.spec.version),
        model=event.name,
        created_at=event.at,
        added_at_position=recorded.position,
        **asdict(event.spec),
    )
    rows.put(row)
    _change(rows, event.name, recorded)


def _change_version(rows: Rows, name: str, version: str, **fields: object) -> None:
    row = rows.get(Version, version_id(name, version))
    if row is not None:
        rows.put(replace(row, **fields))


def _scaled(rows: Rows, event: domain.ModelVersionScaled, recorded: Recorded) -> None:
    low, high = event.min_replicas, event.max_replicas
    _change_version(rows, event.name, event.version, min_replicas=low, max_replicas=high)
    _change(rows, event.name, recorded)


def _retired(rows: Rows, event: domain.ModelVersionRetired, recorded: Recorded) -> None:
    _change_version(rows, event.name, event.version, retired=True)
    _change(rows, event.name, recorded)


def _default_set(rows: Rows, event: domain.ModelDefaultVersionSet, recorded: Recorded) -> None:
    _change(rows, event.name, recorded, chosen_default=event.version)


def _alias_added(rows: Rows, event: domain.ModelAliasAdded, recorded: Recorded) -> None:
    rows.put(Alias(event.alias, event.name, event.at))
    model = rows.get(Model, event.name)
    if model is not None:
        aliases = tuple(sorted({*model.aliases, event.alias}))
        _change(rows, event.name, recorded, aliases=aliases)


def _alias_removed(rows: Rows, event: domain.ModelAliasRemoved, recorded: Recorded) -> None:
    alias = rows.get(Alias, event.alias)
    if alias is not None and alias.model == event.name:
        rows.delete(Alias, event.alias)
    model = rows.get(Model, event.name)
    if model is not None:
        aliases = tuple(name for name in model.aliases if name != event.alias)
        _change(rows, event.name, recorded, aliases=aliases)


def _access_changed(rows: Rows, event: domain.ModelAccessChanged, recorded: Recorded) -> None:
    _change(rows, event.name, recorded, access=event.access)


def _price_set(rows: Rows, event: domain.ModelPriceSet, recorded: Recorded) -> None:
    _change_version(rows, event.name, event.version, price=event.price)
    _change(rows, event.name, recorded)


PROJECTION = Projection(
    "catalog",
    9,
    (Model, Version, Alias),
    {
        domain.ModelRegistered: _registered,
        domain.ModelVersionAdded: _version_added,
        domain.ModelVersionScaled: _scaled,
        domain.ModelVersionRetired: _retired,
        domain.ModelDefaultVersionSet: _default_set,
        domain.ModelAliasAdded: _alias_added,
        domain.ModelAliasRemoved: _alias_removed,
        domain.ModelAccessChanged: _access_changed,
        domain.ModelPriceSet: _price_set,
    },
)
