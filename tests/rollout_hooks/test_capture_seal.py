"""Sealing: demand sums, estimates for missing captures, coverage, bytes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("planner.window")

from rollout_hooks.counts import count
from rollout_hooks.estimate import demand_shares, estimate_counts
from rollout_hooks.routed_experts import CaptureError, CaptureSpec
from rollout_hooks.seal import capture_coverage, seal
from rollout_hooks.trajectory import Trajectory

SPEC = CaptureSpec(num_hidden_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2)


def make_trajectory(i, num_tokens, *, captured=True, start_len=0):
    rng = np.random.default_rng(i)
    num_rows = max(0, num_tokens - 1 - start_len)
    routed = np.argsort(rng.random((num_rows, 3, 8)), -1)[..., :2].astype(np.uint8)
    return Trajectory(
        sample_id=f"s{i}",
        group=i // 2,
        tokens=np.arange(num_tokens, dtype=np.int32),
        num_prompt_tokens=1,
        logprobs=np.zeros(num_tokens - 1, np.float32),
        routed=routed if captured else None,
        counts=count(routed, 8) if captured else None,
        start_len=start_len,
    )


def test_seal_stacks_demand_and_counts_real_rows_only():
    trajectories = [
        make_trajectory(0, 5),
        make_trajectory(1, 1),
        make_trajectory(2, 9, start_len=3),
    ]
    window = seal(trajectories, 7, SPEC)
    assert window.window_id == 7 and window.layer_numbers == (1, 2, 3) and window.top_k == 2
    assert window.length.tolist() == [5, 1, 9] and window.routed_rows.tolist() == [4, 0, 5]
    assert window.group.tolist() == [0, 0, 1] and not window.estimated.any()
    assert (window.demand.sum(2) == window.routed_rows[:, None] * 2).all()
    assert np.array_equal(window.demand[0], trajectories[0].counts)
    assert capture_coverage(window) == 1.0


def test_case_11_error_names_the_sample_and_how_many():
    trajectories = [make_trajectory(0, 5), make_trajectory(1, 5, captured=False)]
    with pytest.raises(CaptureError, match=r"sample s1: no capture \(1 of 2 .*return_routed_exp"):
        seal(trajectories, 0, SPEC)


@pytest.mark.parametrize("with_shares", [True, False])
def test_case_11_estimate_fills_in_marks_and_reports_coverage(with_shares):
    shares = demand_shares(seal([make_trajectory(3, 50)], 0, SPEC).demand)
    trajectories = [make_trajectory(0, 5), make_trajectory(1, 13, captured=False)]
    window = seal(trajectories, 1, SPEC, shares if with_shares else None, "estimate")
    assert window.estimated.tolist() == [False, True]
    assert (window.demand.sum(2) == window.routed_rows[:, None] * 2).all()
    assert capture_coverage(window) == pytest.approx(4 / 16)
    if with_shares:
        assert np.abs(window.demand[1] - shares * 24).max() <= 1
    else:
        assert (window.demand[1] == 3).all()


def test_a_window_without_any_capture_is_planned_on_estimates():
    window = seal(
        [make_trajectory(i, 6, captured=False) for i in range(4)], 0, SPEC, None, "estimate"
    )
    assert window.estimated.all() and capture_coverage(window) == 0.0


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 12).flatmap(
        lambda num_experts: st.tuples(
            st.lists(st.floats(0, 1e6), min_size=num_experts, max_size=num_experts).filter(
                lambda row: sum(row) > 1e-9
            ),
            st.integers(1, num_experts),
        )
    ),
    st.integers(0, 70_000),
)
def test_an_estimate_sums_and_never_exceeds_the_rows(shares_and_top_k, num_rows):
    shares, top_k = shares_and_top_k
    counts = estimate_counts(np.array([shares]), num_rows, top_k)
    assert counts.sum() == num_rows * top_k
    assert counts.min() >= 0 and counts.max() <= num_rows


@pytest.mark.parametrize("shares", [[[0.0, 0.0]], [[-1.0, 2.0]], [[np.nan, 1.0]], [[1.0]]])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(ValueError, match="shares"):
        estimate_counts(np.array(shares), 4, 2)


def test_shares_of_an_empty_layer_are_uniform():
    shares = demand_shares(np.array([[[0, 0], [3, 1]]]))
    assert shares.tolist() == [[0.5, 0.5], [0.75, 0.25]]


def test_demand_that_does_not_sum_names_sample_and_layer():
    good = make_trajectory(0, 5)
    counts = good.counts.copy()
    counts[1, 0] += 1  # a padded row credited to expert 0
    with pytest.raises(CaptureError, match="sample s0: layer 2: demand sums to 9, expected 8"):
        seal([dataclasses.replace(good, counts=counts)], 0, SPEC)


def test_demand_of_a_wrong_shape_or_above_the_rows_is_refused():
    good = make_trajectory(0, 5)
    with pytest.raises(CaptureError, match="sample s0: demand has shape"):
        seal([dataclasses.replace(good, counts=good.counts[:2])], 0, SPEC)
    lumped = np.zeros_like(good.counts)
    lumped[:, 0] = 8
    with pytest.raises(CaptureError, match="sample s0: an expert has demand outside"):
        seal([dataclasses.replace(good, counts=lumped)], 0, SPEC)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="trajectories"):
        seal([], 0, SPEC)
    with pytest.raises(ValueError, match="previous_shares"):
        seal([make_trajectory(0, 5)], 0, SPEC, np.ones((3, 7)))
    with pytest.raises(ValueError, match="missing"):
        seal([make_trajectory(0, 5)], 0, SPEC, None, "skip")


def test_case_12_a_window_holds_two_bytes_a_layer_and_expert():
    window = seal([make_trajectory(i, 6) for i in range(4)], 0, SPEC)
    assert window.demand.dtype == np.uint16 and window.demand.nbytes == 4 * 3 * 8 * 2
