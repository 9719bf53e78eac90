"""One point of the scale bench in a process of its own: plan a large window, report seconds and MB.

The window is generated in blocks of 512 trajectories, so that its own arrays are the peak of the
generator. Run by `app.bench.scale`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import numpy as np

from app.bench.fresh import peak_mb
from planner.cost import CostModel
from planner.placement import Placement
from planner.policy import PlannerOptions, make_plan
from planner.recorded.presets import preset
from planner.recorded.synthetic import FLASH, synthetic_windows
from planner.topology import Topology
from planner.window import Window

BLOCK_GROUPS = 64


def large_window(num: int, num_layers: int, num_experts: int, num_ranks: int) -> Window:
    """A window of `num` trajectories shaped like synthetic:flash, generated block by block."""
    groups = min(BLOCK_GROUPS, num // 8)
    corpus = replace(
        FLASH,
        num_layers=num_layers,
        num_experts=num_experts,
        num_ranks=num_ranks,
        num_groups=groups,
    )
    block = groups * 8
    if num % block:
        raise ValueError(f"num: got {num}, expected a multiple of {block}")
    demand = np.empty((num, num_layers, num_experts), np.uint16)
    length = np.empty(num, np.int64)
    for k, part in enumerate(synthetic_windows(corpus, num // block, seed=0)):
        demand[k * block : (k + 1) * block] = part.demand
        length[k * block : (k + 1) * block] = part.length
    return Window(
        window_id=0,
        length=length,
        routed_rows=length,
        demand=demand,
        top_k=corpus.top_k,
        group=np.repeat(np.arange(num // 8), 8),
    )


def flash_cost(num_layers: int) -> CostModel:
    """synthetic:flash's costs, dense work in proportion to the number of layers."""
    known = preset("synthetic:flash").cost
    scale = num_layers / FLASH.num_layers
    return CostModel(
        stages=tuple(
            replace(stage, alpha=stage.alpha * scale, beta=stage.beta * scale)
            for stage in known.stages
        )
    )


def measure(arguments: dict) -> dict[str, float]:
    """Plan twice, once to load the kernels; time the second, window to validated plan."""
    num, num_layers = arguments["num"], arguments["num_layers"]
    num_experts, num_ranks = arguments["num_experts"], arguments["num_ranks"]
    before = peak_mb()
    window = large_window(num, num_layers, num_experts, num_ranks)
    generated = peak_mb()
    topology = Topology.uniform(dp=arguments["dp"], ep=num_ranks, capacity=8192)
    cost = flash_cost(num_layers)
    options = PlannerOptions(
        rows="paper",
        stop="cv",
        budget_seconds=arguments.get("seconds"),
        budget_proposals=arguments.get("proposals"),
    )
    identity = Placement.identity(num_layers, num_experts, num_ranks)
    few = replace(options, budget_seconds=None, budget_proposals=1000)
    make_plan(window, topology, cost, identity, "full", few)
    start = time.perf_counter()
    cpu = time.process_time()
    plan = make_plan(window, topology, cost, identity, "full", options)
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "place_seconds": plan.report["place_seconds"],
        "schedule_seconds": plan.report["schedule_seconds"],
        "search_seconds": plan.report["search_seconds"],
        "eta": 100 * plan.report["excess_removed"],
        "proposals": plan.report["proposals"],
        "rows": plan.report["rows"],
        "peak_mb": peak_mb(),
        "generated_mb": generated,
        "import_mb": before,
        "window_mb": window.demand.nbytes / 2**20,
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
