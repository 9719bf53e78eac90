"""The rows of policies that do not search: slime's own, or the paper's DP-local FFD."""

from __future__ import annotations

import numpy as np

from planner.cost import CostModel
from planner.options import PlannerOptions
from planner.packing.base_rows import dp_local_ffd
from planner.packing.global_rows import global_ffd_rows
from planner.packing.row_count import RowCount
from planner.packing.slime_rows import slime_rows
from planner.rows import Rows
from planner.topology import Topology


def fixed_rows(
    length: np.ndarray,
    window_id: int,
    counted: RowCount,
    topology: Topology,
    cost: CostModel,
    options: PlannerOptions,
    *,
    like_slime: bool,
) -> Rows:
    """Fixed rows of length [trajectory]; global FFD where theirs would leave a cell empty.

    counted: of `row_count`, for global FFD. cost: slime's workload under `slime_balance_data`.
    """
    if like_slime:
        rows = slime_rows(
            length,
            topology,
            balance_data=options.slime_balance_data,
            workload=cost.dense_work(length, topology.capacity) if cost.stages else None,
        )
    else:
        rows = dp_local_ffd(
            length,
            window_id,
            topology,
            shard_size=options.shard_size,
            pipeline_floor=options.rows == "paper",
        )
    return rows or global_ffd_rows(length, topology, counted, counted.value)
