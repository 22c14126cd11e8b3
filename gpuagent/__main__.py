"""``python -m gpuagent``: one node of the fleet."""

import asyncio
import sys

import structlog

from gpuagent.agent.config import AgentSettings, read_settings
from gpuagent.agent.devices import DeviceError
from gpuagent.agent.logs import configure_logging
from gpuagent.agent.service import Service


async def _run(settings: AgentSettings) -> None:
    structlog.contextvars.bind_contextvars(node=settings.node_id)
    await Service(settings).run()


def main() -> None:
    settings = read_settings(sys.argv[1:])
    configure_logging()
    try:
        asyncio.run(_run(settings))
    except DeviceError as error:
        sys.exit(f"gpuagent: {error}")


if __name__ == "__main__":
    main()
