"""Capture of a tenant's text: by its own opt-in, until it is erased. Part of the ``tenant``.

What is captured is encrypted under a random key of the tenant's present **generation**. Erasing
ends a generation: its key is destroyed, and with it everything that was captured under it, in
whatever copy. What is captured later has the next generation's key::

    StartCapture     TenantCaptureStarted                generation 0 is being written
    EraseText        TenantTextErased(generation 0)      its key goes; capture goes on, in 1
    StopCapture      TenantCaptureStopped                what 1 holds can still be read
    EraseText        TenantTextErased(generation 1)      now nothing can
    EraseText        nothing: there is no text
"""

from msgspec.structs import replace

from controlplane.domain.decider import Command, Event, State
from controlplane.domain.ids import TenantId


# --- events -----------------------------------------------------------------------------------
class TenantCaptureStarted(Event, frozen=True, tag_field="type", tag="TenantCaptureStarted"):
    """Prompts and answers of the tenant's requests are kept, encrypted, from now on."""

    tenant_id: TenantId
    at: float


class TenantCaptureStopped(Event, frozen=True, tag_field="type", tag="TenantCaptureStopped"):
    tenant_id: TenantId
    at: float


class TenantTextErased(Event, frozen=True, tag_field="type", tag="TenantTextErased"):
    """The keys up to that of ``generation`` are destroyed: nothing captured until now is read."""

    tenant_id: TenantId
    generation: int
    at: float


CaptureEvent = TenantCaptureStarted | TenantCaptureStopped | TenantTextErased


# --- state ------------------------------------------------------------------------------------
class Capture(State, frozen=True):
    """``generation`` is the one whose key is in use, or will be. ``holds_text``: under it there
    may be text."""

    on: bool = False
    generation: int = 0
    holds_text: bool = False


NO_CAPTURE = Capture()


def evolve(capture: Capture, event: CaptureEvent) -> Capture:
    match event:
        case TenantCaptureStarted():
            return replace(capture, on=True, holds_text=True)
        case TenantCaptureStopped():
            return replace(capture, on=False)
        case TenantTextErased(generation=generation):
            return Capture(capture.on, generation + 1, holds_text=capture.on)


# --- commands ---------------------------------------------------------------------------------
class StartCapture(Command, frozen=True):
    tenant_id: TenantId
    now: float


class StopCapture(Command, frozen=True):
    tenant_id: TenantId
    now: float


class EraseText(Command, frozen=True):
    tenant_id: TenantId
    now: float


CaptureCommand = StartCapture | StopCapture | EraseText


# --- decisions --------------------------------------------------------------------------------
def decide(capture: Capture, command: CaptureCommand) -> list[Event]:
    match command:
        case StartCapture(tenant_id, now):
            return [] if capture.on else [TenantCaptureStarted(tenant_id, now)]
        case StopCapture(tenant_id, now):
            return [TenantCaptureStopped(tenant_id, now)] if capture.on else []
        case EraseText(tenant_id, now):
            if not capture.holds_text:
                return []
            return [TenantTextErased(tenant_id, capture.generation, now)]
