"""Identifiers, and the one rule for names that people choose."""

import re
from typing import NewType

from controlplane.domain.errors import Invalid

TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
VersionId = NewType("VersionId", str)  # "<model name>@<version name>": readable, unique, stable
NodeId = NewType("NodeId", str)
ReplicaId = NewType("ReplicaId", str)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def checked_name(value: str, param: str = "name") -> str:
    """Return ``value`` if it is a lawful name, else raise Invalid ``invalid_name``."""
    if not _NAME.fullmatch(value):
        raise Invalid(
            "invalid_name",
            "A name is 1 to 63 of a-z, 0-9, '.', '_' and '-', starting with a letter or digit.",
            param,
        )
    return value


def version_id(model: str, version: str) -> VersionId:
    """``version_id("smollm2", "v1") == "smollm2@v1"``."""
    return VersionId(f"{model}@{version}")
