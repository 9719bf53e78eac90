"""The rows of one window under a fixed placement, for every policy (Sections 3.1 and 4).

The way of the rows: count -> candidates -> search -> order -> report.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

import numpy as np

from planner.cost import CostModel
from planner.options import PlannerOptions, check_sizes
from planner.packing.fixed_rows import fixed_rows
from planner.packing.row_count import RowCount, count_kept, too_few
from planner.placement import Placement
from planner.policies import policy_of
from planner.row_report import row_figures
from planner.rows import Rows
from planner.score import rank_demand, score_rank_demand
from planner.search.joint import (
    PlacedWindow,
    best_rows,
    row_counts,
    search_counts,
    search_figures,
)
from planner.topology import Topology
from planner.window import Window


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsResult:
    """Rows and the figures of the search that made them."""

    rows: Rows
    report: dict[str, float]
    seconds: float
    counted: tuple[int, RowCount] | None = None
    """Of `count_kept`, for whoever needs it again."""


def schedule(
    window: Window,
    topology: Topology,
    cost: CostModel,
    placement: Placement,
    policy: str,
    options: PlannerOptions,
    copies: np.ndarray | None = None,
    counted: tuple[int, RowCount] | None = None,
    known: tuple[Rows, ...] = (),
) -> RowsResult:
    """The rows of a window under a fixed placement; the GIL is free during the search.

    copies [trajectory, layer, EP rank] are deduplicated token copies (`communication.fan_out`) of
    this placement; they are reported, and enter the search with `options.copy_weight`.
    counted is `count_kept` of the window, when at hand. Searched rows are never predicted slower
    than those of slime, of base, or of `known` (makespan mode; in paper mode, than rows of slime or
    base that are as many); with `max_rank_tokens` or `copy_weight` the search's own are kept.

    Trajectories that cannot be run without an empty cell are dropped in whole trailing groups, or
    refused with ValueError, as `options.too_few` says.
    """
    start = time.perf_counter()
    chosen = policy_of(policy)
    check_sizes(window, topology, placement)
    _check_long(window, topology, options)
    if counted is None:
        counted = count_kept(window.length, window.group, topology)
    num_kept, packed = counted
    num_dropped = window.num_trajectories - num_kept
    if num_dropped and options.too_few == "error":
        raise too_few(window.length, topology)
    placed = PlacedWindow(
        length=window.length[:num_kept],
        q=rank_demand(window.demand[:num_kept], placement),
        counted=packed,
        topology=topology,
        cost=cost,
        options=options,
        copies=None if copies is None else copies[:num_kept],
    )
    if chosen.searches_rows:
        others = [_kept_rows(rows, num_kept) for rows in known]
        others += [_fixed(placed, window.window_id, like_slime=slime) for slime in (True, False)]
        counts = row_counts(placed)
        searched = search_counts(placed, counts, others)
        rows = best_rows(placed, searched, others)
        found = search_figures(placed, searched, rows)
    else:
        like_slime = chosen.runs_slime_rows(options.rows_from)
        rows, found = _fixed(placed, window.window_id, like_slime=like_slime), {}
    report = row_figures(
        placed.length,
        placed.q,
        rows,
        topology,
        cost,
        max_rank_tokens=options.max_rank_tokens,
        copies=placed.copies,
    )
    report |= found
    report["rows_bound"], report["rows_certified"] = float(packed.bound), float(packed.certified)
    report["dropped"] = float(num_dropped)
    return RowsResult(
        rows=_with_dropped(rows, num_dropped),
        report=report,
        seconds=time.perf_counter() - start,
        counted=counted,
    )


def base_joint_cost(
    window: Window,
    topology: Topology,
    cost: CostModel,
    options: PlannerOptions,
    counted: tuple[int, RowCount] | None = None,
) -> float:
    """U of the paper's base: DP-local FFD rows under identity placement, same trajectories kept.

    counted is `count_kept` of the window, when at hand.
    """
    kept, packed = counted or count_kept(window.length, window.group, topology)
    length = window.length[:kept]
    rows = fixed_rows(length, window.window_id, packed, topology, cost, options, like_slime=False)
    identity = Placement.identity(window.num_layers, window.num_experts, topology.num_ep_ranks)
    q = rank_demand(window.demand[:kept], identity)
    return score_rank_demand(length, q, rows, topology, cost).max_shard


def _fixed(placed: PlacedWindow, window_id: int, *, like_slime: bool) -> Rows:
    return fixed_rows(
        placed.length,
        window_id,
        placed.counted,
        placed.topology,
        placed.cost,
        placed.options,
        like_slime=like_slime,
    )


def _kept_rows(rows: Rows, num_kept: int) -> Rows:
    """Rows of the first num_kept trajectories."""
    return Rows(cell=rows.cell[:num_kept], num_rows=rows.num_rows, num_dp_slots=rows.num_dp_slots)


def _with_dropped(rows: Rows, num_dropped: int) -> Rows:
    """The rows with trailing trajectories that have no cell."""
    cell = np.concatenate([rows.cell, np.full(num_dropped, -1, np.int32)])
    return Rows(cell=cell, num_rows=rows.num_rows, num_dp_slots=rows.num_dp_slots)


def _check_long(window: Window, topology: Topology, options: PlannerOptions) -> None:
    long = np.flatnonzero(window.length > topology.capacity)
    if not len(long):
        return
    message = (
        f"{len(long)} trajectories are longer than the cell capacity of {topology.capacity} tokens "
        f"(trajectory {long[0]}: {window.length[long[0]]}); each gets a cell of its own. Raise "
        "max_tokens_per_gpu to fit them"
    )
    if options.long_trajectory == "error":
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)
