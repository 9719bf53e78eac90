"""Placement: permutations, rank loads, exact greedy repair (Section 3.2), case 15."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import window_of

from planner.move_cost import MoveCost
from planner.placement import Placement, coefficient_of_variation, rank_load
from planner.placing.choice import (
    FIGURES,
    choose,
    cv_lower_bound,
    figures_along,
    figures_of,
    figures_of_layers,
    owner_load,
)
from planner.placing.few_moves import cyclic_repair, cyclic_repair_reference, random_orders
from planner.placing.greedy import (
    NO_IMPROVING_SWAP,
    TARGET_MET,
    repair_layer,
    repair_layer_reference,
)
from planner.policy import PlannerOptions, place
from planner.topology import Topology


def test_identity_owns_experts_in_blocks():
    placement = Placement.identity(2, 8, 4)
    assert placement.owner.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2
    assert (placement.slot_of_expert == placement.expert_of_slot).all()


def test_slot_of_expert_inverts_expert_of_slot():
    placement = Placement(expert_of_slot=np.array([[0, 2, 1, 3]]), num_ep_ranks=2)
    assert placement.slot_of_expert.tolist() == [[0, 2, 1, 3]]
    assert placement.owner.tolist() == [[0, 1, 0, 1]]


def test_experts_that_do_not_divide_over_ranks_are_refused():
    with pytest.raises(ValueError, match="10 experts cannot be split evenly over num_ep_ranks=4"):
        Placement.identity(1, 10, 4)


def test_an_expert_twice_is_refused():
    with pytest.raises(ValueError, match="layer 1 is not a permutation"):
        Placement(expert_of_slot=np.array([[0, 1, 2, 3], [0, 1, 1, 3]]), num_ep_ranks=2)


def test_rank_load_sums_the_owned_experts():
    placement = Placement(expert_of_slot=np.array([[0, 2, 1, 3]]), num_ep_ranks=2)
    assert rank_load(np.array([[1, 10, 100, 1000]]), placement).tolist() == [[101, 1010]]


def test_cv_of_a_layer_without_load_is_zero():
    assert coefficient_of_variation(np.array([[0, 0], [1, 3]])).tolist() == [0.0, 0.5]


@settings(max_examples=60, deadline=None)
@given(
    num_ranks=st.sampled_from([1, 2, 4, 8]),
    per_rank=st.integers(1, 5),
    largest=st.sampled_from([1, 4, 60, 5000]),
    max_swaps=st.sampled_from([0, 1, 1000]),
    ranks_per_node=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 10_000),
)
def test_greedy_repair_equals_its_reference(
    num_ranks, per_rank, largest, max_swaps, ranks_per_node, seed
):
    rng = np.random.default_rng(seed)
    load = rng.integers(0, largest + 1, num_ranks * per_rank)
    owner = rng.permutation(np.repeat(np.arange(num_ranks), per_rank))
    by_kernel, by_reference = owner.copy(), owner.copy()
    path, path_reference = np.zeros((2, max_swaps, 2), np.int32)
    kernel = repair_layer(load, by_kernel, num_ranks, 5e-4, path, ranks_per_node)
    reference = repair_layer_reference(
        load, by_reference, num_ranks, 5e-4, path_reference, ranks_per_node
    )
    assert kernel == reference
    assert (path == path_reference).all()
    assert (by_kernel == by_reference).all()
    assert (np.bincount(by_kernel, minlength=num_ranks) == per_rank).all()


def test_repair_stops_at_the_target_and_says_when_no_swap_improves():
    owner = np.array([0, 0, 1, 1])
    path = np.zeros((9, 2), np.int32)
    assert repair_layer(np.array([4, 4, 4, 4]), owner, 2, 5e-4, path, 2) == (0, TARGET_MET)
    assert repair_layer(np.array([9, 1, 1, 1]), owner, 2, 5e-4, path, 2) == (0, NO_IMPROVING_SWAP)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), num_ranks=st.sampled_from([2, 4, 8]))
def test_unmoved_experts_keep_their_slots(seed, num_ranks):
    rng = np.random.default_rng(seed)
    before = Placement(
        expert_of_slot=np.stack([rng.permutation(16) for _ in range(3)]), num_ep_ranks=num_ranks
    )
    owner = before.owner.copy()
    for layer in range(3):
        a, b = rng.choice(16, 2, replace=False)
        owner[layer, [a, b]] = owner[layer, [b, a]]
    after = before.with_owner(owner)
    assert (after.owner == owner).all()
    stay = owner == before.owner
    assert (after.slot_of_expert[stay] == before.slot_of_expert[stay]).all()
    assert after.num_moved(before) == int((~stay).sum())
    assert after.version == (before.version if stay.all() else before.version + 1)


@pytest.mark.parametrize("policy", ["off", "observe", "base", "reschedule"])
def test_policies_that_do_not_place_return_the_carried_placement(policy):
    window = window_of([30] * 20)
    carried = Placement.identity(3, 16, 4)
    topology = Topology.uniform(dp=2, ep=4, capacity=100)
    result = place(window, topology, carried, policy, PlannerOptions())
    assert result.placement is carried
    assert result.num_moved == 0


def test_place_balances_and_carries_the_previous_placement():
    topology = Topology.uniform(dp=2, ep=4, capacity=100)
    carried = Placement.identity(3, 64, 4)
    first = window_of([90] * 200, num_experts=64, top_k=4)
    result = place(first, topology, carried, "full", PlannerOptions())
    assert result.cv_max < result.cv_before
    assert result.cv_max <= 5e-4 or result.stop_reason == "no_improving_swap"
    again = place(first, topology, result.placement, "full", PlannerOptions())
    assert again.num_moved == 0
    assert again.placement.version == result.placement.version == 1


def test_max_moves_limits_every_layer():
    topology = Topology.uniform(dp=2, ep=4, capacity=100)
    window = window_of([90] * 200, num_layers=1)
    options = PlannerOptions(max_moves=2)
    result = place(window, topology, Placement.identity(1, 16, 4), "full", options)
    assert result.num_moved == 2
    assert result.stop_reason == "max_moves"


def test_sizes_that_disagree_are_refused():
    window = window_of([30] * 20)
    topology = Topology.uniform(dp=2, ep=4, capacity=100)
    with pytest.raises(ValueError, match="window has"):
        place(window, topology, Placement.identity(2, 16, 4), "full", PlannerOptions())
    with pytest.raises(ValueError, match="the topology has 4"):
        place(window, topology, Placement.identity(3, 16, 8), "full", PlannerOptions())


@settings(max_examples=40, deadline=None)
@given(
    num_ranks=st.sampled_from([2, 4, 8]),
    per_rank=st.integers(1, 4),
    largest=st.sampled_from([50, 1000]),
    seed=st.integers(0, 10_000),
)
def test_cyclic_repair_equals_its_reference_and_never_moves_more_than_greedy(
    num_ranks, per_rank, largest, seed
):
    rng = np.random.default_rng(seed)
    load = rng.integers(0, largest + 1, num_ranks * per_rank)
    owner = rng.permutation(np.repeat(np.arange(num_ranks), per_rank))
    orders = random_orders(1, num_ranks, seed)[0, :4]
    by_kernel, by_reference, greedy = owner.copy(), owner.copy(), owner.copy()
    kernel = cyclic_repair(load, by_kernel, num_ranks, 2e-2, orders)
    assert kernel == cyclic_repair_reference(load, by_reference, num_ranks, 2e-2, orders)
    assert (by_kernel == by_reference).all()
    assert (np.bincount(by_kernel, minlength=num_ranks) == per_rank).all()
    _, reason = repair_layer(load, greedy, num_ranks, 2e-2, np.zeros((99, 2), np.int32), num_ranks)
    if reason == TARGET_MET:
        assert kernel[1] == TARGET_MET
        assert kernel[0] <= (greedy != owner).sum()


SKEWED = window_of([90] * 300, num_experts=64, top_k=4, seed=3)
CARRIED = Placement.identity(3, 64, 8)


def placed(topology=None, **options):
    topology = topology or Topology.uniform(dp=2, ep=8, capacity=100)
    return place(SKEWED, topology, CARRIED, "full", PlannerOptions(**options))


def test_few_moves_moves_fewer_experts_to_the_same_target():
    greedy, few = placed(cv_target=3e-3), placed(cv_target=3e-3, placement="few_moves")
    assert few.num_moved < greedy.num_moved
    assert max(few.cv_max, greedy.cv_max) <= 3e-3


def test_free_moves_are_all_worth_it_and_dear_moves_are_not():
    free = placed(stop="net_benefit")
    assert free.num_moved > 0 and free.stop_reason == "net_benefit"
    dear = MoveCost(bytes_per_expert=1e6, seconds_per_byte=1.0)
    assert placed(stop="net_benefit", move=dear).num_moved == 0


def test_net_benefit_grows_as_moves_get_cheaper():
    results = [
        placed(stop="net_benefit", move=MoveCost(bytes_per_expert=1.0, seconds_per_byte=price))
        for price in (10.0, 1.0, 0.1, 0.01)
    ]
    moved = [result.num_moved for result in results]
    assert moved == sorted(moved) and moved[0] < moved[-1]
    for result in results:
        assert result.predicted_saving >= result.predicted_cost


@pytest.mark.parametrize("stop", ["cv", "net_benefit"])
def test_move_limits_spread_a_cold_start_over_windows(stop):
    topology = Topology.uniform(dp=2, ep=8, capacity=100)
    placement, moved, loads = CARRIED, [], []
    options = PlannerOptions(stop=stop, max_mb=8.0, move=MoveCost(bytes_per_expert=2**20))
    for _ in range(12):
        result = place(SKEWED, topology, placement, "full", options)
        placement = result.placement
        moved.append(result.num_moved)
        loads.append(rank_load(SKEWED.expert_load, placement).max(axis=1).sum())
    assert max(moved) <= 8 and moved[0] > 0
    assert moved[-1] == 0
    assert loads[-1] < loads[0]


def test_swaps_stay_inside_nodes_unless_crossing_pays():
    topology = Topology.uniform(dp=2, ep=8, capacity=100, ranks_per_node=4)
    dear = MoveCost(bytes_per_expert=1.0, seconds_per_remote_byte=1e6)
    inside = placed(topology, move=dear)
    assert inside.num_moved > 0
    assert inside.num_cross_node == inside.added_remote_tokens == 0
    across = placed(topology)
    assert across.num_cross_node > 0
    assert across.cv_max < inside.cv_max


def test_an_unreachable_target_is_certified():
    load = np.array([[90, 1, 1, 1, 1, 1, 1, 4]])
    bound = cv_lower_bound(load, 4)
    assert bound[0] == pytest.approx(np.std([91, 3, 3, 3]) / 25)
    window = window_of([90] * 4, num_layers=1, num_experts=8, top_k=1)
    window.demand[:] = 0
    window.demand[:, 0, 0] = 89
    topology = Topology.uniform(dp=2, ep=4, capacity=100)
    result = place(window, topology, Placement.identity(1, 8, 4), "full", PlannerOptions())
    assert result.cv_bound > 5e-4 or result.stop_reason == "no_improving_swap"


@settings(max_examples=40, deadline=None)
@given(num_ranks=st.sampled_from([2, 4]), node=st.sampled_from([1, 2]), seed=st.integers(0, 999))
def test_figures_along_a_path_equal_those_from_scratch(num_ranks, node, seed):
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 100, 4 * num_ranks)
    before, start = (rng.permutation(np.repeat(np.arange(num_ranks), 4)) for _ in range(2))
    path = np.array([rng.choice(len(load), 2, replace=False) for _ in range(5)], np.int32)
    table = np.zeros((5, len(FIGURES)), np.int64)
    figures_along(load, before, start, path, num_ranks, node, table)
    owner = start.copy()
    for swap, (a, b) in enumerate(path):
        owner[a], owner[b] = owner[b], owner[a]
        assert tuple(table[swap]) == figures_of(load, before, owner, num_ranks, node)


@settings(max_examples=30, deadline=None)
@given(num_ranks=st.sampled_from([2, 4]), node=st.sampled_from([1, 2, 4]), seed=st.integers(0, 999))
def test_figures_of_layers_equal_those_of_each_layer(num_ranks, node, seed):
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 100, (3, 4 * num_ranks))
    blocks = np.repeat(np.arange(num_ranks), 4)
    before, owner = rng.permuted(np.tile(blocks, (2, 3, 1)), axis=2)
    whole = figures_of_layers(load, before, owner, num_ranks, node)
    for layer in range(3):
        one = figures_of(load[layer], before[layer], owner[layer], num_ranks, node)
        assert tuple(int(values[layer]) for values in whole) == one


def test_owner_load_equals_rank_load():
    rng = np.random.default_rng(0)
    slots = np.stack([rng.permutation(16) for _ in range(3)])
    placement = Placement(expert_of_slot=slots, num_ep_ranks=4)
    load = rng.integers(0, 100, (3, 16))
    assert (owner_load(load, placement.owner, 4) == rank_load(load, placement)).all()


def test_an_owner_that_overfills_a_rank_is_refused():
    with pytest.raises(ValueError, match="layer 1 does not give every EP rank 2 experts"):
        Placement.identity(2, 4, 2).with_owner(np.array([[0, 0, 1, 1], [0, 1, 1, 1]]))


def test_choice_takes_the_steepest_steps_within_the_limit():
    moves = [np.array([2, 4]), np.array([2, 4])]
    value = [np.array([10.0, 12.0]), np.array([3.0, 9.0])]
    assert choose(moves, value, None) == [1, 1]
    assert choose(moves, value, 2) == [0, -1]
    assert choose(moves, value, 6) == [0, 1]
    assert choose([np.array([2])], [np.array([-1.0])], None) == [-1]
