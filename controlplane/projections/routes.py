"""Routes: public names with weighted arms."""

from msgspec.structs import replace

from controlplane.domain import route as domain
from controlplane.domain.route import Arm
from controlplane.projections.base import Projection, Recorded, Row, Rows


class Route(Row, frozen=True):
    name: str
    arms: tuple[Arm, ...]
    sticky: bool
    created_at: float
    updated_at: float
    version: int


def _created(rows: Rows, event: domain.RouteCreated, recorded: Recorded) -> None:
    version = recorded.version
    rows.put(Route(event.name, event.arms, event.sticky, event.at, event.at, version))


def _changed(rows: Rows, event: domain.RouteArmsChanged, recorded: Recorded) -> None:
    route = rows.get(Route, event.name)
    if route is not None:
        rows.put(
            replace(
                route,
                arms=event.arms,
                sticky=event.sticky,
                updated_at=event.at,
                version=recorded.version,
            )
        )


def _deleted(rows: Rows, event: domain.RouteDeleted, recorded: Recorded) -> None:
    rows.delete(Route, event.name)


PROJECTION = Projection(
    "routes",
    1,
    (Route,),
    {
        domain.RouteCreated: _created,
        domain.RouteArmsChanged: _changed,
        domain.RouteDeleted: _deleted,
    },
)
