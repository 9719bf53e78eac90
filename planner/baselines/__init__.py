"""What others do, from their public descriptions, scored by the same cost model.

slime's own schedule, the paper's base rows and global FFD are policies of the planner and live in
`planner.packing.slime_rows`, `planner.packing.base_rows` and `planner.packing.global_rows`.
"""

from planner.baselines.cp_sat import CpSatResult, solve_cp_sat
from planner.baselines.eplb import EplbPlan, eplb
from planner.baselines.nemo_rl import modified_ffd, nemo_rl_rows
from planner.baselines.replica_oracle import OracleCost, replica_oracle
from planner.baselines.verl import karmarkar_karp, verl_rows

__all__ = [
    "CpSatResult",
    "EplbPlan",
    "OracleCost",
    "eplb",
    "karmarkar_karp",
    "modified_ffd",
    "nemo_rl_rows",
    "replica_oracle",
    "solve_cp_sat",
    "verl_rows",
]
