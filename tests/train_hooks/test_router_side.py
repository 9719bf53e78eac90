"""The router's side is logical: bias, recomputation, pipelined layers, losses, capacity."""

from __future__ import annotations

import pytest
from train_hooks_ranks import router_side

from app.commands.verify_matrix import ranks
from app.local.ranks import run_ranks

pytestmark = pytest.mark.ranks


def test_case_13_recomputation_replays_the_same_ids_and_the_bias_moves_once_a_step():
    result = run_ranks(router_side.bias_and_recompute, ranks(2))
    for recompute in ("full", "selective"):
        seen = result[recompute]
        assert seen["runs"] == 4 and seen["distinct_rows"] == 4
        assert seen["equal"]
        assert seen["bias_moved"] > 0
        assert seen["bias_error"] < 1e-7


def test_case_6_layers_are_known_by_global_number_under_pp_and_vpp():
    result = run_ranks(router_side.layers_under_pipelining, ranks(4))
    assert sorted(set(result["layers"])) == [(1, 3), (2,)], "a dense layer 0 never appears"
    assert "do not agree" in result["shifted"]


def test_router_losses_and_capacity_of_the_matrix_are_really_on():
    result = run_ranks(router_side.losses_and_capacity_take_part, ranks(2))
    assert result["aux"] and result["z"]
    assert all(got < want for got, want in zip(result["routed"], result["wanted"], strict=True))


def test_attention_over_context_parallel_parts_equals_the_whole():
    assert run_ranks(router_side.attention_across_parts, ranks(2))["worst"] < 1e-5
