"""``python -m gpuagent``: one node of the fleet."""

import asyncio
import logging
import sys

import structlog

from gpuagent.agent.config import AgentSettings, read_settings
from gpuagent.agent.devices import DeviceError
from gpuagent.agent.service import Service


def configure_logging() -> None:
    """JSON lines on stderr, or coloured text where a person looks on."""
    is_terminal = sys.stderr.isatty()
    renderer = (
        structlog.dev.ConsoleRenderer() if is_terminal else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


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
