"""A tiny Ling 2.0 exported from Megatron, served by SGLang: the same model, the same routing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ling_ranks import export_ling
from served import prompt_of
from tiny import tiny_config

from app.config import RanksConfig
from app.local.ranks import run_ranks
from app.local.rollout import capture_spec
from app.sglang_cpu.client import post
from app.sglang_cpu.server import serve
from rollout_hooks.trajectory import from_response

pytestmark = pytest.mark.sglang


def test_ling_exported_from_megatron_has_its_log_probs_and_routing(sglang_environment, tmp_path):
    config = replace(tiny_config(), ranks=RanksConfig(world=1, ep=1))
    tokens = prompt_of(90, seed=4)
    megatron = run_ranks(export_ling, config, str(tmp_path), tokens)
    with serve(
        tmp_path, context_length=128, max_total_tokens=1024, extra=("--trust-remote-code",)
    ) as url:
        payload = {
            "input_ids": tokens,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": True,
        }
        response = post(url, "generate", payload)
    scored = np.array([entry[0] for entry in response["meta_info"]["input_token_logprobs"][1:]])
    np.testing.assert_allclose(scored, megatron["log_probs"], rtol=0, atol=1e-3)
    spec = capture_spec(config.model)
    routed = from_response(response, tokens, 0, spec).routed[:-1]
    chosen = np.zeros((len(routed), spec.num_moe_layers, spec.num_experts), bool)
    np.put_along_axis(chosen, routed.astype(np.int64), True, axis=2)
    np.testing.assert_array_equal(chosen, megatron["routed"].swapaxes(0, 1))
