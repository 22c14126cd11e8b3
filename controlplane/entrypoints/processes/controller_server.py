"""Runs a controller in this process, with its probes, until SIGTERM or SIGINT."""

import asyncio
from pathlib import Path

import structlog
from django.db import connections

from controlplane import bootstrap
from controlplane.entrypoints.logs import configure_logs
from controlplane.entrypoints.processes.controller import (
    Controller,
    ControllerSettings,
    stop_on_signals,
)
from controlplane.entrypoints.processes.controller_metrics import CONTENT_TYPE, ControllerMetrics
from controlplane.entrypoints.processes.probes import Probes, json_page
from controlplane.entrypoints.processes.sealing import Sealing

log = structlog.get_logger("controller")


def run(settings: ControllerSettings, host: str, port: int, port_file: Path | None) -> None:
    """Blocks; returns when asked to stop."""
    configure_logs()
    asyncio.run(_run(settings, host, port, port_file))


async def _run(settings: ControllerSettings, host: str, port: int, port_file: Path | None) -> None:
    stop = await stop_on_signals()
    controller = Controller(
        settings,
        bootstrap.event_store(),
        bootstrap.command_handler(),
        bootstrap.clock(),
        bootstrap.projector(),
        connections.close_all,
        Sealing(bootstrap.sealer(), bootstrap.seal_store(), bootstrap.sealed_logs()),
        bootstrap.usage(),
        bootstrap.upkeep(),
        bootstrap.demand_watch(),
    )
    probes = probes_of(controller)
    bound = await probes.start(host, port)
    if port_file is not None:
        port_file.write_text(str(bound))
    log.info("controller started", port=bound, holder=settings.holder)
    await controller.run(stop)
    probes.close()
    log.info("controller stopped")


def probes_of(controller: Controller) -> Probes:
    """/livez: the event loop answers; /readyz: it can do its work, leading or standing by."""
    metrics = ControllerMetrics(controller)

    async def live() -> tuple[int, str, bytes]:
        return json_page({"status": "ok"})

    async def ready() -> tuple[int, str, bytes]:
        problems = controller.problems()
        body: dict[str, object] = {
            "status": "not ready" if problems else "ok",
            "leader": controller.leads,
            "position": controller.state.position,
            "problems": problems,
        }
        return json_page(body, 503 if problems else 200)

    async def figures() -> tuple[int, str, bytes]:
        return 200, CONTENT_TYPE, await asyncio.to_thread(metrics.render)

    return Probes({"/livez": live, "/readyz": ready, "/metrics": figures})
