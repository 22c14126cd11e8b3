"""The keys of captured text, on both databases: made once, wrapped, and destroyed for good."""

from typing import Any

import pytest

from controlplane.adapters.access import text_keys
from controlplane.adapters.access.models import TextKeyRow
from controlplane.adapters.access.text_keys import WrongSecret
from tests.contracts.stores import Stores


@pytest.fixture(autouse=True)
def tables(durable: Stores) -> None:
    TextKeyRow.objects.all().delete()


def test_a_key_is_made_once_and_is_another_for_each_tenant_and_generation() -> None:
    first = text_keys.key_of("acme", 0, 1.0)
    assert first is not None and text_keys.key_of("acme", 0, 2.0) == first
    others = [text_keys.key_of("acme", 1, 1.0), text_keys.key_of("other", 0, 1.0)]
    secrets = {one.secret for one in (first, *others) if one is not None}
    assert len(secrets) == 3 and all(len(one) == 32 for one in secrets)
    assert not any(bytes(row.wrapped).find(first.secret) >= 0 for row in TextKeyRow.objects.all())


def test_a_destroyed_key_is_not_made_again() -> None:
    for generation in (0, 1, 2):
        text_keys.key_of("acme", generation, 1.0)
    kept = text_keys.key_of("other", 0, 1.0)
    assert text_keys.destroy("acme", 1, 5.0) == 2
    assert text_keys.destroy("acme", 1, 6.0) == 0
    assert [text_keys.key_of("acme", one, 7.0) is None for one in (0, 1, 2)] == [True, True, False]
    assert text_keys.existing_key("other", 0) == kept
    assert text_keys.tenants_with_keys() == {"acme": 2, "other": 0}


def test_where_none_was_made_none_is_made_any_more() -> None:
    """A gateway that has not heard of the erasure yet finds no key, and keeps no text."""
    assert text_keys.destroy("acme", 0, 5.0) == 0
    assert text_keys.key_of("acme", 0, 6.0) is None


def test_a_key_moved_to_another_row_or_installation_opens_nothing(
    settings: Any,
) -> None:
    for name in ("acme", "other"):
        text_keys.key_of(name, 0, 1.0)
    foreign = TextKeyRow.objects.get(tenant_id="other").wrapped
    own = TextKeyRow.objects.filter(tenant_id="acme")
    before = own.get().wrapped
    own.update(wrapped=foreign)
    with pytest.raises(WrongSecret):
        text_keys.existing_key("acme", 0)
    own.update(wrapped=before)
    assert text_keys.existing_key("acme", 0) is not None
    settings.SECRET_KEY = "another"
    with pytest.raises(WrongSecret):
        text_keys.existing_key("acme", 0)
