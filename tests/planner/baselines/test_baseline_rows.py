"""verl's and NeMo-RL's rows: executable, and what their descriptions say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.baselines import karmarkar_karp, modified_ffd, nemo_rl_rows, verl_rows
from planner.packing.slime_rows import largest_differencing
from planner.topology import Topology

CAPACITY = 100


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 130), min_size=1, max_size=60),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
)
def test_rows_are_executable(lengths, dp, group):
    length = np.array(lengths)
    topology = Topology.uniform(
        dp=dp, ep=2, capacity=CAPACITY, vpp=2 if group > 1 else 1, microbatch_group=group
    )
    for make in (verl_rows, nemo_rl_rows):
        if len(lengths) < dp and make is verl_rows:
            with pytest.raises(ValueError, match="num_parts"):
                make(length, topology)
            continue
        rows = make(length, topology)
        if rows is None:
            continue
        assert rows.num_rows % group == 0 and rows.num_dropped == 0
        count = np.bincount(rows.cell, minlength=rows.num_cells)
        tokens = rows.cell_tokens(length).ravel()
        assert count.min() >= 1  # no empty cell
        assert (tokens[count > 1] <= CAPACITY).all()  # above the cap only when alone


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40), st.integers(1, 9), st.booleans())
def test_karmarkar_karp_parts_cover_once_and_are_never_empty(weight, num_parts, equal_size):
    if len(weight) < num_parts:
        with pytest.raises(ValueError, match="num_parts"):
            karmarkar_karp(weight, num_parts, equal_size=equal_size)
        return
    parts = karmarkar_karp(weight, num_parts, equal_size=equal_size)
    assert sorted(i for part in parts for i in part) == list(range(len(weight)))
    assert min(map(len, parts)) >= 1 and all(part == sorted(part) for part in parts)
    if equal_size:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        if len(weight) % num_parts == 0:
            assert parts == largest_differencing(weight, num_parts)


def test_karmarkar_karp_by_hand():
    # 8 - 7 -> 1, 6 - 5 -> 1, then 4 - 1 -> 3 against 1: {8, 6} and {7, 5, 4}
    parts = karmarkar_karp([4, 5, 6, 7, 8], 2, equal_size=False)
    assert sorted(map(tuple, parts)) == [(0, 1, 3), (2, 4)]


def test_verl_puts_light_micro_batches_at_both_ends():
    length = np.array([90, 80, 70, 60, 50])
    rows = verl_rows(length, Topology.uniform(dp=1, ep=1, capacity=CAPACITY))
    assert rows.cell_tokens(length).ravel().tolist() == [50, 70, 90, 80, 60]


def test_case_3_the_cap_holds_where_verl_would_exceed_it():
    length = np.array([70] * 8)
    rows = verl_rows(length, Topology.uniform(dp=2, ep=1, capacity=80))
    assert rows.num_rows == 4 and rows.cell_tokens(length).max() == 70


def test_case_9_seven_trajectories_on_four_slots():
    length = np.array([30] * 7)
    topology = Topology.uniform(dp=4, ep=1, capacity=CAPACITY)
    for rows in (verl_rows(length, topology), nemo_rl_rows(length, topology)):
        assert rows.num_rows == 1 and (np.bincount(rows.cell) >= 1).all()


def test_case_4_a_long_trajectory_is_alone():
    length = np.array([250, 40, 40, 40])
    topology = Topology.uniform(dp=2, ep=1, capacity=CAPACITY)
    rows = nemo_rl_rows(length, topology)
    assert (rows.cell == rows.cell[0]).sum() == 1


def test_modified_ffd_fills_large_bins_with_a_medium_or_two_small_items():
    # 60 takes the medium 40; 55 takes the smallest small item, 17, and the largest that fits, 28
    length = np.array([60, 55, 40, 17, 27, 28, 10])
    assert modified_ffd(length, 100) == [[0, 2], [1, 3, 5], [4, 6]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=80))
def test_modified_ffd_packs_everything_within_the_cap(lengths):
    bins = modified_ffd(np.array(lengths), 100)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in members) for members in bins]
    assert max(totals) <= 100 and min(totals) > 0
    assert sum(total <= 50 for total in totals) <= 1  # two half-empty bins would be one


def test_nemo_rl_takes_items_off_the_most_populated_bins():
    length = np.array([20] * 5)
    rows = nemo_rl_rows(length, Topology.uniform(dp=4, ep=1, capacity=CAPACITY))
    assert rows.num_rows == 1
    assert sorted(np.bincount(rows.cell).tolist()) == [1, 1, 1, 2]
    assert nemo_rl_rows(length[:3], Topology.uniform(dp=4, ep=1, capacity=CAPACITY)) is None


def test_modified_ffd_refuses_an_empty_trajectory():
    with pytest.raises(ValueError, match="at least 1"):
        modified_ffd(np.array([3, 0]), 10)
