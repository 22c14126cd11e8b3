"""A name becomes exactly one version, the same user stays on one arm, and nothing is swapped."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.dispatch.refusals import ModelNotFound, NoAccess
from controlplane.dispatch.resolve import Caller, Catalog, choose_arm, resolve, visible_names
from controlplane.domain.model import (
    Access,
    ModelAccessChanged,
    ModelAliasAdded,
    ModelAliasRemoved,
    ModelDefaultVersionSet,
    ModelRegistered,
    ModelVersionAdded,
    ModelVersionRetired,
)
from controlplane.domain.route import Arm, RouteCreated, RouteDeleted
from controlplane.domain.version_spec import VersionSpec

SPEC = VersionSpec(version="v1", source="simulated://m", gpu_memory=1)
SPEC2 = VersionSpec(version="v2", source="simulated://m", gpu_memory=1)


def catalog(*extra: object) -> Catalog:
    made = Catalog()
    for event in (
        ModelRegistered("m", 0.0),
        ModelVersionAdded("m", SPEC, 0.0),
        ModelVersionAdded("m", SPEC2, 0.0),
        ModelAliasAdded("m", "chat", 0.0),
        *extra,
    ):
        made.apply(event)  # type: ignore[arg-type]
    return made


def of(tenant: str, role: str = "developer", *models: str) -> Caller:
    return Caller(tenant, role, models)


def version(made: Catalog, name: str, user: str | None = "ann", tenant: str = "acme") -> str:
    return str(resolve(made, name, of(tenant), user, "req-1").version_id)


def test_a_bare_name_means_the_default_version() -> None:
    assert version(catalog(), "m") == "m@v1"
    assert version(catalog(ModelDefaultVersionSet("m", "v2", 0.0)), "m") == "m@v2"
    assert version(catalog(ModelVersionRetired("m", "v1", 0.0)), "m") == "m@v2"


def test_a_pin_means_that_version_whatever_the_default_is() -> None:
    assert version(catalog(), "m@v1") == "m@v1"


def test_an_alias_means_its_model_until_it_is_removed() -> None:
    assert version(catalog(), "chat") == "m@v1"
    with pytest.raises(ModelNotFound):
        version(catalog(ModelAliasRemoved("m", "chat", 0.0)), "chat")


def test_an_alias_goes_through_the_route_of_its_model() -> None:
    """Alias, route, arm, version: the route of the model's name decides."""
    made = catalog(RouteCreated("m", (Arm("old", "m@v1", 1.0),), True, 0.0))
    found = resolve(made, "chat", of("acme"), "ann")
    assert (found.route, found.arm, found.version_id) == ("m", "old", "m@v1")
    made.apply(RouteDeleted("m", 0.0))
    assert version(made, "chat") == "m@v1"


@pytest.mark.parametrize("name", ["", "x", "m@", "m@v9", "@v1", "@", "x@v1", "m@v1@v2", "M"])
def test_what_is_not_there_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound):
        version(catalog(), name)


def test_a_retired_version_is_not_found_even_pinned() -> None:
    with pytest.raises(ModelNotFound):
        version(catalog(ModelVersionRetired("m", "v1", 0.0)), "m@v1")


def test_no_access_reads_exactly_like_absence() -> None:
    """A stranger cannot tell a model that exists from one that does not."""
    private = catalog(ModelAccessChanged("m", Access(False, ("acme",)), 0.0))
    assert version(private, "m") == "m@v1"
    with pytest.raises(NoAccess) as hidden:
        version(private, "m", tenant="other")
    with pytest.raises(ModelNotFound) as absent:
        version(catalog(), "n", tenant="other")
    assert hidden.value.message == absent.value.message.replace("'n'", "'m'")
    assert visible_names(private, of("acme")) == ["chat", "m"]
    assert visible_names(private, of("other")) == []


def test_a_model_for_some_roles_is_absent_for_the_others() -> None:
    """Public or not, the listed roles narrow it; a role alone opens no other tenant's model."""
    for access in (Access(True, (), ("operator",)), Access(False, ("acme",), ("operator",))):
        made = catalog(ModelAccessChanged("m", access, 0.0))
        assert visible_names(made, of("acme", "operator")) == ["chat", "m"]
        assert visible_names(made, of("acme", "developer")) == []
    assert visible_names(made, of("other", "operator")) == []


def test_a_key_for_some_models_asks_for_no_others() -> None:
    """By the name it was given: a model's, which allows its routes and aliases, or a route's."""
    made = catalog(
        ModelRegistered("n", 0.0),
        ModelVersionAdded("n", SPEC, 0.0),
        RouteCreated("r", (Arm("a", "m@v1", 1.0),), True, 0.0),
    )
    assert visible_names(made, of("acme", "developer", "m")) == ["chat", "m", "r"]
    assert visible_names(made, of("acme", "developer", "r")) == ["r"]
    with pytest.raises(NoAccess):
        resolve(made, "m@v1", of("acme", "developer", "r", "n"), None)


def test_a_user_stays_on_one_arm_and_requests_without_one_spread() -> None:
    arms = (Arm("a", "m@v1", 1.0), Arm("b", "m@v2", 1.0))
    made = catalog(RouteCreated("r", arms, True, 0.0))
    assert len({resolve(made, "r", of("t"), "ann", f"q{n}").arm for n in range(50)}) == 1
    assert {resolve(made, "r", of("t"), None, f"q{n}").arm for n in range(50)} == {"a", "b"}
    loose = catalog(RouteCreated("r", arms, False, 0.0))
    assert {resolve(loose, "r", of("t"), "ann", f"q{n}").arm for n in range(50)} == {"a", "b"}


def test_shares_follow_the_weights() -> None:
    """1 : 3 : 6 over 20,000 users, each within one percentage point."""
    arms = (Arm("a", "m@v1", 1.0), Arm("b", "m@v1", 3.0), Arm("c", "m@v1", 6.0))
    seen = Counter(choose_arm("r", arms, f"user-{n}").name for n in range(20_000))
    assert [seen[name] / 20_000 for name in "abc"] == pytest.approx([0.1, 0.3, 0.6], abs=0.01)


def test_a_change_of_weight_moves_only_the_share_it_must() -> None:
    """50:50 -> 40:60 moves a tenth of the users, all of them from a to b."""
    before = (Arm("a", "m@v1", 50.0), Arm("b", "m@v1", 50.0))
    after = (Arm("a", "m@v1", 50.0), Arm("b", "m@v1", 75.0))
    users = [f"user-{n}" for n in range(20_000)]
    moves = Counter(
        (choose_arm("r", before, user).name, choose_arm("r", after, user).name) for user in users
    )
    assert moves["b", "a"] == 0
    assert moves["a", "b"] / len(users) == pytest.approx(0.1, abs=0.01)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=6),
    changed=st.integers(0, 5),
    new=st.floats(0, 100),
)
def test_users_move_only_to_or_from_the_changed_arm(
    weights: list[float], changed: int, new: float
) -> None:
    index = changed % len(weights)
    before = tuple(Arm(f"a{i}", "m@v1", w) for i, w in enumerate(weights))
    after = tuple(Arm(f"a{i}", "m@v1", new if i == index else w) for i, w in enumerate(weights))
    for user in range(100):
        old, now = (choose_arm("r", arms, str(user)).name for arms in (before, after))
        assert old == now or f"a{index}" in (old, now)
        if new <= weights[index]:
            assert now == old or old == f"a{index}"


def test_an_arm_whose_version_is_retired_is_passed_over() -> None:
    """Its users go to the others, who stay; without any arm left the route is not found."""
    arms = (Arm("a", "m@v1", 1.0), Arm("b", "m@v2", 1.0))  # type: ignore[arg-type]
    before = catalog(RouteCreated("r", arms, True, 0.0))
    after = catalog(RouteCreated("r", arms, True, 0.0), ModelVersionRetired("m", "v2", 1.0))
    users = [f"user-{n}" for n in range(50)]
    assert {version(before, "r", user) for user in users} == {"m@v1", "m@v2"}
    assert {version(after, "r", user) for user in users} == {"m@v1"}
    assert "r" in visible_names(after, of("acme"))
    after.apply(ModelVersionRetired("m", "v1", 2.0))
    with pytest.raises(ModelNotFound):
        version(after, "r")


def test_an_arm_of_weight_zero_gets_nobody() -> None:
    arms = (Arm("a", "m@v1", 0.0), Arm("b", "m@v1", 1.0))
    assert {choose_arm("r", arms, str(n)).name for n in range(200)} == {"b"}
