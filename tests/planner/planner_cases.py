"""Random windows, topologies and costs for the planner's tests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from planner.cost import CostModel, Stage
from planner.topology import Topology
from planner.window import Window

COST = CostModel(
    stages=(Stage(name="linear", alpha=9.0), Stage(name="attention", alpha=3.0, beta=4.0))
)


def window_of(
    lengths: list[int] | np.ndarray,
    *,
    num_layers: int = 3,
    num_experts: int = 16,
    top_k: int = 2,
    group_size: int = 1,
    window_id: int = 0,
    seed: int = 0,
) -> Window:
    """A window of the given lengths with skewed random routing."""
    rng = np.random.default_rng(seed)
    length = np.asarray(lengths, np.int64)
    routed = np.maximum(length - 1, 0)
    popularity = rng.gamma(1.0, size=(num_layers, num_experts)) + 1e-3
    demand = np.empty((len(length), num_layers, num_experts), np.int32)
    for layer in range(num_layers):
        share = popularity[layer] / popularity[layer].sum()
        demand[:, layer] = rng.multinomial(routed * top_k, share)
    return Window(
        window_id=window_id,
        length=length,
        routed_rows=routed,
        demand=demand,
        top_k=top_k,
        group=np.arange(len(length)) // group_size,
    )


@st.composite
def jobs(draw, max_trajectories: int = 40) -> tuple[Window, Topology]:
    """A window and a topology on which rows without an empty cell may or may not exist."""
    shard_sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    slots = list(draw(st.permutations(range(sum(shard_sizes)))))
    shards = []
    for size in shard_sizes:
        shards.append(tuple(slots[:size]))
        slots = slots[size:]
    num_ep_ranks = draw(st.sampled_from([2, 4, 32]))
    topology = Topology(
        edp_shards=tuple(shards),
        num_ep_ranks=num_ep_ranks,
        capacity=100,
        pp=draw(st.sampled_from([1, 2])),
        vpp=draw(st.sampled_from([1, 2])),
        microbatch_group=draw(st.sampled_from([1, 2])),
    )
    lengths = draw(st.lists(st.integers(1, 130), min_size=1, max_size=max_trajectories))
    window = window_of(
        lengths,
        num_layers=draw(st.sampled_from([1, 3, 9])),
        num_experts=32,
        window_id=draw(st.integers(0, 5)),
        group_size=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 1000)),
    )
    return window, topology


def not_worse(key, than) -> bool:
    """Lexicographic, where sums that differ by rounding only are equal."""
    for mine, other in zip(key, than, strict=True):
        if mine != pytest.approx(other, rel=1e-9):
            return bool(mine < other)
    return True
