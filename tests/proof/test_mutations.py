"""Whatever is done to a sealed store, or to an export of it, is found, and the row is named."""

from collections import Counter
from pathlib import Path

from tests.proof.mutations import Campaign

RUNS = 150


def test_random_damage_is_found_and_named(database: Path, tmp_path: Path) -> None:
    """150 of them here; ``python -m tests.proof.mutations --runs 1000`` does more."""
    campaign = Campaign(tmp_path, database)
    kinds = Counter(campaign.run(number, seed=20)[1].kind for number in range(RUNS))
    expected = {"edit", "delete", "swap", "insert", "duplicate", "truncate", "bit flip"}
    assert expected <= kinds.keys() and sum(kinds.values()) == RUNS
