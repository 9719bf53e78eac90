"""The kernels of one rank, forward and backward, timed one call at a time.

Attention is torch SDPA, one causal call for each trajectory; experts are a grouped GEMM
(`torch._grouped_mm` on CUDA, a loop of matmuls elsewhere); copies are gathers of as many rows as
DeepEP would send. On the CPU one thread computes and CPU seconds are taken, so that other load on
the machine does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from planner.recorded.flops import ModelShape

KV_SHARE = 2
"""Query heads for each key-value head."""


class Kernels:
    """Weights of one layer, of one rank's experts and of the head, and the calls that use them."""

    def __init__(self, shape: ModelShape, experts_per_rank: int, device: str, num_repeats: int):
        self.shape, self.device, self.num_repeats = shape, device, num_repeats
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._generator = torch.Generator(device).manual_seed(0)
        h, heads = shape.hidden, shape.num_heads
        self._heads = (heads, heads // KV_SHARE, heads // KV_SHARE)
        self.qkv = self._weight(h, shape.head_dim * sum(self._heads))
        self.output = self._weight(heads * shape.head_dim, h)
        self.dense_up = self._weight(h, 2 * shape.dense_ffn)
        self.dense_down = self._weight(shape.dense_ffn, h)
        self.head = self._weight(h, shape.vocab)
        self.router = self._weight(h, shape.num_experts)
        self.expert_up = self._weight(experts_per_rank, h, 2 * shape.expert_ffn)
        self.expert_down = self._weight(experts_per_rank, shape.expert_ffn, h)

    def dense(self, lengths: Sequence[int]) -> float:
        """Seconds of a cell's dense side: attention, FFN and router of all layers, and the head."""
        if not sum(lengths):
            return 0.0
        x = self._states(int(sum(lengths)))
        shape = self.shape
        attention = self._fastest(lambda: self._attention(x, lengths), x)
        router = self._fastest(lambda: x @ self.router, x)
        head = self._fastest(lambda: x @ self.head, x)
        dense = self._fastest(lambda: _ffn(x, self.dense_up, self.dense_down), x)
        return (
            shape.num_layers * attention
            + shape.num_moe_layers * router
            + shape.num_dense_layers * dense
            + head
        )

    def experts(self, tokens: Sequence[int], num_copies: int) -> float:
        """Seconds of one layer's experts of a rank: copies in, grouped FFN, copies out.

        tokens: routed tokens of each of the rank's experts.
        """
        num_routed = int(sum(tokens))
        if not num_routed:
            return 0.0
        x = self._states(num_copies)
        at = torch.arange(num_routed, device=self.device) % num_copies
        counts = torch.tensor(tokens, device=self.device)

        def call() -> torch.Tensor:
            routed = x.index_select(0, at)
            out = self._grouped(routed, counts)
            return torch.zeros_like(x).index_add(0, at, out)

        return self._fastest(call, x)

    def _attention(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        q, k, v = (x @ self.qkv).split([n * self.shape.head_dim for n in self._heads], dim=1)
        parts = [
            p.unflatten(1, (n, -1)).split(list(lengths)) for p, n in zip((q, k, v), self._heads)
        ]
        out = [
            F.scaled_dot_product_attention(
                *(p.transpose(0, 1)[None] for p in of_one), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            for of_one in zip(*parts)
        ]
        return torch.cat(out).flatten(1) @ self.output

    def _grouped(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.device == "cuda" and hasattr(torch, "_grouped_mm"):
            ends = counts.cumsum(0).int()
            gate, up = torch._grouped_mm(x, self.expert_up, offs=ends).chunk(2, dim=1)
            return torch._grouped_mm(F.silu(gate) * up, self.expert_down, offs=ends)
        parts = x.split(counts.tolist())
        return torch.cat(
            [_ffn(p, u, d) for p, u, d in zip(parts, self.expert_up, self.expert_down) if len(p)]
        )

    def _fastest(self, call: Callable[[], torch.Tensor], x: torch.Tensor) -> float:
        return min(self._timed(call, x) for _ in range(self.num_repeats))

    def _timed(self, call: Callable[[], torch.Tensor], x: torch.Tensor) -> float:
        clock = time.perf_counter if self.device == "cuda" else time.process_time
        self._wait()
        start = clock()
        output = call()
        output.backward(torch.ones_like(output))
        self._wait()
        seconds = clock() - start
        x.grad = None
        return seconds

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _weight(self, *size: int) -> torch.Tensor:
        scale = size[-2] ** -0.5
        weight = torch.randn(size, generator=self._generator, device=self.device) * scale
        return weight.to(self.dtype).requires_grad_()

    def _states(self, num_tokens: int) -> torch.Tensor:
        size = (max(num_tokens, 1), self.shape.hidden)
        states = torch.randn(size, generator=self._generator, device=self.device)
        return states.to(self.dtype).requires_grad_()


def _ffn(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, value = (x @ up).chunk(2, dim=1)
    return (F.silu(gate) * value) @ down
