"""Responses become trajectories: lengths, cached prefixes, missing and contradictory fields."""

import dataclasses

import numpy as np
import pytest

from rollout_hooks.counts import count
from rollout_hooks.routed_experts import CaptureError, CaptureSpec, encode
from rollout_hooks.trajectory import Trajectory, from_response

SPEC = CaptureSpec(num_hidden_layers=3, moe_layers=(1, 2), num_experts=8, top_k=2)


def make_response(num_prompt, num_new, *, start_len=0, seed=0, **meta):
    """SGLang's JSON of one request, with routing of our own; returns (response, prompt, routed)."""
    rng = np.random.default_rng(seed)
    num_rows = max(0, num_prompt + num_new - 1 - start_len)
    routed = np.zeros((num_rows, 3, 2), np.int32)
    routed[:, 1:] = np.argsort(rng.random((num_rows, 2, 8)), -1)[..., :2]
    output_ids = rng.integers(100, 200, num_new).tolist()
    response = {
        "text": "",
        "output_ids": output_ids,
        "meta_info": {
            "id": "req-1",
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5, token, None] for token in output_ids],
            "finish_reason": {"type": "stop"},
            "weight_version": "3",
            "routed_experts": encode(routed),
            **meta,
        },
    }
    return response, list(range(num_prompt)), routed


def test_a_response_becomes_a_counted_trajectory():
    response, prompt, routed = make_response(3, 4)
    trajectory = from_response(response, prompt, 5, SPEC)
    assert trajectory.tokens.tolist() == prompt + response["output_ids"]
    assert trajectory.tokens.dtype == np.int32 and trajectory.logprobs.dtype == np.float32
    assert (trajectory.sample_id, trajectory.group, trajectory.num_tokens) == ("req-1", 5, 7)
    assert np.array_equal(trajectory.routed, routed[:, 1:])
    assert np.array_equal(trajectory.counts, count(routed[:, 1:], 8))
    assert (trajectory.counts.sum(1) == 6 * 2).all()
    assert (trajectory.finish_reason, trajectory.weight_version) == ("stop", "3")
    assert dataclasses.replace(trajectory, reward=1.0).reward == 1.0


@pytest.mark.parametrize("num_prompt, num_new, num_rows", [(1, 0, 0), (1, 1, 1), (2, 0, 1)])
def test_case_8_lengths_one_and_two(num_prompt, num_new, num_rows):
    response, prompt, _ = make_response(num_prompt, num_new)
    trajectory = from_response(response, prompt, 0, SPEC)
    assert trajectory.routed.shape == (num_rows, 2, 2)
    assert (trajectory.counts.sum(1) == 2 * num_rows).all()


def test_case_8_a_cached_prefix_still_returns_all_rows():
    response, prompt, routed = make_response(5, 2, cached_tokens=3)
    trajectory = from_response(response, prompt, 0, SPEC)
    assert trajectory.num_cached_tokens == 3 and len(trajectory.routed) == 6
    cut = {**response["meta_info"], "routed_experts": encode(routed[3:])}
    with pytest.raises(CaptureError, match=r"sample req-1.*start_len"):
        from_response({**response, "meta_info": cut}, prompt, 0, SPEC)


@pytest.mark.parametrize("start_len, num_rows", [(0, 6), (2, 4), (5, 1)])
def test_case_8_a_start_len_explains_fewer_rows(start_len, num_rows):
    response, prompt, _ = make_response(5, 2, start_len=start_len)
    trajectory = from_response(response, prompt, 0, SPEC, start_len=start_len)
    assert len(trajectory.routed) == trajectory.num_routed_rows == num_rows
    other = start_len + 1 if start_len < 5 else 4
    with pytest.raises(CaptureError, match="sample req-1"):
        from_response(response, prompt, 0, SPEC, start_len=other)


@pytest.mark.parametrize("start_len", [-1, 6])
def test_case_8_a_start_outside_the_prompt_is_refused(start_len):
    response, prompt, _ = make_response(5, 2)
    with pytest.raises(CaptureError, match=r"sample req-1.*outside"):
        from_response(response, prompt, 0, SPEC, start_len=start_len)


def test_an_echoed_start_len_must_agree():
    response, prompt, _ = make_response(5, 2, start_len=2, routed_experts_start_len=2)
    assert from_response(response, prompt, 0, SPEC, start_len=2).num_routed_rows == 4
    with pytest.raises(CaptureError, match="reports routed_experts_start_len 2"):
        from_response(response, prompt, 0, SPEC, start_len=1)


def test_case_11_a_missing_capture_names_the_flags_to_set():
    response, prompt, _ = make_response(3, 2)
    del response["meta_info"]["routed_experts"]
    with pytest.raises(CaptureError) as error:
        from_response(response, prompt, 0, SPEC, sample_id="s3")
    for part in (
        "sample s3",
        "--enable-return-routed-experts",
        "return_routed_experts",
        "--use-rollout-routing-replay",
        "sglang-router",
    ):
        assert part in str(error.value)


def test_case_11_estimate_keeps_the_trajectory_without_routing():
    response, prompt, _ = make_response(3, 2, routed_experts=None)
    trajectory = from_response(response, prompt, 0, SPEC, missing="estimate")
    assert trajectory.routed is None and trajectory.counts is None
    assert trajectory.num_routed_rows == 4


def test_a_malformed_capture_is_refused_under_estimate_too():
    response, prompt, routed = make_response(3, 2)
    response["meta_info"]["routed_experts"] = encode(routed[:-1])
    with pytest.raises(CaptureError, match="sample req-1"):
        from_response(response, prompt, 0, SPEC, missing="estimate")


@pytest.mark.parametrize(
    "meta",
    [
        {"prompt_tokens": 4},
        {"completion_tokens": 1},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[-0.5, 1, None]]},
        {"output_token_logprobs": [[-0.5], [-0.5]]},
        {"output_token_logprobs": 3},
        {"output_token_logprobs": [[None, 164, None], [None, 127, None]]},
    ],
)
def test_contradictory_metadata_names_the_sample(meta):
    response, prompt, _ = make_response(3, 2, **meta)
    with pytest.raises(CaptureError, match="sample s3"):
        from_response(response, prompt, 0, SPEC, sample_id="s3")


def test_a_response_without_meta_info_is_refused():
    with pytest.raises(CaptureError, match=r"sample of group 4.*meta_info"):
        from_response({"error": "x"}, [1], 4, SPEC)


def test_an_unknown_policy_is_refused():
    response, prompt, _ = make_response(3, 2)
    with pytest.raises(ValueError, match="missing"):
        from_response(response, prompt, 0, SPEC, missing="ignore")


def test_the_request_without_output_ids_takes_tokens_from_the_log_probs():
    response, prompt, _ = make_response(3, 2)
    output_ids = response.pop("output_ids")
    assert from_response(response, prompt, 0, SPEC).tokens[3:].tolist() == output_ids


@pytest.mark.parametrize(
    "change",
    [
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": 9},
        {"logprobs": np.zeros(1, np.float32)},
        {"start_len": 1},
        {"counts": None},
    ],
)
def test_a_trajectory_checks_itself(change):
    response, prompt, _ = make_response(3, 2)
    trajectory = from_response(response, prompt, 0, SPEC)
    with pytest.raises(CaptureError, match="sample req-1"):
        dataclasses.replace(trajectory, **change)


def test_trajectory_fields_are_keyword_only():
    with pytest.raises(TypeError):
        Trajectory("s", 0, np.zeros(1, np.int32), 1, np.zeros(0, np.float32))
