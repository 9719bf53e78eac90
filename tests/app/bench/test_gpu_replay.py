"""`routepack bench gpu-replay`: what is executed is what was planned; times are not asserted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from app.bench.gpu_replay import CPU, FORCED, bench_gpu_replay, execute, replay_on
from app.bench.gpu_replay_kernels import Kernels
from app.bench.gpu_replay_rows import balanced, expected_copies, rows_of
from planner.placement import Placement, rank_load
from planner.policies import COMPARED
from planner.policy import PlannerOptions, make_plan
from planner.recorded.synthetic import synthetic_windows
from planner.score import rank_demand, row_costs


class Counting:
    """Kernels that note what they are given; a token takes a second."""

    def __init__(self):
        self.cells, self.routed = [], []

    def dense(self, lengths) -> float:
        self.cells.append(list(lengths))
        return float(sum(lengths))

    def experts(self, tokens, num_copies) -> float:
        self.routed.append((list(tokens), num_copies))
        return float(sum(tokens))


@pytest.fixture(scope="module")
def window():
    return next(iter(synthetic_windows(CPU.corpus, 1, seed=0)))


def planned(window, policy):
    identity = Placement.identity(window.num_layers, window.num_experts, CPU.topology.num_ep_ranks)
    options = PlannerOptions(budget_seconds=None, budget_proposals=2000, num_threads=1)
    return make_plan(window, CPU.topology, CPU.cost, identity, policy, options)


@pytest.mark.parametrize("policy", COMPARED)
def test_every_rank_of_every_row_executes_the_planned_tokens(window, policy):
    plan, kernels = planned(window, policy), Counting()
    seconds = execute(window, plan.rows, plan.placement, CPU.topology, kernels)
    num_slots, num_ranks = CPU.topology.num_dp_slots, CPU.topology.num_ep_ranks
    assert len(kernels.cells) == plan.rows.num_rows * num_slots
    for k, lengths in enumerate(kernels.cells):
        row, slot = divmod(k, num_slots)
        assert lengths == window.length[plan.rows.trajectories(row, slot)].tolist()
    tokens = np.array([t for t, _ in kernels.routed])
    tokens = tokens.reshape(plan.rows.num_rows, window.num_layers, num_ranks, -1)
    load = rank_load(window.expert_load, plan.placement)
    assert (tokens.sum(axis=(0, 3)) == load).all()
    by_slot = np.take_along_axis(window.expert_load, plan.placement.expert_of_slot, axis=1)
    assert (tokens.sum(axis=0).reshape(by_slot.shape) == by_slot).all()
    # a second a token: the synchronized time is the busiest cell plus the busiest rank by layer
    q = rank_demand(window.demand, plan.placement)
    expert = row_costs(window.length, q, plan.rows, CPU.topology, CPU.cost)[1]
    dense = plan.rows.cell_tokens(window.length).max(axis=1, keepdims=True)
    assert seconds == pytest.approx(dense + expert * CPU.topology.capacity)


def test_copies_are_deduplicated_by_rank(window):
    plan = planned(window, "off")
    for work in rows_of(window, plan.rows, CPU.topology, plan.placement):
        routed = work.tokens.sum(axis=2)
        assert (work.copies <= routed).all() and (2 * work.copies >= routed).all()
    # everything on one rank: each of the 10 tokens is sent once, whatever its top-k
    assert expected_copies(np.array([[[12, 8], [0, 0]]]), 10, 2).tolist() == [[10, 0]]


def test_forced_balance_uses_every_expert_equally_often(window):
    load = balanced(window).expert_load
    assert load.sum() == window.expert_load.sum()
    assert load.max() - load.min() <= 1


def test_the_experts_compute_what_their_tokens_need():
    kernels = Kernels(CPU.shape, 3, "cpu", 1)
    x = torch.randn(5, CPU.shape.hidden, generator=torch.Generator().manual_seed(0))
    found = kernels._grouped(x, torch.tensor([3, 0, 2]))
    for row, expert in enumerate([0, 0, 0, 2, 2]):
        gate, up = (x[row] @ kernels.expert_up[expert]).chunk(2)
        expected = (F.silu(gate) * up) @ kernels.expert_down[expert]
        assert torch.allclose(found[row], expected, atol=1e-5)


def test_figures_of_the_model_agree_with_plans_that_cost_what_it_says(window):
    class Modelled(Counting):
        def dense(self, lengths):
            return float(CPU.cost.dense_work(np.array(lengths), CPU.topology.capacity).sum())

        def experts(self, tokens, num_copies):
            return sum(tokens) / CPU.topology.capacity

    result = replay_on(replace(CPU, num_windows=2), Modelled(), "none")
    for name in (*COMPARED[1:], FORCED):
        measured = result.figures[f"gpu_replay.{name}_over_off"]
        assert measured == pytest.approx(result.figures[f"gpu_replay.model_{name}_over_off"])
    assert result.figures["gpu_replay.correlation"] == pytest.approx(1.0)
    assert result.figures["gpu_replay.max_rel_error"] == pytest.approx(0.0, abs=1e-9)
    assert result.figures["gpu_replay.full_over_off"] < 1
    assert {name: len(rows) for name, rows in result.details["rows"].items()}.keys() == {
        *COMPARED,
        FORCED,
    }


def test_a_missing_gpu_is_named():
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible here")
    with pytest.raises(ValueError, match="no CUDA device is visible here; use --device cpu"):
        bench_gpu_replay(True, "cuda")
