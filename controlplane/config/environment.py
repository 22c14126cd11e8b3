"""Every setting of the control plane, typed, from environment variables named ``ENGINE_*``.

``manage.py demo`` fills them for one machine; in production they come from the service manager.
"""

from functools import cache
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Environment(BaseSettings):
    """Defaults suit one machine with SQLite; see deploy/ for the production values."""

    model_config = SettingsConfigDict(env_prefix="ENGINE_", extra="ignore")

    data_dir: Path = Field(Path("./.run"), description="All state of this machine.")
    database_url: str = Field("", description="postgres://user@host/db; empty means SQLite.")
    secret_key: str = Field("", description="Signs sessions and tickets; empty: kept in data_dir.")
    debug: bool = False
    allowed_hosts: str = Field("127.0.0.1,localhost,[::1]", description="Comma-separated.")
    nats_url: str = "nats://127.0.0.1:4222"
    nats_creds: Path | None = Field(None, description="Credentials file of the control plane.")
    redis_url: str = Field("", description="Channel layer across processes; empty: in memory.")
    web_host: str = "127.0.0.1"
    web_port: int = 8000
    gateway_host: str = "127.0.0.1"
    gateway_port: int = 8001
    gateway_url: str = Field("", description="The gateway's public base URL, without /v1.")
    metrics_port: int = Field(0, description="The controller's /metrics and /readyz; 0: free port.")
    cluster_id: str = "engine"
    jwt_issuers: Path | None = Field(None, description="JSON file of trusted JWT issuers.")
    frontend_dir: Path | None = Field(None, description="Built dashboard; default frontend/dist.")

    def hosts(self) -> list[str]:
        return [host.strip() for host in self.allowed_hosts.split(",") if host.strip()]

    def public_gateway_url(self) -> str:
        return self.gateway_url or f"http://{self.gateway_host}:{self.gateway_port}"


@cache
def environment() -> Environment:
    """The process's settings, read once."""
    return Environment()
