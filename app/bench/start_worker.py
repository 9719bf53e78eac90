"""A fresh process: seconds to import the planner and to the first plan. For `app.bench.start`."""

import json
import sys
import time


def measure(path: str) -> dict[str, float]:
    """Import, read a window (not timed), plan it under full with a token search."""
    start = time.perf_counter(), time.process_time()
    from planner.policy import PlannerOptions, make_plan

    found = {
        "import_s": time.perf_counter() - start[0],
        "import_cpu_s": time.process_time() - start[1],
    }
    from planner.placement import Placement
    from planner.recorded import preset, read

    window = read(path)[0]
    known = preset("synthetic:tiny" if window.num_experts == 128 else "synthetic:flash")
    identity = Placement.identity(window.num_layers, window.num_experts, 8)
    options = PlannerOptions(rows="paper", stop="cv", budget_seconds=None, budget_proposals=10_000)
    start = time.perf_counter(), time.process_time()
    make_plan(window, known.topology, known.cost, identity, "full", options)
    found["first_plan_s"] = time.perf_counter() - start[0]
    found["first_plan_cpu_s"] = time.process_time() - start[1]
    return found


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1])["path"])))
