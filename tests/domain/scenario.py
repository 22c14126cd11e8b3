"""``given(events).when(command).then(events)``: how tests of aggregates read."""

from dataclasses import dataclass
from typing import Any

import pytest

from controlplane.domain.decider import Command, Decider, Event, fold
from controlplane.domain.errors import DomainError


@dataclass
class Scenario:
    decider: Decider[Any]
    events: tuple[Event, ...]
    command: Command | None = None

    def when(self, command: Command) -> "Scenario":
        return Scenario(self.decider, self.events, command)

    def then(self, *expected: Event) -> None:
        assert list(self._decided()) == list(expected)

    def then_nothing(self) -> None:
        self.then()

    def then_refused(self, code: str) -> DomainError:
        with pytest.raises(DomainError) as refused:
            self._decided()
        assert refused.value.code == code
        return refused.value

    def _decided(self) -> Any:
        return self.decider.decide(fold(self.decider, self.events), self.command)
