"""The fixed-row assignment as a 0-1 integer model for OR-Tools CP-SAT (Sections 3.1 and 4.3).

Placement, number of rows, capacity and topology are fixed; only max_g U_g is minimised. The given
rows are the hint and the objective cut. Costs are integers in units of 1 / (16 C), dense work
rounded down for each trajectory, so that the solver's bound is a bound of the real problem.
A reference for small windows: assignment variables grow as N R D.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.rows import Rows
from planner.score import row_costs
from planner.topology import Topology

_SCALE = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CpSatResult:
    """What the solver found inside its limit."""

    status: str
    """OPTIMAL, FEASIBLE, or UNKNOWN (no incumbent; says nothing about feasibility)."""
    rows: Rows | None
    """The incumbent, or None without one."""
    bound: float
    """Certified lower bound on max_g U_g."""
    seconds: float
    """Model building and solving."""


def solve_cp_sat(
    length: NDArray[np.integer],
    q: NDArray[np.integer],
    hint: Rows,
    topology: Topology,
    cost: CostModel,
    *,
    seconds: float = 60.0,
    num_workers: int = 2,
    seed: int = 0,
) -> CpSatResult:
    """Assign trajectories to the rows of `hint`, which must run every trajectory.

    length: tokens `[trajectory]`; q: `[trajectory, layer, EP rank]` routed tokens.
    Raises ImportError without OR-Tools, ValueError when the hint drops a trajectory.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ImportError(
            "the CP-SAT baseline needs OR-Tools: pip install ortools (it is optional and no other "
            "part of RoutePack uses it)"
        ) from error
    if len(hint.kept) != len(length):
        raise ValueError(
            f"hint: {hint.num_dropped} of {len(length)} trajectories are dropped; give rows that "
            "run them all"
        )
    start = time.perf_counter()
    model = cp_model.CpModel()
    assigned = _assignment(model, length, hint, topology)
    dense, expert = row_costs(length, q, hint, topology, cost)
    limit = (dense + expert).sum(0).max() * topology.capacity * _SCALE
    joint = model.new_int_var(0, int(limit) + 1, "joint")
    for slots in topology.edp_shards:
        terms: list[Any] = []
        for row in range(hint.num_rows):
            columns = [row * hint.num_dp_slots + slot for slot in slots]
            terms += _dense_terms(model, assigned, columns, length, topology, cost)
            terms += _expert_terms(model, assigned, columns, q, topology)
        model.add(sum(terms) <= joint * topology.ep_groups_per_shard)
    model.minimize(joint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, seconds - (time.perf_counter() - start))
    solver.parameters.num_workers = num_workers
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    rounded_up = int(topology.ep_groups_per_shard > 1)  # joint is then a ceiling
    rows = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        chosen = [[solver.boolean_value(x) for x in cells].index(True) for cells in assigned]
        rows = Rows(
            cell=np.array(chosen, np.int32),
            num_rows=hint.num_rows,
            num_dp_slots=hint.num_dp_slots,
        )
    return CpSatResult(
        status=solver.status_name(status),
        rows=rows,
        bound=max(0.0, solver.best_objective_bound - rounded_up) / (topology.capacity * _SCALE),
        seconds=time.perf_counter() - start,
    )


def _assignment(
    model: Any, length: NDArray[np.integer], hint: Rows, topology: Topology
) -> list[list[Any]]:
    """x_ic of Equations 7 to 9: every trajectory once, no empty cell, every cell within C.

    A trajectory longer than C counts as C, which leaves it alone in its cell.
    """
    tokens = np.minimum(length, topology.capacity).tolist()
    assigned = [
        [model.new_bool_var(f"x{i}_{c}") for c in range(hint.num_cells)] for i in range(len(tokens))
    ]
    for i, cells in enumerate(assigned):
        model.add_exactly_one(cells)
        for c, x in enumerate(cells):
            model.add_hint(x, int(hint.cell[i] == c))
    for c in range(hint.num_cells):
        column = [cells[c] for cells in assigned]
        model.add_bool_or(column)
        model.add(sum(t * x for t, x in zip(tokens, column)) <= topology.capacity)
    return assigned


def _dense_terms(
    model: Any,
    assigned: list[list[Any]],
    columns: list[int],
    length: NDArray[np.integer],
    topology: Topology,
    cost: CostModel,
) -> list[Any]:
    """One peak over the shard's cells for each stage (Equation 14), in scaled units x groups."""
    share = np.asarray(length, np.float64) / topology.capacity
    unit = topology.capacity * _SCALE * topology.ep_groups_per_shard
    peaks = []
    for stage in cost.stages:
        work = np.floor((stage.alpha * share + stage.beta * share**2) * unit).astype(int).tolist()
        peak = model.new_int_var(0, sum(work), stage.name)
        for c in columns:
            model.add(sum(w * cells[c] for w, cells in zip(work, assigned)) <= peak)
        peaks.append(peak)
    return peaks


def _expert_terms(
    model: Any,
    assigned: list[list[Any]],
    columns: list[int],
    q: NDArray[np.integer],
    topology: Topology,
) -> list[Any]:
    """One peak over the EP ranks for each layer (Equation 15), in scaled units x groups."""
    in_row = []
    for cells in assigned:
        here = model.new_bool_var("")
        model.add(sum(cells[c] for c in columns) == here)
        in_row.append(here)
    terms = []
    for layer in range(q.shape[1]):
        peak = model.new_int_var(0, int(q[:, layer].sum(0).max()), "")
        for rank in range(topology.num_ep_ranks):
            loads = q[:, layer, rank].tolist()
            model.add(sum(w * here for w, here in zip(loads, in_row)) <= peak)
        terms.append(_SCALE * peak)
    return terms
