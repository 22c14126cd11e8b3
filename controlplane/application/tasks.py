"""How a process ends the loops that it runs."""

import asyncio
from collections.abc import Sequence


async def end_tasks(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel until all have ended: Python 3.11's ``wait_for`` swallows a cancellation that comes in
    the moment its own wait ends, and a loop woken by every heartbeat is often in that moment."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.2)
