"""Whether the caller may hand out a key; asked by the key's own calls and by what undoes them."""

from rest_framework.request import Request

from controlplane.domain.errors import Forbidden
from controlplane.domain.policy import may_grant
from controlplane.entrypoints.rest.identity import tenant_state
from controlplane.entrypoints.rest.security import principal_in


def check_grant(request: Request, role: str, scopes: tuple[str, ...]) -> None:
    """Raise Forbidden if a key of this role and these scopes is above the caller."""
    if not may_grant(principal_in(request), role, scopes):
        raise Forbidden(
            "forbidden_scope",
            "Only an administrator issues keys with admin scopes or roles. A key with text:read is"
            " issued by an administrator who is logged in, or by a key that has text:read itself.",
        )


def check_regrant(request: Request, tenant_id: str, key_id: str) -> None:
    """A new secret of a key is the key: whoever may not issue it may not have one of it."""
    known = tenant_state(tenant_id).keys.live.get(key_id)
    if known is not None:
        check_grant(request, known.role, known.scopes)
