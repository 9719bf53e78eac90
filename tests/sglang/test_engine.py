"""SGLang as the engine of the embedded trainer: same surface, new weights, two windows."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from served import Served, prompt_of
from tiny import tiny_config

from app.local.model import build_hf
from app.local.ranks import run_ranks
from app.local.sglang_engine import SglangEngine
from app.local.tasks import draw_task
from app.local.tokens import EOS
from app.local.train import train_rank
from app.sglang_cpu.client import post
from rollout_hooks.admission import PlannerCalls

pytestmark = pytest.mark.sglang


def other_weights(config, seed: int) -> dict[str, torch.Tensor]:
    return build_hf(config.model, config.routing_skew, seed).state_dict()


def test_responses_come_in_order_and_decode(glm4_moe, run_config):
    engine = SglangEngine(glm4_moe.url, glm4_moe.hf)
    rng = np.random.default_rng(3)
    prompts = [draw_task(run_config.tasks, rng).prompt for _ in range(12)]
    responses = engine.generate(prompts, 24)
    for prompt, response in zip(prompts, responses, strict=True):
        trajectory = glm4_moe.decode(response, prompt)
        sampled = trajectory.tokens[len(prompt) :]
        assert 1 <= len(sampled) <= 24 and EOS not in sampled[:-1]
        assert trajectory.finish_reason == ("stop" if sampled[-1] == EOS else "length")
        glm4_moe.check(trajectory)
    without = engine.generate(prompts[:1], 4, return_routed_experts=False)
    assert "routed_experts" not in without[0]["meta_info"]


def test_new_weights_change_routing_and_flush_the_prefix_cache(glm4_moe, run_config):
    hf = build_hf(run_config.model, run_config.routing_skew, 1)
    engine = SglangEngine(glm4_moe.url, hf)
    prompt = prompt_of(40, seed=11)
    before = glm4_moe.decode(glm4_moe.generate(prompt), prompt)
    engine.update_weights(other_weights(run_config, seed=2))
    response = glm4_moe.generate(prompt)
    after = glm4_moe.decode(response, prompt)
    assert after.num_cached_tokens == 0 and after.weight_version == "1"
    assert not np.array_equal(np.sort(before.routed[:39]), np.sort(after.routed[:39]))
    Served(url=glm4_moe.url, hf=hf, spec=glm4_moe.spec).check(after)
    engine.update_weights(other_weights(run_config, run_config.seed))
    again = glm4_moe.decode(glm4_moe.generate(prompt), prompt)
    assert np.array_equal(before.routed, again.routed)


def test_without_the_flush_cached_rows_would_be_stale(glm4_moe, run_config, tmp_path):
    """Why `update_weights` flushes: old routing under the new weight version."""
    prompt = prompt_of(40, seed=12)
    before = glm4_moe.decode(glm4_moe.generate(prompt), prompt)
    build_hf(run_config.model, run_config.routing_skew, 5).save_pretrained(tmp_path)
    update = {"model_path": str(tmp_path), "flush_cache": False, "weight_version": "stale"}
    assert post(glm4_moe.url, "update_weights_from_disk", update)["success"]
    stale = glm4_moe.decode(glm4_moe.generate(prompt), prompt)
    assert stale.weight_version == "stale" and stale.num_cached_tokens == 39
    assert np.array_equal(before.routed[:39], stale.routed[:39])
    hf = build_hf(run_config.model, run_config.routing_skew, 0)
    SglangEngine(glm4_moe.url, hf).update_weights(other_weights(run_config, run_config.seed))


def test_two_windows_train_under_full_on_sglang(glm4_moe, run_config, in_tmp):
    config = replace(tiny_config(), name="sglang", seed=run_config.seed)
    config = replace(config, train=replace(config.train, num_windows=2))
    weights = in_tmp / "start.safetensors"
    save_file(other_weights(config, config.seed), weights)
    history = run_ranks(
        train_rank, config, "full", str(weights), str(in_tmp), PlannerCalls(), glm4_moe.url
    ).history
    assert len(history) == 2 and history[-1]["fallback"] == 0
    assert history[0]["start/max_log_prob_difference"] <= 1e-4
    assert history[0]["start/equal_rows"] >= 0.999
    assert all(m["plan/capture_coverage"] == 1 and m["capture/missing"] == 0 for m in history)
    assert sum(m["place/moved_experts"] for m in history) > 0
    lines = (in_tmp / "metrics-full.jsonl").read_text().splitlines()
    assert [json.loads(line)["rollout/step"] for line in lines] == [0, 1]
