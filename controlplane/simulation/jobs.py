"""A request in the simulation, from its arrival to its one end."""

from dataclasses import dataclass

FINISHED, REFUSED, LOST = "finished", "refused", "lost"
RANK = {"realtime": 0, "standard": 1, "batch": 2}


@dataclass(slots=True, eq=False)
class Job:
    """``prompt`` and ``output`` in tokens; times in simulated seconds. ``num_done`` tokens were
    delivered; after a loss the job goes on from there on another replica. ``weight``: how many
    requests of the trace it stands for. ``end`` is empty until it has one."""

    number: int
    at: float
    model: int
    latency_class: str
    tenant: int
    prompt: int
    output: int
    weight: float = 1.0
    first_at: float = -1.0
    ended_at: float = -1.0
    num_done: int = 0
    num_tries: int = 0
    was_held: bool = False
    replica_id: str = ""
    end: str = ""
    code: str = ""

    @property
    def num_left(self) -> int:
        """Tokens still to come."""
        return self.output - self.num_done

    @property
    def num_known(self) -> int:
        """Tokens whose keys and values a new replica has to compute first."""
        return self.prompt + self.num_done
