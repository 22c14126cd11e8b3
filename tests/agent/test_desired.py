"""Which decisions a node accepts, and how long it may act on them."""

import random
from pathlib import Path

import pytest

from gpuagent.agent.desired import DesiredKeeper, Lease, Mark, StaleDecision
from gpuagent.wire.messages import DesiredState
from tests.agent.harness import spec


def desired(epoch: int, generation: int, cluster: str = "c", node: str = "n1") -> DesiredState:
    replicas = (spec(f"m.1.g{generation}.0"),)
    return DesiredState(
        cluster_id=cluster, epoch=epoch, generation=generation, node_id=node, replicas=replicas
    )


def test_newer_is_accepted_older_is_not(tmp_path: Path) -> None:
    keeper = DesiredKeeper("n1", tmp_path)
    assert keeper.offer(desired(1, 5))
    assert not keeper.offer(desired(1, 5)), "the same again changes nothing"
    for old in (desired(1, 4), desired(0, 99)):
        with pytest.raises(StaleDecision):
            keeper.offer(old)
    assert keeper.offer(desired(2, 5))
    assert keeper.mark == Mark("c", 2, 5)


def test_why_one_was_refused_is_kept_until_one_is_accepted(tmp_path: Path) -> None:
    """What the node reports of itself; nothing while all is well."""
    keeper = DesiredKeeper("n1", tmp_path)
    keeper.offer(desired(5, 40))
    assert keeper.refusal == ""
    for old, why in (
        (desired(2, 12), "(2, 12) is older than (5, 40)"),
        (desired(9, 9, cluster="other"), "cluster 'other' is not 'c'"),
    ):
        with pytest.raises(StaleDecision):
            keeper.offer(old)
        assert keeper.refusal == why
    keeper.offer(desired(6, 12))
    assert keeper.refusal == ""


def test_the_mark_outlives_the_process(tmp_path: Path) -> None:
    DesiredKeeper("n1", tmp_path).offer(desired(3, 7))
    again = DesiredKeeper("n1", tmp_path)
    assert again.state is None and again.mark == Mark("c", 3, 7)
    with pytest.raises(StaleDecision):
        again.offer(desired(3, 6))
    assert again.offer(desired(3, 7)), "what was applied before the restart is applied again"


def test_another_clusters_or_nodes_decision_is_refused(tmp_path: Path) -> None:
    keeper = DesiredKeeper("n1", tmp_path)
    keeper.offer(desired(1, 1))
    for foreign in (desired(9, 9, cluster="other"), desired(9, 9, node="n2")):
        with pytest.raises(StaleDecision):
            keeper.offer(foreign)


def test_nodes_that_share_a_folder_do_not_share_a_mark(tmp_path: Path) -> None:
    DesiredKeeper("n2", tmp_path).offer(desired(3, 9, node="n2"))
    assert DesiredKeeper("n1", tmp_path).offer(desired(3, 7))


def test_a_damaged_mark_stops_the_agent_rather_than_forget(tmp_path: Path) -> None:
    DesiredKeeper("n1", tmp_path).offer(desired(3, 7))
    (tmp_path / "desired-n1.json").write_bytes(b'{"epoch": ')
    with pytest.raises(ValueError):
        DesiredKeeper("n1", tmp_path)


def test_however_decisions_arrive_the_applied_order_only_grows(tmp_path: Path) -> None:
    """Shuffled, repeated and delayed decisions, with restarts in between."""
    rng = random.Random(7)
    keeper = DesiredKeeper("n1", tmp_path)
    offers = [desired(e, g) for e in range(1, 6) for g in range(1, 41)] * 3
    rng.shuffle(offers)
    applied: list[tuple[int, int]] = []
    for offer in offers:
        if rng.random() < 0.05:
            keeper = DesiredKeeper("n1", tmp_path)
        try:
            if keeper.offer(offer) and (offer.epoch, offer.generation) not in applied[-1:]:
                applied.append((offer.epoch, offer.generation))
        except StaleDecision:
            continue
    assert applied == sorted(set(applied))
    assert applied[-1] == (5, 40)


def test_a_lease_counts_from_the_question_and_ends_a_fifth_early() -> None:
    lease = Lease(15.0)
    assert not lease.is_valid(0.0)
    lease.renew(asked_at=100.0)
    assert lease.is_valid(111.9) and not lease.is_valid(112.0)
    lease.renew(asked_at=90.0)  # a late answer to an earlier question shortens nothing
    assert lease.is_valid(111.9)
