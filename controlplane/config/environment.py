"""Every setting of the control plane, typed, from environment variables named ``ENGINE_*``.

``manage.py demo`` fills them for one machine; in production they come from the service manager.
"""

import json
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Environment(BaseSettings):
    """Defaults suit one machine with SQLite; see deploy/ for the production values."""

    model_config = SettingsConfigDict(env_prefix="ENGINE_", extra="ignore")

    data_dir: Path = Field(default=Path("./.run"), description="All state of this machine.")
    database_url: str = Field(
        default="", description="postgres://user@host/db; empty means SQLite."
    )
    secret_key: str = Field(
        default="", description="Signs sessions and tickets; empty: kept in data_dir."
    )
    debug: bool = Field(default=False, description="Django's debug pages; never in production.")
    allowed_hosts: str = Field(default="127.0.0.1,localhost,[::1]", description="Comma-separated.")
    nats_url: str = Field(default="nats://127.0.0.1:4222", description="The bus.")
    nats_creds: Path | None = Field(
        default=None, description="Credentials file of the control plane."
    )
    redis_url: str = Field(
        default="", description="Rate limits over all gateways, channel layer; empty: in memory."
    )
    web_host: str = Field(default="127.0.0.1", description="Where the dashboard listens.")
    web_port: int = Field(default=8000, description="Dashboard, admin REST and /ws/live.")
    gateway_host: str = Field(default="127.0.0.1", description="Where the gateway listens.")
    gateway_port: int = Field(default=8001, description="/v1 and /ws/v1/stream.")
    zone: str = Field(
        default="",
        description="Where this gateway stands, like eu/rack-1; nodes say where they do.",
    )
    gateway_url: str = Field(default="", description="The gateway's public base URL, without /v1.")
    metrics_port: int = Field(
        default=0, description="The controller's /metrics and /readyz; 0: free port."
    )
    cluster_id: str = Field(default="engine", description="Names this installation to its agents.")
    currency: str = Field(
        default="USD", description="What prices and amounts are called; nothing is converted."
    )
    tier_limits: str = Field(
        default="",
        description="JSON by tier: requests_per_minute, tokens_per_minute, max_open, weight.",
    )
    hold_seconds: str = Field(
        default="",
        description="JSON by latency class: how long a request waits for its model to load.",
    )
    dispatch_explained: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of requests, by a hash of their ids, whose choice of a replica is kept "
        "even when there are many; 0: only of those that were moved or refused.",
    )
    sealing_key: Path | None = Field(
        default=None, description="File with the key that signs checkpoints; empty: in data_dir."
    )
    archive: str = Field(
        default="",
        description="Where old requests go before they leave: a folder, s3://…; empty: they stay.",
    )
    limits_fallback: Literal["local", "refuse"] = Field(
        default="local",
        description="Without Redis: each gateway limits by itself, or requests are refused.",
    )
    jwt_issuers: Path | None = Field(default=None, description="JSON file of trusted JWT issuers.")
    oidc_issuer: str = Field(
        default="", description="OpenID Connect provider for the dashboard's login; empty: none."
    )
    oidc_client_id: str = Field(default="", description="This installation's id at the provider.")
    oidc_client_secret: str = Field(default="", description="And its secret.")
    oidc_name: str = Field(default="Single sign-on", description="What the button says.")
    oidc_algorithms: str = Field(
        default="RS256", description="Of ID tokens, comma-separated; no others are accepted."
    )
    oidc_role_claim: str = Field(
        default="roles", description="The claim with the user's role, a path with dots."
    )
    oidc_roles: str = Field(
        default="", description="JSON: the claim's values and the roles they mean; empty: the same."
    )
    oidc_default_role: str = Field(
        default="", description="Role of users whose claim names none; empty: they cannot log in."
    )
    https: bool = Field(default=False, description="Served over TLS: secure cookies, HSTS.")
    operator_tenant: str = Field(
        default="operators", description="Its keys act for the whole fleet."
    )
    cli_role: str = Field(
        default="admin", description="The role of management commands on this machine."
    )
    fail_at: str = Field(
        default="", description="For crash tests: name:n kills the process at a failpoint."
    )
    frontend_dir: Path | None = Field(
        default=None, description="Built dashboard; default frontend/dist."
    )

    def hosts(self) -> list[str]:
        return [host.strip() for host in self.allowed_hosts.split(",") if host.strip()]

    def oidc_role_map(self) -> dict[str, str]:
        """``oidc_roles`` read; raises ValueError if it is no JSON object of strings."""
        found = json.loads(self.oidc_roles or "{}")
        if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
            raise ValueError("ENGINE_OIDC_ROLES is a JSON object of strings")
        return found

    def public_gateway_url(self) -> str:
        return self.gateway_url or f"http://{self.gateway_host}:{self.gateway_port}"


@cache
def environment() -> Environment:
    """The process's settings, read once."""
    return Environment()
