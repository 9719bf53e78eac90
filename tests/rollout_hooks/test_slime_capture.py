"""What the hook counts of slime's samples, and the start-up check of the capture."""

from __future__ import annotations

import numpy as np
import pytest
from slime_cases import job, sample

from rollout_hooks.routed_experts import CaptureError, CaptureSpec, encode
from rollout_hooks.slime_capture import capture, demand_of_samples, narrow_type
from rollout_hooks.slime_probe import check_capture


def test_capture_counts_moe_layers_and_keeps_narrow_routing_of_all_layers():
    s = sample()
    capture(job(), s)
    assert s.rollout_routed_experts.dtype == np.uint8
    assert s.rollout_routed_experts.shape == (4, 3, 2)
    assert (s.rollout_routed_experts[:, 0] == 0).all()  # the dense layer
    assert s.routepack_counts.tolist() == [[4, 4, 0, 0, 0, 0, 0, 0]] * 2
    again = s.rollout_routed_experts
    capture(job(), s)
    assert s.rollout_routed_experts is again


@pytest.mark.parametrize(("experts", "dtype"), [(256, "uint8"), (257, "int16"), (512, "int16")])
def test_the_kept_type_is_one_that_torch_can_hold(experts, dtype):
    assert narrow_type(experts) == np.dtype(dtype)


@pytest.mark.parametrize("bad", [9, -1])
def test_an_impossible_capture_names_the_sample(bad):
    s = sample()
    s.rollout_routed_experts[2, 1, 0] = bad
    with pytest.raises(CaptureError, match=r"sample 3 \(group 1\)"):
        capture(job(), s)


def test_rows_that_contradict_the_tokens_are_refused():
    s = sample()
    s.tokens = list(range(9))
    with pytest.raises(CaptureError, match="9 tokens"):
        capture(job(), s)


def test_a_missing_capture_is_an_error_that_names_the_flag_or_an_estimate():
    samples = [sample(), sample(index=4, rollout_routed_experts=None)]
    with pytest.raises(CaptureError, match="--use-rollout-routing-replay"):
        demand_of_samples(job(), samples, "error")
    demand, groups = demand_of_samples(job(), samples, "estimate")
    assert demand[0] is not None and demand[1] is None and groups == [1, 1]


def test_an_impossible_capture_is_estimated_only_where_nothing_replays_it():
    def broken():
        s = sample()
        s.rollout_routed_experts[0, 1, 0] = 99
        return s

    with pytest.raises(CaptureError):
        demand_of_samples(job(), [broken()], "estimate")
    demand, _ = demand_of_samples(job(use_rollout_routing_replay=False), [broken()], "estimate")
    assert demand == [None]


def test_the_start_up_check_says_what_to_install_when_the_router_drops_the_field():
    spec = CaptureSpec(num_hidden_layers=3, moe_layers=(1, 2), num_experts=8, top_k=2)
    asked = []

    def server(routed):
        def post(url, payload):
            asked.append(payload)
            return {"meta_info": {} if routed is None else {"routed_experts": encode(routed)}}

        return post

    url = "http://127.0.0.1:1/generate"
    assert check_capture(url, spec, "error", server(np.zeros((4, 3, 2), np.int32)))
    assert asked[0]["return_routed_experts"] is True
    with pytest.raises(CaptureError, match="PyPI"):
        check_capture(url, spec, "error", server(None))
    assert not check_capture(url, spec, "estimate", server(None))
    with pytest.raises(CaptureError, match="bytes"):
        check_capture(url, spec, "estimate", server(np.zeros((4, 2, 2), np.int32)))
