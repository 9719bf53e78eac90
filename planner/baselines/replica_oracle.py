"""What perfect replication of experts inside every row would give: the floor of expert balance.

Systems that replicate experts per micro-batch (ReLibra, ForeMoE, UltraEP) can at best split the
demand of a row evenly over the EP ranks of a shard, layer by layer. Their weight traffic is free
here. Dense work stays with the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.cost import CostModel
from planner.rows import Rows
from planner.score import row_costs
from planner.topology import Topology
from planner.window import Window


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleCost:
    """The cost of rows whose expert work is evenly split, in the units of `planner.score.Score`."""

    max_shard: float
    """max_g U_g."""
    sum_shards: float
    """sum_g U_g."""
    max_row: float
    """max_rg J_rg."""
    dense: float
    expert: float

    @property
    def key(self) -> tuple[float, float, float]:
        """What is compared, lexicographically (Equation 16)."""
        return (self.max_shard, self.sum_shards, self.max_row)


def replica_oracle(window: Window, rows: Rows, topology: Topology, cost: CostModel) -> OracleCost:
    """Score rows as if every rank carried the mean load of its shard in every row and layer."""
    whole = window.demand.sum(2, dtype=np.int64)[:, :, None]
    dense, expert = row_costs(window.length, whole, rows, topology, cost)
    expert = expert / topology.num_ep_ranks
    row_cost = dense + expert
    shard_cost = row_cost.sum(0)
    return OracleCost(
        max_shard=float(shard_cost.max()),
        sum_shards=float(shard_cost.sum()),
        max_row=float(row_cost.max()),
        dense=float(dense.sum()),
        expert=float(expert.sum()),
    )
