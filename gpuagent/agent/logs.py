"""How the agent and its workers log: JSON lines on stderr, which workers share with their agent.

{"replica": "m.1.g1.0", "request": "req-7", "code": "engine_error", "error_type": "IndexError",
 "exception": "Traceback ...", "event": "request_failed", "level": "error", ...}
"""

import logging
import sys

import structlog


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
