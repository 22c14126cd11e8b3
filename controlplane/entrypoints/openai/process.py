"""The gateway as a process: an event loop, the gateway in it, and the server around its app."""

import asyncio
import gc
import sys
from pathlib import Path

import structlog
import uvloop
from django.conf import settings

from controlplane import bootstrap
from controlplane.application.hold import parse_deadlines
from controlplane.application.limits import parse_limits
from controlplane.entrypoints.logs import configure_logs
from controlplane.entrypoints.openai.gateway import Gateway, GatewaySettings
from controlplane.entrypoints.openai.server import GatewayServer, listen, make_server

SWITCH_INTERVAL_S = 0.0005

log = structlog.get_logger("gateway")


def run(host: str, port: int, port_file: Path | None) -> None:
    """Serve until SIGTERM or SIGINT."""
    configure_logs()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(host, port, port_file))


async def _serve(host: str, port: int, port_file: Path | None) -> None:
    # Budgets are read from the read model: not from rows that an earlier release made.
    await asyncio.to_thread(bootstrap.projector().catch_up_all)
    gateway = Gateway(_settings(), bootstrap.event_store(), bootstrap.ledger(), bootstrap.clock())
    await gateway.start()
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be looked at in every collection
    listener = listen(host, port)
    server = make_server(gateway.app, gateway.begin_drain)
    announcing = asyncio.create_task(_announce(server, listener.getsockname()[1], port_file))
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        await gateway.stop()


async def _announce(server: GatewayServer, port: int, port_file: Path | None) -> None:
    """Write the port once connections are answered: whoever waits for the file may connect."""
    while not server.started:
        await asyncio.sleep(0.01)
    log.info("listening", port=port)
    if port_file is not None:
        part = port_file.with_suffix(".part")
        part.write_text(str(port))
        part.replace(port_file)


def _settings() -> GatewaySettings:
    env = settings.ENV
    return GatewaySettings(
        nats_url=env.nats_url,
        nats_creds=env.nats_creds,
        allowed_hosts=tuple(env.hosts()),
        jwt_issuers=env.jwt_issuers,
        secret=settings.SECRET_KEY.encode(),
        tiers=parse_limits(env.tier_limits),
        operator_tenant=env.operator_tenant,
        redis_url=env.redis_url,
        limits_fallback=env.limits_fallback,
        hold_s=parse_deadlines(env.hold_seconds),
        explained_share=env.dispatch_explained,
        currency=env.currency,
        zone=env.zone,
    )
