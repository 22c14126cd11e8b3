"""Who may do what: one table, asked by REST, gateway, websockets and commands alike.

A **principal** is somebody authenticated, by a session, an API key or a signed token; how makes no
difference here. Three things bound it, and all three must agree:

=======  =======================================================================================
role     what the person or program may do in general: a column of the table
scopes   what this credential is for: an API key's, narrower than its role; a session has all
reach    the whole fleet, or one tenant (then also the table's last column); whose rows are seen
         is then a matter of filtering, and a foreign row looks like an absent one
=======  =======================================================================================

So a key of tenant ``acme`` with role ``admin`` and scope ``admin:write`` may issue keys for
``acme``, but neither raise its own budget nor drain a node; keys of the operators' tenant
(``ENGINE_OPERATOR_TENANT``) reach the whole fleet. What the table does not name is denied::

    key = Principal("key:1", "admin", "acme", ("inference",))
    allowed(key, USE, "model")  # True
    allowed(key, READ, "request")  # False: that is what admin:read is for

Captured text has a scope of its own, ``text:read``: an administrator's key reads it only if it was
issued with that.

**use** is to run inference with a model; which models is said by each model's own access policy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

READ, WRITE, USE = "read", "write", "use"
ACTIONS = (READ, WRITE, USE)
ROLES = ("admin", "operator", "auditor", "developer", "viewer")
GENERAL_SCOPES = ("inference", "admin:read", "admin:write")
READ_TEXT = "text:read"  # no other scope opens captured text, and no token has it unasked
ALL_SCOPES = (*GENERAL_SCOPES, READ_TEXT)

# Letters are the actions' first ones: read, write, use. The last column is what may be done within
# one tenant at most, by whoever is confined to it.
_TABLE: dict[str, tuple[str, str, str, str, str, str]] = {
    #             admin  operator auditor developer viewer  in a tenant
    "status":    ("r",   "r",     "r",    "r",      "r",    "r"),
    "model":     ("rwu", "rwu",   "r",    "ru",     "r",    "ru"),
    "route":     ("rw",  "rw",    "r",    "r",      "r",    "r"),
    "catalog":   ("rw",  "rw",    "r",    "r",      "",     ""),
    "node":      ("rw",  "rw",    "r",    "r",      "r",    ""),
    "placement": ("rw",  "r",     "r",    "r",      "r",    ""),
    "decision":  ("r",   "r",     "r",    "r",      "r",    ""),
    "tenant":    ("rw",  "r",     "r",    "r",      "r",    "r"),
    "budget":    ("rw",  "r",     "r",    "r",      "",     "r"),
    "key":       ("rw",  "r",     "r",    "rw",     "",     "rw"),
    "ticket":    ("w",   "w",     "",     "w",      "",     "w"),
    "user":      ("rw",  "r",     "r",    "",       "",     ""),
    "event":     ("r",   "r",     "r",    "r",      "r",    "r"),
    "audit":     ("r",   "r",     "r",    "",       "",     "r"),
    "request":   ("r",   "r",     "r",    "r",      "",     "r"),
    "usage":     ("r",   "r",     "r",    "r",      "",     "r"),
    "text":      ("rw",  "",      "",     "",       "",     "rw"),
    "routing": ("rw",    "rw",    "r",    "r",      "r",    ""),
    "retention": ("rw",  "r",     "r",    "",       "",     ""),
    "export":    ("r",   "r",     "r",    "",       "",     "r"),
    "checkpoint": ("r",  "r",     "r",    "r",      "r",    "r"),
    "verification": ("rw", "rw",  "r",    "",       "",     ""),
    "system":    ("rw",  "rw",    "r",    "",       "",     ""),
}  # fmt: skip
RESOURCES = tuple(_TABLE)
_LETTERS = {"r": READ, "w": WRITE, "u": USE}
_OF_SCOPE = {"inference": {USE}, "admin:read": {READ}, "admin:write": {READ, WRITE}}
_OF_SCOPE_FOR_TEXT = {READ_TEXT: {READ}, "admin:write": {WRITE}}


class Rule(NamedTuple):
    """What a surface asks for: one action on one resource."""

    action: str
    resource: str


USE_MODEL = Rule(USE, "model")
OPEN = None  # the rule of what everybody may call, on purpose


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody authenticated. ``actor`` goes into the events: ``user:ann``, ``key:<key id>``,
    ``jwt:<tenant>:<subject>`` or ``cli:<user>``; ``tenant_id`` empty reaches all tenants and the
    fleet."""

    actor: str
    role: str
    tenant_id: str = ""
    scopes: tuple[str, ...] = ALL_SCOPES

    @property
    def confined(self) -> bool:
        return bool(self.tenant_id)

    def reaches(self, tenant_id: str) -> bool:
        """True if rows of ``tenant_id`` exist for this principal at all."""
        return not self.tenant_id or self.tenant_id == tenant_id


def allowed(principal: Principal, action: str, resource: str) -> bool:
    """May ``principal`` do ``action`` on ``resource``? Unknown means no."""
    opens = _OF_SCOPE_FOR_TEXT if resource == "text" else _OF_SCOPE
    if not any(action in opens.get(scope, ()) for scope in principal.scopes):
        return False
    if action not in actions_of(principal.role, resource):
        return False
    return not principal.confined or action in actions_in_a_tenant(resource)


def actions_of(role: str, resource: str) -> frozenset[str]:
    """What the role may do with the resource, whatever the scopes and the reach."""
    row = _TABLE.get(resource)
    if row is None or role not in ROLES:
        return frozenset()
    return frozenset(_LETTERS[letter] for letter in row[ROLES.index(role)])


def actions_in_a_tenant(resource: str) -> frozenset[str]:
    """The most that a principal confined to one tenant may do with the resource."""
    row = _TABLE.get(resource)
    return frozenset(_LETTERS[letter] for letter in row[-1]) if row else frozenset()


def may_grant(principal: Principal, role: str, scopes: tuple[str, ...]) -> bool:
    """May ``principal`` hand out a key of this role and these scopes? Nobody grants above
    themselves: whoever is not an administrator hands on inference only, by their own role; and
    who may read captured text is said only by who may."""
    if READ_TEXT in scopes and READ_TEXT not in principal.scopes:
        return False
    if principal.role == "admin":
        return role in ROLES
    return role == principal.role and set(scopes) <= {"inference"}


def rows() -> Iterator[tuple[str, ...]]:
    """``(resource, by role …, in a tenant)`` with the actions in words, for the reference."""
    for resource, letters in _TABLE.items():
        yield (resource, *(", ".join(_LETTERS[one] for one in part) for part in letters))
