"""Solves ``placement.repack`` with HiGHS (``scipy.optimize.milp``), within a limit of time."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from controlplane.placement.repack import Problem

FEASIBLE = (0, 1)  # statuses of milp with an answer: optimal, or the limit was reached


def solve(stated: Problem, seconds: float = 10.0) -> list[int]:
    """Indexes of the variables that are 1 in the best answer found; none if there is none.

    The limit is of time, so on a slow machine the answer may be another one, never a wrong one.
    """
    if not stated.variables:
        return []
    entries = [
        (row, index, factor)
        for row, bound in enumerate(stated.bounds)
        for index, factor in bound.factors.items()
    ]
    rows, columns, factors = zip(*entries, strict=True)
    shape = (len(stated.bounds), len(stated.variables))
    matrix = csr_array((factors, (rows, columns)), shape=shape)
    found = milp(
        -np.array([one.worth for one in stated.variables]),
        constraints=LinearConstraint(matrix, ub=[bound.limit for bound in stated.bounds]),
        integrality=np.ones(len(stated.variables)),
        bounds=Bounds(0, 1),
        options={"time_limit": seconds},
    )
    if found.status not in FEASIBLE or found.x is None:
        return []
    return [int(index) for index in np.flatnonzero(found.x > 0.5)]
