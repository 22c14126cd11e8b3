"""Text is captured by opt-in alone, and what is erased never comes back."""

from controlplane.domain import tenant
from controlplane.domain.capture import (
    EraseText,
    StartCapture,
    StopCapture,
    TenantCaptureStarted,
    TenantCaptureStopped,
    TenantTextErased,
)
from controlplane.domain.decider import Event, fold
from controlplane.domain.ids import TenantId
from controlplane.domain.tenant import TenantCreated, TenantDeleted
from tests.domain.scenario import Scenario

T = TenantId("acme")
CREATED = TenantCreated(T, "acme", "standard", 1.0)
STARTED, STOPPED = TenantCaptureStarted(T, 2.0), TenantCaptureStopped(T, 3.0)


def given(*events: Event) -> Scenario:
    return Scenario(tenant.DECIDER, (CREATED, *events))


def test_nothing_is_captured_unless_somebody_asked_for_it() -> None:
    assert not fold(tenant.DECIDER, [CREATED]).capture.on
    given().when(StartCapture(T, 2.0)).then(STARTED)
    given(STARTED).when(StartCapture(T, 2.5)).then_nothing()
    given(STARTED).when(StopCapture(T, 3.0)).then(STOPPED)
    given().when(StopCapture(T, 3.0)).then_nothing()


def test_each_erasure_ends_one_generation_and_the_next_begins() -> None:
    first = TenantTextErased(T, 0, 4.0)
    given(STARTED).when(EraseText(T, 4.0)).then(first)
    given(STARTED, first).when(EraseText(T, 5.0)).then(TenantTextErased(T, 1, 5.0))
    state = fold(tenant.DECIDER, [CREATED, STARTED, first])
    assert state.capture.on and state.capture.generation == 1


def test_text_of_a_capture_that_was_stopped_is_erased_once() -> None:
    given(STARTED, STOPPED).when(EraseText(T, 4.0)).then(TenantTextErased(T, 0, 4.0))
    given(STARTED, STOPPED, TenantTextErased(T, 0, 4.0)).when(EraseText(T, 5.0)).then_nothing()
    given().when(EraseText(T, 5.0)).then_nothing()


def test_a_deleted_tenant_captures_nothing() -> None:
    given(TenantDeleted(T, 2.0)).when(StartCapture(T, 3.0)).then_refused("tenant_not_found")
