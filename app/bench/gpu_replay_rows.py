"""What every rank executes in every row of a plan, as kernel sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.placement import Placement
from planner.rows import Rows
from planner.topology import Topology
from planner.window import Window


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowWork:
    """One row of one EDP shard.

    lengths: of the trajectories of each DP slot's cell, in tokens.
    tokens: [layer, EP rank, slot of the rank] routed tokens. copies: [layer, EP rank] tokens that
    DeepEP would send to the rank, each once however many of its experts it uses.
    """

    row: int
    shard: int
    lengths: list[np.ndarray]
    tokens: np.ndarray
    copies: np.ndarray


def rows_of(
    window: Window, rows: Rows, topology: Topology, placement: Placement
) -> Iterator[RowWork]:
    """Every row of every shard, under a placement."""
    for row in range(rows.num_rows):
        for shard, slots in enumerate(topology.edp_shards):
            cells = [rows.trajectories(row, slot) for slot in slots]
            members = np.concatenate(cells)
            counts = window.demand[members].sum(axis=0, dtype=np.int64)
            tokens = tokens_by_rank(counts, placement)
            positions = int(window.routed_rows[members].sum())
            yield RowWork(
                row=row,
                shard=shard,
                lengths=[window.length[cell] for cell in cells],
                tokens=tokens,
                copies=expected_copies(tokens, positions, window.top_k),
            )


def tokens_by_rank(counts: np.ndarray, placement: Placement) -> np.ndarray:
    """[layer, EP rank, slot of the rank] of logical counts [layer, expert]."""
    by_slot = np.take_along_axis(counts, placement.expert_of_slot.astype(np.int64), axis=1)
    return by_slot.reshape(len(counts), placement.num_ep_ranks, placement.experts_per_rank)


def expected_copies(tokens: np.ndarray, positions: int, top_k: int) -> np.ndarray:
    """[layer, EP rank] copies, rounded, of tokens [layer, EP rank, slot of the rank].

    A window has counts, not the choices of single tokens. With a rank's share s of the choices, a
    token with k independent choices reaches it with probability 1 - (1 - s)^k.
    """
    if not positions:
        return np.zeros(tokens.shape[:2], np.int64)
    share = tokens.sum(axis=2) / (positions * top_k)
    return np.rint(positions * (1 - (1 - share) ** top_k)).astype(np.int64)


def balanced(window: Window) -> Window:
    """The same trajectories with every expert used equally often: the forced-balance ideal.

    Counts differ by at most one; the remainder starts at another expert in every trajectory.
    """
    num_layers, num_experts = window.num_layers, window.num_experts
    total = window.routed_rows * window.top_k
    expert = np.arange(num_experts)
    start = np.cumsum(total) - total
    extra = (expert[None] - start[:, None]) % num_experts < (total % num_experts)[:, None]
    demand = (total // num_experts)[:, None] + extra
    return Window(
        window_id=window.window_id,
        length=window.length,
        routed_rows=window.routed_rows,
        demand=np.repeat(demand[:, None], num_layers, axis=1).astype(np.int32),
        top_k=window.top_k,
        group=window.group,
        layer_numbers=window.layer_numbers,
    )
