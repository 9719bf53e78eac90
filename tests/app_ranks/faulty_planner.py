"""Planner calls that fail by window: 0 raises, 1 overruns its deadline, 2 loses a trajectory."""

from __future__ import annotations

import time
from dataclasses import replace

from planner.policy import schedule


def faulty_schedule(window, topology, cost, placement, policy, options):
    if window.window_id == 0:
        raise RuntimeError("injected: the planner raises")
    if window.window_id == 1:
        time.sleep(12.0)
    result = schedule(window, topology, cost, placement, policy, options)
    if window.window_id == 2:
        cell = result.rows.cell.copy()
        cell[0] = -1
        return replace(result, rows=replace(result.rows, cell=cell))
    return result
