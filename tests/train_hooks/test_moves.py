"""Moving experts between real gloo ranks: exact, sparing, refused when wrong, safe when torn."""

from __future__ import annotations

import pytest
from tiny import tiny_config
from train_hooks_ranks import moves

from app.local.ranks import run_ranks

pytestmark = pytest.mark.ranks
LAYOUTS = {"EP 2": (2, 2), "EP 2 x EDP 2": (4, 2), "EP 4": (4, 4)}


@pytest.mark.parametrize("world, ep", LAYOUTS.values(), ids=LAYOUTS)
def test_random_moves_keep_every_tensor_by_logical_expert(world, ep):
    result = run_ranks(moves.moves_are_exact, tiny_config(world, ep))
    assert result["keys"] == ["exp_avg", "exp_avg_sq", "itself"]
    assert result["tensors"] >= 3 * 16 * 2 * 3
    assert result["different"] == [0] * 5
    assert result["exports_equal"] == [True] * 5
    assert min(result["bytes"]) > 0
    assert result["host_buffers"] == 4, "two lanes to send and two to receive"


def test_only_moved_experts_travel():
    result = run_ranks(moves.only_moved_bytes_travel, tiny_config())
    assert result["num_moved"] == 2
    assert result["sent"] == 2 * 3 * result["expert_bytes"]


def test_bad_plans_are_refused_by_name_on_every_rank_before_anything_moves():
    result = run_ranks(moves.bad_plans_are_refused, tiny_config())
    for errors in result["errors"]:
        assert "different plans" in errors["another plan on one rank"]
        assert "rank 0" in errors["another plan on one rank"]
        assert "different plans" in errors["same digest, another placement"]
        assert "stale plan" in errors["stale"]
        assert "(3, 32, 2)" in errors["other sizes"] and "(3, 16, 2)" in errors["other sizes"]
        assert "ValueError" in errors["repeated expert"]
        assert "10" in errors["uneven"] and "4" in errors["uneven"]
    assert result["different"] == 0


def test_a_torn_commit_refuses_the_next_forward():
    result = run_ranks(moves.a_broken_commit_stops_training, tiny_config())
    assert "layers [1" in result["commit"] and "a torn cable" in result["commit"]
    assert "forward refused" in result["forward"]


def test_case_1_export_reads_logical_experts_after_a_rearrangement():
    result = run_ranks(moves.export_survives_reload, tiny_config())
    assert result["equal"] and result["loads_in_transformers"]
    assert result["slot_reader_differs"]


def test_gradients_do_not_depend_on_the_schedule():
    result = run_ranks(moves.schedules_agree, tiny_config())
    assert result["worst"] <= 1e-5
    assert abs(result["loss"][0] - result["loss"][1]) <= 1e-6 * result["scale"]


def test_host_copies_of_weights_follow_twenty_moves_in_constant_memory():
    result = run_ranks(moves.host_copies_follow, tiny_config(4, 2))
    assert result["tensors"] == 5 * 3 * 16 * 2 * 2
    assert result["different"] == 0 and result["actor_follows"]
    assert result["same_memory"] and 0 < result["staging"] <= 20_000
    assert result["sent"] > 0
    assert result["control"] > 0, "a move without the copies must be seen"
