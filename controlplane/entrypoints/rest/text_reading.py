"""The captured text of one request, for who may read it; every reading is an event."""

from typing import Any

import msgspec

from controlplane.adapters.access import text_keys
from controlplane.adapters.ledger import texts
from controlplane.application.capture import Unreadable, decrypt
from controlplane.application.ports import EventMeta
from controlplane.domain.errors import NotFound
from controlplane.entrypoints.rest import auditing
from controlplane.entrypoints.rest.problems import Problem


def text(request_id: str, tenant_id: str | None, meta: EventMeta) -> dict[str, Any]:
    """Of another tenant's request as of none: NotFound. Raises Problem ``text_erased`` too."""
    stored = texts.find(request_id, tenant_id)
    if stored is None:
        raise NotFound("text", request_id)
    key = text_keys.existing_key(stored.tenant_id, stored.text.generation)
    if key is None:
        raise Problem(410, "text_erased", "This text was erased: its key is destroyed.")
    auditing.text_read(meta, stored.tenant_id, request_id)
    try:
        found = decrypt(key, stored.tenant_id, request_id, stored.text)
    except Unreadable as error:
        raise Problem(409, "text_damaged", "This text is not the one that was captured.") from error
    prompt = [{"role": role, "text": said} for role, said in found.prompt]
    return {
        "request_id": request_id,
        "tenant_id": stored.tenant_id,
        **msgspec.to_builtins(found),
        "prompt": prompt,
    }
