"""A served model beside its Hugging Face twin, and what the twin says about routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from app.sglang_cpu.client import post
from rollout_hooks.routed_experts import CaptureSpec
from rollout_hooks.trajectory import Trajectory, from_response

VOCAB_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running server, the same model in transformers (fp32) and the shape of its capture."""

    url: str
    hf: PreTrainedModel
    spec: CaptureSpec

    def generate(self, prompt, max_new_tokens: int = 8, **fields) -> Any:
        """Sample greedily, with routing and log-probs; `fields` go into the request."""
        return post(self.url, "generate", self.request(prompt, max_new_tokens, **fields))

    def request(self, prompt, max_new_tokens: int, **fields) -> dict[str, Any]:
        """The body of a `/generate` request."""
        return {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "return_routed_experts": True,
        } | fields

    def decode(self, response, prompt, start_len: int = 0) -> Trajectory:
        """Decode with rollout_hooks, as a rollout does."""
        return from_response(response, prompt, 0, self.spec, "error", start_len)

    def check(self, trajectory: Trajectory) -> None:
        """Every routed row and every log-prob equals the Hugging Face twin's."""
        routed, log_probs = twin(self.hf, trajectory.tokens, self.spec)
        expected = routed[trajectory.start_len : -1]
        assert trajectory.routed.shape == expected.shape
        equal = (np.sort(trajectory.routed, -1) == np.sort(expected, -1)).all(-1)
        assert equal.all(), f"{equal.mean():.2%} of (row, layer) equal"
        sampled = trajectory.tokens[trajectory.num_prompt_tokens :]
        positions = np.arange(trajectory.num_prompt_tokens - 1, len(trajectory.tokens) - 1)
        np.testing.assert_allclose(
            trajectory.logprobs, log_probs[positions, sampled], rtol=0, atol=1e-4
        )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


@torch.inference_mode()
def twin(hf: PreTrainedModel, tokens, spec: CaptureSpec) -> tuple[np.ndarray, np.ndarray]:
    """One undisturbed forward: (ids `[position, L, top_k]`, log-probs `[position, vocabulary]`)."""
    captured: dict[int, torch.Tensor] = {}

    def recorder(number):
        def record(gate, args, output):
            captured[number] = output[2].reshape(-1, spec.top_k)

        return record

    hooks = [
        layer.mlp.gate.register_forward_hook(recorder(number))
        for number, layer in enumerate(hf.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    logits = hf(input_ids=torch.as_tensor(tokens, dtype=torch.long)[None]).logits[0]
    for hook in hooks:
        hook.remove()
    assert tuple(sorted(captured)) == spec.moe_layers
    routed = torch.stack([captured[number] for number in spec.moe_layers], dim=1)
    return routed.numpy(), logits.log_softmax(-1).numpy()


def qwen3_moe() -> tuple[Qwen3MoeForCausalLM, CaptureSpec]:
    """A seeded tiny Qwen3-MoE in fp32; SGLang knows no dense layer in this family."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=38,
        pad_token_id=36,
    )
    torch.manual_seed(0)
    hf = Qwen3MoeForCausalLM(config).float().eval()
    spec = CaptureSpec(num_hidden_layers=4, moe_layers=(0, 1, 2, 3), num_experts=8, top_k=2)
    return hf, spec
