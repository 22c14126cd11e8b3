"""Why a request's attempts went where they went, as data, in sentences, and made again."""

from typing import Any

import msgspec
from django.conf import settings

from controlplane.adapters.ledger import dispatches
from controlplane.dispatch.choose import Scored
from controlplane.dispatch.record import FORMULA, Dispatch, is_sampled, recompute
from controlplane.dispatch.told import sentences
from controlplane.entrypoints.rest import ledger_reading

Json = dict[str, Any]


def dispatch(request_id: str, tenant_id: str | None, as_of: str | None) -> Json:
    """``tenant_id``: the only tenant whose requests exist for who asks, and then without what other
    replicas did, which is other tenants' load; None for all. Raises NotFound."""
    request = ledger_reading.inference_request(request_id, tenant_id, as_of)
    share = settings.ENV.dispatch_explained
    found = [] if request["position"] is None else dispatches.dispatches_at(request["position"])
    return {
        "request_id": request_id,
        "outcome": request["outcome"],
        "share": share,
        "is_sampled": is_sampled(request_id, share),
        "is_whole": tenant_id is None,
        "dispatches": [_json(one, tenant_id is None) for one in found],
    }


def _json(one: Dispatch, is_whole: bool) -> Json:
    outcome, differences = one.outcome, recompute(one)
    winner = outcome.replica_id
    candidates = [each for each in outcome.candidates if is_whole or each.replica_id == winner]
    replicas = [each for each in one.replicas if is_whole or each.replica_id == winner]
    return {
        "choice": one.choice,
        "attempt": one.attempt,
        "at": one.at,
        "why": one.why,
        "position": one.position,
        "formula": one.formula,
        "replica_id": outcome.replica_id,
        "node_id": outcome.node_id,
        "weights": _plain(one.weights),
        "request": _plain(one.request),
        "num_replicas": len(one.replicas),
        "replicas": [_plain(each) for each in replicas],
        "num_candidates": len(outcome.candidates),
        "candidates": [_candidate(each) for each in candidates],
        "num_rejected": len(outcome.rejected),
        "rejected": [_plain(each) for each in outcome.rejected] if is_whole else [],
        "sentences": sentences(one, is_whole),
        "recomputed": {
            "equal": not differences,
            "comparable": one.formula == FORMULA,
            "differences": [msgspec.structs.asdict(each) for each in differences],
        },
    }


def _candidate(one: Scored) -> Json:
    return {
        "replica_id": one.replica_id,
        "node_id": one.node_id,
        "cost": one.cost,
        "health": one.health,
        "terms": one.terms,
    }


def _plain(one: msgspec.Struct) -> Json:
    """With every field, also those that have their defaults."""
    return dict(msgspec.to_builtins(msgspec.structs.asdict(one)))
