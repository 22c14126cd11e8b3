"""One command for one aggregate, decided on before it is carried out: by a file, or to undo."""

from dataclasses import dataclass
from typing import Any

from controlplane.domain.decider import Command, Decider


@dataclass(frozen=True)
class Order:
    """``command`` for the aggregate ``target`` of ``decider``."""

    decider: Decider[Any]
    target: str
    command: Command

    @property
    def stream(self) -> str:
        return self.decider.stream(self.target)
