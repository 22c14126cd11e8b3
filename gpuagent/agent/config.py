"""The agent's settings: environment variables named ``ENGINE_AGENT_*``, overridden by options."""

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gpuagent.agent.devices import Share, parse_bytes, parse_share
from gpuagent.agent.fabric import interface_of
from gpuagent.wire.messages import BUILTIN, VLLM

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# One subject token: a '.' or a wildcard in a node's name would reach another node's subjects.
GPU_RESERVE_BYTES = 2 << 30  # for the driver and libraries, as placement counts it
NODE_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class AgentSettings(BaseSettings):
    """Defaults suit one machine; ``python -m gpuagent --help`` lists every option."""

    model_config = SettingsConfigDict(env_prefix="ENGINE_AGENT_", extra="ignore")

    node_id: str = Field(description="This node's name, unique in the cluster.")
    nats_url: str = Field("nats://127.0.0.1:4222", description="The bus; several by commas.")
    creds: Path | None = Field(None, description="This node's credentials file.")
    devices: str = Field("auto", description="auto, cuda, or e.g. cpu:4GiB,cpu:4GiB.")
    share: str = Field("1/1", description="Part of the machine, e.g. 1/2: the first of two agents.")
    zone: str = Field("", description="Rack, region or site of this node.")
    fabric: str = Field("", description="Network that joins its GPUs to others', e.g. ib-east.")
    fabric_address: str = Field(
        "", description="This node's IP address on it, for groups over nodes; empty: none of them."
    )
    fabric_port: int = Field(
        0, ge=0, le=65535, description="Where agents of the fabric meet this one; 0: a free port."
    )
    state_dir: Path = Field(Path("./.run/agent"), description="What must outlive this process.")
    model_cache: Path = Field(Path("./.run/models"), description="Where models are kept.")
    file_roots: str = Field("", description="Folders that file:// may read, by commas.")
    threads: int = Field(0, ge=0, description="CPU threads of a worker; 0: cores / devices.")
    metrics_host: str = Field("127.0.0.1", description="Where /metrics listens.")
    metrics_port: int = Field(0, ge=0, le=65535, description="/metrics, /readyz; 0: a free port.")
    port_file: Path | None = Field(None, description="Write the bound metrics port here.")
    lease_seconds: float = Field(15.0, gt=0, description="Silence after which nobody is admitted.")
    watchdog_seconds: float = Field(30.0, gt=0, description="A step longer than this is a hang.")
    group_start_seconds: float = Field(
        120.0, gt=0, description="How long the ranks of a group wait for each other."
    )
    drain_seconds: float = Field(30.0, ge=0, description="How long an unloading replica finishes.")
    turn_seconds: float = Field(
        10.0, gt=0, description="How long a busy model keeps its device while another waits."
    )
    host_memory: str = Field(
        "auto", description="For weights off the device, e.g. 8GiB; auto: a quarter of memory."
    )
    reserved_memory: str = Field(
        "auto", description="Kept free on each device; auto: 2 GiB on a GPU, nothing on a CPU."
    )
    max_queue: int = Field(1024, ge=1, description="Unfinished generations of one replica.")
    vllm_python: Path | None = Field(
        None, description="Python of a virtual environment with vLLM; none: no such engine."
    )
    vllm_options: str = Field(
        "auto", description="More options of its server; auto: --enforce-eager on a CPU."
    )
    engine_start_seconds: float = Field(
        600.0, gt=0, description="How long vLLM may take until it answers."
    )

    @field_validator("node_id")
    @classmethod
    def _one_subject_token(cls, value: str) -> str:
        if not NODE_ID.fullmatch(value):
            raise ValueError("1 to 63 of a-z, 0-9, '_' and '-', the first a letter or a digit")
        return value

    @field_validator("fabric_address")
    @classmethod
    def _of_this_machine(cls, value: str) -> str:
        if value:
            interface_of(value)
        return value

    def host_bytes(self) -> int:
        """Room for replicas whose weights are off the device."""
        return self._bytes("host_memory", self.machine_bytes() // 4)

    def machine_bytes(self) -> int:
        """This agent's share of the machine's memory."""
        return int(psutil.virtual_memory().total) // self.part().of

    def part(self) -> Share:
        return parse_share(self.share)

    def reserved_bytes(self, kind: str) -> int:
        """What is kept free on a device of that kind."""
        return self._bytes("reserved_memory", GPU_RESERVE_BYTES if kind == "cuda" else 0)

    def engines(self) -> tuple[str, ...]:
        """What versions may ask for here."""
        return (BUILTIN, VLLM) if self.vllm_python else (BUILTIN,)

    def options_of_vllm(self, kind: str) -> tuple[str, ...]:
        """Words for its command line on a device of that kind; compiling takes a CPU minutes."""
        if self.vllm_options == "auto":
            return ("--enforce-eager",) if kind == "cpu" else ()
        return tuple(shlex.split(self.vllm_options))

    def _bytes(self, name: str, default: int) -> int:
        text = getattr(self, name)
        return default if text == "auto" else parse_bytes(text)

    @field_validator("share")
    @classmethod
    def _a_share(cls, value: str) -> str:
        parse_share(value)
        return value

    @field_validator("host_memory", "reserved_memory")
    @classmethod
    def _a_size(cls, value: str) -> str:
        if value != "auto":
            parse_bytes(value)
        return value

    def allowed_file_roots(self) -> tuple[Path, ...]:
        return tuple(Path(root).resolve() for root in self.file_roots.split(",") if root.strip())


def read_settings(arguments: Sequence[str]) -> AgentSettings:
    """Settings from the environment and the command line; exits with usage on a mistake."""
    parser = argparse.ArgumentParser(
        prog="gpuagent",
        description="One node of the fleet.",
        usage="gpuagent --node-id NODE [options]   (--help lists them)",
    )
    for name, field in AgentSettings.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, help=field.description)
    given: dict[str, Any] = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v}
    try:
        settings = AgentSettings(**given)
    except ValidationError as error:
        parser.error("; ".join(map(_mistake, error.errors())))
    if settings.creds and not settings.creds.is_file():
        parser.error(
            f"--creds: there is no file {settings.creds}; "
            "'manage.py node_credentials NODE' on the control plane writes one and prints its path"
        )
    if settings.vllm_python and not os.access(settings.vllm_python, os.X_OK):
        parser.error(f"--vllm-python: {settings.vllm_python} is no program that can be run")
    return settings


def _mistake(error: "ErrorDetails") -> str:
    """``--threads: Input should be greater than or equal to 0``."""
    name = str(error["loc"][0])
    said = "is required" if error["type"] == "missing" else error["msg"]
    said = said.removeprefix("Value error, ")
    return f"--{name.replace('_', '-')} (or ENGINE_AGENT_{name.upper()}): {said}"
