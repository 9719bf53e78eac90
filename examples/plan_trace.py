"""Plan the shipped GPT-OSS-20B trace through the public planner API and print what it saves."""

import sys
from pathlib import Path

from app.studies.recording import GPT_OSS_20B
from planner.placement import Placement
from planner.policies import TRAINED
from planner.policy import PlannerOptions, make_plan
from planner.recorded import read
from planner.recorded.flops import cost_from_shape
from planner.topology import Topology

trace = Path(__file__).parent / "traces" / "gpt_oss_20b" / "counts_703x24x32.npz"
window = read(sys.argv[1] if len(sys.argv) > 1 else trace)[0]
topology = Topology.uniform(dp=4, ep=4, capacity=4096)
cost = cost_from_shape(GPT_OSS_20B, topology.capacity, tp=1, cp=1)
start = Placement.identity(window.num_layers, window.num_experts, topology.num_ep_ranks)
options = PlannerOptions(budget_seconds=0.3)
for policy in TRAINED:
    plan = make_plan(window, topology, cost, start, policy, options)
    saved = 1 - plan.report["joint_cost"] / plan.report["base_joint_cost"]
    print(f"{policy:10} {plan.rows.num_rows} rows, {plan.report['moved_experts']:3.0f} experts "
          f"moved, {saved:6.1%} of base's modelled cost saved")  # fmt: skip
