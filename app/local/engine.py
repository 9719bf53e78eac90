"""The embedded rollout engine: samples with transformers, answers in SGLang's response format."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from transformers import Glm4MoeForCausalLM

from app.local.tokens import EOS, PAD


class RolloutEngine(Protocol):
    """What the loop needs of an engine; SGLang's response format, weights in logical order."""

    generator: torch.Generator

    def generate(
        self, prompts: Sequence[np.ndarray], max_new_tokens: int, return_routed_experts: bool = True
    ) -> list[dict]:
        """Sample one response per prompt."""

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sample with these weights from now on."""


class RoutingCapture:
    """Record the expert ids of every forwarded token with hooks on each router.

    `Glm4MoeTopkRouter` returns (logits, weights, indices), the indices `[batch x position, top_k]`
    unsorted, the batch as the slow index.
    """

    def __init__(self, model: Glm4MoeForCausalLM):
        self.layers = {
            number: layer.mlp.gate
            for number, layer in enumerate(model.model.layers)
            if hasattr(layer.mlp, "gate")
        }
        self._steps: dict[int, list[torch.Tensor]] = {number: [] for number in self.layers}
        self._hooks = [
            gate.register_forward_hook(self._recorder(number))
            for number, gate in self.layers.items()
        ]

    def _recorder(self, number: int):
        def record(gate, args, output):
            batch, positions = args[0].shape[:2]
            self._steps[number].append(output[2].view(batch, positions, -1).to(torch.int32))

        return record

    def take(self) -> dict[int, torch.Tensor]:
        """Return per layer int32 `[batch, position, top_k]` since the last call, pads included."""
        taken = {number: torch.cat(steps, dim=1) for number, steps in self._steps.items()}
        for steps in self._steps.values():
            steps.clear()
        return taken

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class EmbeddedEngine:
    """A batch sampler with SGLang's `/generate` responses (facts/sglang-capture.md).

    `meta_info["routed_experts"]` is base64 of int32 `[P + N - 1, num_hidden_layers, top_k]`, with
    dense layers zero-filled as SGLang does. The expert ids are those of this model's own forwards.
    """

    def __init__(self, model: Glm4MoeForCausalLM, seed: int):
        self.model = model
        self.generator = torch.Generator().manual_seed(seed)
        self.weight_version = 0
        self.num_requests = 0

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load exported weights, in logical order, and count a new weight version."""
        self.model.load_state_dict(tensors)
        self.weight_version += 1

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[np.ndarray], max_new_tokens: int, return_routed_experts: bool = True
    ) -> list[dict]:
        """Sample one response per prompt and return SGLang's JSON for each, in order."""
        longest = max(len(p) for p in prompts)
        num_pad = torch.tensor([longest - len(p) for p in prompts])
        tokens = torch.full((len(prompts), longest), PAD)
        mask = torch.zeros(len(prompts), longest + max_new_tokens, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            tokens[i, longest - len(prompt) :] = torch.as_tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        positions = (torch.arange(longest) - num_pad[:, None]).clamp_min(0)
        capture, cache = RoutingCapture(self.model), None
        sampled, log_probs = [], []
        finished = torch.zeros(len(prompts), dtype=torch.bool)
        for step in range(max_new_tokens):
            output = self.model(
                input_ids=tokens,
                attention_mask=mask[:, : longest + step],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            distribution = output.logits[:, -1].log_softmax(-1)
            tokens = torch.multinomial(distribution.exp(), 1, generator=self.generator)
            sampled.append(tokens)
            log_probs.append(distribution.gather(1, tokens))
            finished |= tokens[:, 0] == EOS
            if finished.all():
                break
            positions = (longest - num_pad + step)[:, None]
        routing = capture.take()
        capture.close()
        new_tokens, new_log_probs = torch.cat(sampled, 1).numpy(), torch.cat(log_probs, 1).numpy()
        responses = []
        for i, prompt in enumerate(prompts):
            ends = np.flatnonzero(new_tokens[i] == EOS)
            num_new = int(ends[0]) + 1 if len(ends) else new_tokens.shape[1]
            rows = slice(int(num_pad[i]), int(num_pad[i]) + len(prompt) + num_new - 1)
            responses.append(
                self._response(
                    prompt,
                    new_tokens[i, :num_new],
                    new_log_probs[i, :num_new],
                    {n: r[i, rows] for n, r in routing.items()} if return_routed_experts else None,
                    "stop" if len(ends) else "length",
                )
            )
        return responses

    def _response(self, prompt, new_tokens, log_probs, routing, finish) -> dict:
        self.num_requests += 1
        meta = {
            "id": f"embedded-{self.num_requests}",
            "finish_reason": {"type": finish},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(new_tokens),
            "cached_tokens": 0,
            "weight_version": str(self.weight_version),
            "output_token_logprobs": [
                [float(p), int(t), None] for p, t in zip(log_probs, new_tokens)
            ],
        }
        if routing is not None:
            some = next(iter(routing.values()))
            ids = np.zeros((some.shape[0], len(self.model.model.layers), some.shape[1]), np.int32)
            for number, layer_ids in routing.items():
                ids[:, number] = layer_ids.numpy()
            meta["routed_experts"] = base64.b64encode(ids.astype("<i4").tobytes()).decode()
        return {"output_ids": new_tokens.tolist(), "meta_info": meta}
