"""From a bearer token to a principal, for REST and the live websocket.

A key's secret is recognised by its hash; whether the key is good is asked of its tenant's own
stream, as the log has it now. So what was revoked, suspended or rotated anywhere is over here with
its event, with no copy that could be behind.
"""

import time

from django.conf import settings

from controlplane import bootstrap
from controlplane.adapters.access import keys, tokens
from controlplane.adapters.access.jwt_tokens import BadToken
from controlplane.domain import tenant
from controlplane.domain.api_key import why_not
from controlplane.domain.policy import Principal
from controlplane.entrypoints.rest.problems import Problem


def principal_of_token(token: str) -> Principal:
    """Of an API key or a JWT. Raises Problem 401 ``invalid_token`` or ``token_expired``, 403
    ``tenant_suspended`` or ``no_org``."""
    if token.startswith(tokens.KEY_PREFIX):
        return _of_key(token, time.time())
    return _of_jwt(token, time.time())


def _of_key(text: str, now: float) -> Principal:
    stored = keys.match(text)
    if stored is None:
        raise invalid_token()
    owner = tenant_state(stored.tenant_id)
    key = owner.keys.live.get(stored.key_id)
    if key is None or why_not(key, stored.secret_id, now):
        raise invalid_token()
    reach = _reach(stored.tenant_id, owner)
    keys.note_use(stored, now)
    return Principal(f"key:{stored.key_id}", key.role, reach, key.scopes)


def _of_jwt(token: str, now: float) -> Principal:
    try:
        claims = bootstrap.jwt_verifier().verify(token, now)
    except BadToken as error:
        raise _refused(error.code, error.message) from None
    owner = tenant_state(claims.owner)
    if not owner.exists or owner.deleted:
        raise _refused("no_org", "The token belongs to no tenant of this installation.")
    reach = _reach(claims.owner, owner)
    return Principal(f"jwt:{claims.owner}:{claims.subject}", claims.role, reach, claims.scopes)


def tenant_state(tenant_id: str) -> tenant.Tenant:
    """As the log has it now."""
    stream = tenant.DECIDER.stream(tenant_id)
    state: tenant.Tenant = bootstrap.command_handler().state(tenant.DECIDER, stream)[1]
    return state


def _reach(tenant_id: str, owner: tenant.Tenant) -> str:
    """What the principal is confined to: its tenant, unless that is the operators' own. A
    suspended tenant's tokens open nothing, its own records included; the operators' is resumed by
    whoever logs in to the dashboard."""
    if not owner.exists or owner.deleted:
        raise invalid_token()
    if owner.suspended:
        raise Problem(403, "tenant_suspended", f"Tenant '{tenant_id}' is suspended.")
    return "" if tenant_id == settings.OPERATOR_TENANT else tenant_id


def invalid_token() -> Problem:
    return _refused("invalid_token", "The token is not valid.")


def _refused(code: str, detail: str) -> Problem:
    if code == "no_org":
        return Problem(403, code, detail)
    return Problem(401, code, detail, {"WWW-Authenticate": 'Bearer realm="engine"'})
