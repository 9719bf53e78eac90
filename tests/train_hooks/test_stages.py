"""Pipeline stages: what concerns the world is decided from the whole placement."""

from __future__ import annotations

import pytest
from tiny import tiny_config
from train_hooks_ranks import stages

from app.local.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.ranks


def test_a_stage_without_moves_enters_the_end_of_an_asynchronous_save_too():
    result = run_ranks(stages.settles_with_one_stage_moving, tiny_config(4, 2), True)
    assert result == {"error": "", "settled": True}


def test_control_a_stage_that_is_not_told_leaves_the_others_waiting():
    try:
        result = run_ranks(stages.settles_with_one_stage_moving, tiny_config(4, 2), False)
    except RankFailure:
        return
    assert not result["settled"] and result["error"]
