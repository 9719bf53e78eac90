"""slime's steps and schedules, and ours."""

from __future__ import annotations

import numpy as np
import pytest

from planner.rows import Rows
from rollout_hooks.slime_steps import from_slime_schedule, split_steps, to_slime_schedule


def test_siblings_of_a_rollout_stay_in_one_step_and_trailing_rollouts_are_dropped():
    steps = split_steps([7, 8, 7, 9, 10, 11], global_batch_size=2)
    assert [list(step) for step in steps] == [[0, 2, 1], [3, 4]]


def test_too_few_rollouts_name_the_flag():
    with pytest.raises(ValueError, match="--global-batch-size"):
        split_steps([0, 1], global_batch_size=3)


def test_rows_become_slimes_schedule_and_come_back():
    rng = np.random.default_rng(0)
    steps = split_steps(list(range(12)), 6)
    rows = [
        Rows(
            cell=np.array(rng.permutation([0, 1, 2, 3, 0, 3]), np.int32), num_rows=2, num_dp_slots=2
        )
        for _ in steps
    ]
    schedule = to_slime_schedule(steps, rows, list(range(12)))
    partitions, micro_batches, num_rows, sizes = schedule
    assert num_rows == [2, 2] and sizes == [6, 6]
    assert sorted(p for part in partitions for p in part) == list(range(12))
    for part, batches in zip(partitions, micro_batches):
        assert [i for batch in batches for i in batch] == list(range(len(part)))
        assert len(batches) == 4
    assert all((a.cell == b.cell).all() for a, b in zip(from_slime_schedule(schedule, steps), rows))


def test_a_dropped_trajectory_lowers_the_number_of_rollouts_of_its_step():
    steps = split_steps([0, 1, 2], 3)
    rows = Rows(cell=np.array([0, 1, -1], np.int32), num_rows=1, num_dp_slots=2)
    assert to_slime_schedule(steps, [rows], [0, 1, 2])[3] == [2]
