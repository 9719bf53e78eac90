"""The guard, and what it sends home."""

from __future__ import annotations

import numpy as np
from slime_cases import TOPOLOGY, rollout_planner, sealed

from app.slime.guard import Guard


def test_the_guard_steps_down_after_losing_windows_in_a_row():
    guard = Guard(policy="full", patience=2, calibration_windows=2)
    assert guard.effective == "observe"
    for _ in range(2):
        guard.measured("observe", slime_cost=10.0, seconds=20.0, exposed=0.0)
    assert guard.effective == "full" and guard.seconds_per_cost == 2.0
    assert not guard.measured("full", 10.0, 25.0, 0.0)
    assert not guard.measured("full", 10.0, 15.0, 0.0)  # a win starts the count again
    assert not guard.measured("full", 10.0, 25.0, 0.0)
    assert guard.measured("full", 10.0, 19.0, 3.0)  # exposed time counts
    assert guard.effective == "reschedule" and "full lost 2" in guard.message
    for _ in range(2):
        stepped = guard.measured("reschedule", 10.0, 30.0, 0.0)
    assert stepped and guard.effective == "observe"


def test_a_guard_that_is_off_never_changes_the_policy():
    guard = Guard(policy="full", patience=0)
    assert guard.effective == "full"
    assert not any(guard.measured("full", 1.0, 99.0, 0.0) for _ in range(9))


def test_experts_go_home_when_the_guard_says_so():
    planner = rollout_planner()
    moved = planner.place(sealed(0), TOPOLOGY).placement
    planner._go_home, planner.guard.policy = True, "observe"
    home = planner.place(sealed(1), TOPOLOGY).placement
    assert home.version == moved.version + 1
    assert (home.expert_of_slot == np.arange(8)).all()
