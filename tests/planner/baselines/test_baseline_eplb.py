"""EPLB: packing, replicas, hierarchy, and the counts of the paper's Table 5."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.baselines.eplb import EplbPlan, _pack, _pack_compiled, eplb
from planner.placement import Placement, rank_load


def random_load(seed, layers=3, experts=16):
    return np.random.default_rng(seed).gamma(0.7, 1000, (layers, experts)).astype(np.int64)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_packing_kernel_equals_its_plain_twin(data):
    num_packs = data.draw(st.integers(1, 6))
    size = num_packs * data.draw(st.integers(1, 6))
    weight = data.draw(st.lists(st.integers(0, 20), min_size=size, max_size=size))
    weight = [float(w) for w in weight]
    assert _pack(weight, num_packs) == _pack_compiled(weight, num_packs)
    pack, position = _pack(weight, num_packs)
    assert len(set(zip(pack, position, strict=True))) == size
    assert np.bincount(pack).tolist() == [size // num_packs] * num_packs


def test_packing_follows_heaviest_to_lightest_by_hand():
    # 9 to pack 0, 7 and 6 to pack 1 (7 < 9), 5 to pack 0 (9 < 13), 1 to pack 1 (13 < 14), 0 left
    pack, position = _pack([5.0, 9.0, 1.0, 7.0, 6.0, 0.0], 2)
    assert pack == [0, 0, 1, 1, 1, 0]
    assert position == [1, 0, 2, 0, 1, 2]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 999),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0, 1, 2, 4]),
    st.sampled_from([(1, 1), (4, 2), (8, 4), (2, 4), (4, 1)]),
)
def test_every_expert_is_placed_and_load_is_conserved(seed, ranks, replicas, groups_nodes):
    groups, nodes = groups_nodes
    if ranks % nodes:
        return
    load = random_load(seed)
    options = {"replicas_per_rank": replicas, "num_groups": groups, "num_nodes": nodes}
    plan = eplb(load, ranks, **options)
    plain = eplb(load, ranks, compiled=False, **options)
    assert np.array_equal(plan.expert_of_slot, plain.expert_of_slot)
    assert plan.expert_of_slot.shape == (3, 16 + replicas * ranks)
    for layer in range(3):
        held = np.bincount(plan.expert_of_slot[layer], minlength=16)
        assert np.array_equal(held, plan.num_replicas[layer]) and held.min() >= 1
    assert np.allclose(plan.rank_load(load).sum(1), load.sum(1))


def test_groups_stay_on_one_node():
    plan = eplb(random_load(5), 4, num_groups=4, num_nodes=2)
    for layer in plan.expert_of_slot:
        node_of_expert = np.empty(16, int)
        node_of_expert[layer] = np.arange(16) // 8
        assert all(len(set(node_of_expert[g * 4 : g * 4 + 4])) == 1 for g in range(4))


def test_replicas_lower_the_worst_rank_and_split_evenly():
    load = np.array([[100, 1, 1, 1, 1, 1, 1, 1]])
    worst = [eplb(load, 4, replicas_per_rank=r).rank_load(load).max() for r in (0, 1, 2)]
    assert worst[0] == 101 and worst[0] > worst[1] > worst[2]


def test_without_replicas_the_plan_is_a_placement():
    load = random_load(1)
    plan = eplb(load, 4)
    placement = plan.placement()
    assert np.array_equal(rank_load(load, placement), plan.rank_load(load))
    identity = Placement.identity(3, 16, 4)
    moved = (placement.owner != identity.owner).sum()
    assert plan.num_moved(identity) == moved and plan.num_moved(plan) == 0
    with pytest.raises(ValueError, match="replicas_per_rank=0"):
        eplb(load, 4, replicas_per_rank=2).placement()


def test_moves_count_slots_whose_expert_is_new_on_the_rank():
    def plan(slots):
        slots = np.array([slots])
        return EplbPlan(
            expert_of_slot=slots, num_replicas=np.bincount(slots[0])[None], num_ep_ranks=2
        )

    assert plan([0, 1, 2, 2, 3, 0]).num_moved(plan([1, 0, 2, 3, 0, 0])) == 1
    with pytest.raises(ValueError, match="previous"):
        plan([0, 1, 2, 3]).num_moved(Placement.identity(1, 4, 4))


@pytest.mark.parametrize(
    "ranks, options, field",
    [
        (3, {}, "num_ep_ranks"),
        (4, {"replicas_per_rank": -1}, "replicas_per_rank"),
        (4, {"num_groups": 3}, "num_groups"),
        (4, {"num_nodes": 3}, "num_nodes"),
    ],
)
def test_sizes_that_do_not_divide_are_named(ranks, options, field):
    with pytest.raises(ValueError, match=field):
        eplb(random_load(0), ranks, **options)


def test_case_15_ten_experts_on_four_ranks_is_an_error():
    with pytest.raises(ValueError, match="4 does not divide 10 experts"):
        eplb(np.ones((1, 10), np.int64), 4)
