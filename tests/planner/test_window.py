"""Windows, topologies and cost models refuse what cannot be right, by name."""

import numpy as np
import pytest
from planner_cases import window_of

from planner.cost import CostModel, Stage
from planner.policy import PlannerOptions, place
from planner.topology import Topology
from planner.window import Window


def fields(**changes):
    given = {
        "window_id": 0,
        "length": np.array([3, 5]),
        "routed_rows": np.array([2, 4]),
        "demand": np.array([[[2, 0]], [[1, 3]]]),
        "top_k": 1,
    }
    return given | changes


def test_window_sums_the_expert_load():
    window = Window(**fields())
    assert window.expert_load.tolist() == [[3, 3]]
    assert (window.num_trajectories, window.num_layers, window.num_experts) == (2, 1, 2)
    assert window.layer_numbers == (0,)
    assert window.group.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"demand": np.ones((2, 2))}, "demand: got float64"),
        ({"length": np.array([3])}, r"length: got shape \(1,\), expected \(2,\)"),
        ({"length": np.array([3, 0])}, "trajectory 1 has 0 tokens"),
        ({"length": np.array([3.0, 5.0])}, "length: got float64"),
        ({"demand": np.array([[[3, -1]], [[1, 3]]])}, "negative count"),
        ({"demand": np.array([[[2, 0]], [[1, 2]]])}, "trajectory 1, layer 4: counts sum to 3"),
        ({"layer_numbers": (1, 2)}, "layer_numbers: got 2 numbers"),
        ({"top_k": 0}, "top_k: got 0"),
    ],
)
def test_window_refuses(changes, match):
    with pytest.raises(ValueError, match=match):
        Window(**({"layer_numbers": (4,)} | fields(**changes)))


def test_estimated_demand_need_not_sum():
    demand = np.array([[[2, 0]], [[1, 2]]])
    window = Window(**fields(demand=demand, estimated=np.array([False, True])))
    assert window.estimated.tolist() == [False, True]


def test_select_keeps_order_and_id():
    window = window_of([10, 20, 30], window_id=4).select([2, 0])
    assert window.length.tolist() == [30, 10]
    assert window.window_id == 4


def test_topology_partitions_the_slots():
    topology = Topology(edp_shards=((2, 0), (1,)), num_ep_ranks=2, capacity=10)
    assert topology.shard_of_slot.tolist() == [0, 1, 0]
    assert (topology.num_dp_slots, topology.num_shards, topology.row_multiple) == (3, 2, 1)
    uniform = Topology.uniform(dp=4, ep=2, edp=2, capacity=10, vpp=2, microbatch_group=3)
    assert uniform.edp_shards == ((0, 1), (2, 3))
    assert uniform.row_multiple == 3


@pytest.mark.parametrize("shards", [(), ((0, 1), (1,)), ((0, 2),), ((0,), ())])
def test_topology_refuses_what_is_no_partition(shards):
    with pytest.raises(ValueError, match="edp_shards"):
        Topology(edp_shards=shards, num_ep_ranks=1, capacity=10)


def test_sizes_below_one_are_refused_by_name():
    with pytest.raises(ValueError, match="capacity: got 0"):
        Topology.uniform(dp=1, ep=1, capacity=0)
    with pytest.raises(ValueError, match="not a positive multiple of edp"):
        Topology.uniform(dp=3, ep=1, edp=2, capacity=1)


def test_cost_model_refuses_wrong_coefficients():
    with pytest.raises(ValueError, match=r"Stage 'a'\.beta"):
        Stage(name="a", alpha=1.0, beta=-1.0)
    with pytest.raises(ValueError, match="names repeat"):
        CostModel(stages=(Stage(name="a", alpha=1.0), Stage(name="a", alpha=2.0)))


def test_options_and_policy_are_checked():
    with pytest.raises(ValueError, match=r"PlannerOptions\.stop: got 'soon'"):
        PlannerOptions(stop="soon")
    with pytest.raises(ValueError, match="both None"):
        PlannerOptions(budget_seconds=None)
    with pytest.raises(ValueError, match="policy: got 'fast'"):
        place(None, None, None, "fast", PlannerOptions())
