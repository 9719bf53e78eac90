"""The capture contract of stock SGLang, decoded by rollout_hooks, against Hugging Face in fp32."""

from __future__ import annotations

import numpy as np
import pytest
from served import prompt_of

from app.sglang_cpu.client import RequestError, post, stream
from rollout_hooks.routed_experts import decode

pytestmark = pytest.mark.sglang


def test_prompt_and_response_rows_equal_hugging_face(served):
    prompt = prompt_of(24, seed=1)
    trajectory = served.decode(served.generate(prompt, 12), prompt)
    assert trajectory.num_tokens == 36 and len(trajectory.routed) == 35
    served.check(trajectory)


def test_a_cached_prefix_returns_all_rows(served):
    prompt = prompt_of(24, seed=2)
    served.generate(prompt)
    again = served.decode(served.generate(prompt), prompt)
    assert again.num_cached_tokens == 23
    served.check(again)
    longer = prompt + prompt_of(10, seed=3)
    extended = served.decode(served.generate(longer), longer)
    assert extended.num_cached_tokens >= 24
    served.check(extended)


def test_chunked_prefill_returns_all_rows(served):
    prompt = prompt_of(200, seed=4)
    trajectory = served.decode(served.generate(prompt, 4), prompt)
    assert len(trajectory.routed) == 203
    served.check(trajectory)


def test_a_batch_equals_its_requests_alone(served):
    prompts = [prompt_of(length, seed=5) for length in (1, 2, 7, 60)]
    responses = served.generate(prompts, 6)
    for prompt, response in zip(prompts, responses, strict=True):
        served.check(served.decode(response, prompt))


def test_streaming_sends_the_routing_in_the_last_chunk(served):
    prompt = prompt_of(20, seed=6)
    chunks = list(stream(served.url, served.request(prompt, 10)))
    carries = ["routed_experts" in chunk["meta_info"] for chunk in chunks]
    assert len(chunks) > 1 and carries == [False] * (len(chunks) - 1) + [True]
    whole = served.decode(served.generate(prompt, 10), prompt)
    meta = chunks[-1]["meta_info"]
    routed = decode(meta["routed_experts"], 20, meta["completion_tokens"], served.spec, "streamed")
    np.testing.assert_array_equal(routed[:, list(served.spec.moe_layers)], whole.routed)
    served.check(whole)


def test_an_aborted_request_keeps_the_rows_it_has(served):
    prompt = prompt_of(16, seed=7)
    chunks = []
    for chunk in stream(served.url, served.request(prompt, 250, rid="to-abort")):
        chunks.append(chunk)
        if len(chunks) == 5:
            post(served.url, "abort_request", {"rid": "to-abort"})
    meta = chunks[-1]["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] < 250
    trajectory = served.decode({"meta_info": meta}, prompt)
    assert trajectory.finish_reason == "abort"
    served.check(trajectory)


@pytest.mark.parametrize("start_len", [0, 10, 20])
def test_start_len_leaves_out_leading_rows(served, start_len):
    prompt = prompt_of(20, seed=8)
    response = served.generate(prompt, 6, routed_experts_start_len=start_len)
    trajectory = served.decode(response, prompt, start_len)
    assert len(trajectory.routed) == 25 - start_len
    served.check(trajectory)


def test_a_start_len_beyond_the_prompt_is_refused(served):
    with pytest.raises(RequestError, match="400"):
        served.generate(prompt_of(20), 6, routed_experts_start_len=21)


def test_a_dense_layer_is_zero_on_the_wire_and_absent_from_demand(glm4_moe):
    prompt = prompt_of(20, seed=9)
    response = glm4_moe.generate(prompt, 6)
    spec = glm4_moe.spec
    raw = decode(response["meta_info"]["routed_experts"], 20, 6, spec, "raw")
    assert spec.moe_layers == (1, 2, 3)
    assert raw.shape == (25, 4, spec.top_k) and not raw[:, 0].any()
    trajectory = glm4_moe.decode(response, prompt)
    assert trajectory.counts.shape == (3, spec.num_experts)
    assert (trajectory.counts.sum(1) == 25 * spec.top_k).all()


def test_no_routing_comes_unasked(served):
    response = served.generate(prompt_of(20), 4, return_routed_experts=False)
    assert "routed_experts" not in response["meta_info"]
