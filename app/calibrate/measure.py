"""Time the model's own Megatron modules, forward and backward, on one rank.

Each module runs alone on packed cells (thd), as training packs them. A cell's time is the fastest
of its repeats: other load only ever adds. Rounds visit all cells in turn, so that a slow spell of
the machine does not fall on one cell, and go on until the fastest times stand still. On the CPU a
rank has one thread, and CPU seconds are taken: they equal wall seconds on a quiet machine and leave
out what other processes take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from app.calibrate.rows import Cell
from app.config import ModelConfig, RunConfig
from app.config.model import VOCAB_SIZE
from app.results.progress import track

MOST_ROUNDS = 4
"""At most this many times the asked-for repeats."""
STILL = 0.01
"""A round in which nine of ten fastest times improve by less than this changed nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of one layer's stages [cell]; keys are the stages' names.

    num_layers: layers of the model that run the stage.
    """

    stages: dict[str, np.ndarray]
    num_layers: dict[str, int]


ATTENTION, DENSE_FFN, MOE_DENSE, HEAD, EXPERTS = (
    "attention",
    "dense_ffn",
    "router_and_shared_expert",
    "embedding_and_head",
    "experts",
)


def measure_rank(config: RunConfig, device: str, cells: Sequence[Cell], num_repeats: int) -> Times:
    """Build the model of `config` and time its stages; called on one rank (`run_ranks`).

    The experts of `config.model` are those of one EP rank; a cell of T positions sends them
    T x top_k routed tokens, evenly. num_repeats: at least so many rounds.
    """
    from app.local.model import build_megatron, megatron_config

    megatron = megatron_config(config.model, 1)
    model = build_megatron(megatron).to(device)
    moe = next(layer for layer in model.decoder.layers if hasattr(layer.mlp, "experts"))
    dense = next((x for x in model.decoder.layers if not hasattr(x.mlp, "experts")), None)
    hidden = config.model.hidden_size
    prepared = [_inputs(cell, config, hidden, device) for cell in cells]
    calls: dict[str, Callable[[_Inputs], torch.Tensor]] = {
        ATTENTION: lambda x: _attention(model, moe, x),
        MOE_DENSE: lambda x: _router_and_shared(moe, x),
        HEAD: lambda x: _head(model, x),
        EXPERTS: lambda x: _experts(moe.mlp.experts, x, config.model),
    }
    num_dense = config.model.num_dense_layers
    num_layers = {
        ATTENTION: config.model.num_layers,
        MOE_DENSE: len(config.model.moe_layers),
        HEAD: 1,
        EXPERTS: len(config.model.moe_layers),
    }
    if dense is not None:
        calls[DENSE_FFN] = lambda x: dense.mlp(dense.pre_mlp_layernorm(x.hidden))[0]
        num_layers[DENSE_FFN] = num_dense
    fastest = np.full((len(calls), len(cells)), np.inf)
    num_still = 0
    for number in track(range(MOST_ROUNDS * num_repeats), "calibrate"):
        before = fastest.copy()
        for k, inputs in enumerate(prepared):
            for stage, call in enumerate(calls.values()):
                fastest[stage, k] = min(fastest[stage, k], _timed(call, inputs, device))
                model.zero_grad(set_to_none=True)
        gains = before / fastest - 1
        num_still = num_still + 1 if np.percentile(gains, 90) < STILL else 0
        if number + 1 >= num_repeats and num_still >= 2:
            break
    totals = np.array([sum(cell.length) for cell in cells])
    stages = {
        name: seconds if name == ATTENTION else _of_equal_totals(seconds, totals)
        for name, seconds in zip(calls, fastest)
    }
    return Times(stages=stages, num_layers=num_layers)


def _of_equal_totals(seconds: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """[cell] median over the cells with as many tokens.

    These modules see one row of tokens, no trajectories: cells of equal totals do the same work,
    and what differs between their times is the machine.
    """
    shared = {total: np.median(seconds[totals == total]) for total in np.unique(totals)}
    return np.array([shared[total] for total in totals])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """tokens, labels, position_ids [1, T]; hidden [T, 1, H] with gradient."""

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    packed: PackedSeqParams
    hidden: torch.Tensor


def _inputs(cell: Cell, config: RunConfig, hidden: int, device: str) -> _Inputs:
    generator = torch.Generator().manual_seed(config.seed)
    num_positions = sum(cell.length)
    offsets = torch.tensor([0, *cell.length], dtype=torch.int32).cumsum(0).int().to(device)
    longest = max(cell.length)
    tokens = torch.randint(VOCAB_SIZE, (1, num_positions), generator=generator).to(device)
    state = torch.randn(num_positions, 1, hidden, generator=generator).to(device)
    return _Inputs(
        tokens=tokens,
        labels=tokens.roll(-1, dims=1),
        position_ids=torch.cat([torch.arange(t) for t in cell.length])[None].to(device),
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        hidden=state.requires_grad_(),
    )


def _timed(call: Callable[[_Inputs], torch.Tensor], inputs: _Inputs, device: str) -> float:
    clock = time.perf_counter if device == "cuda" else time.process_time
    _wait(device)
    start = clock()
    output = call(inputs)
    output.backward(torch.ones_like(output))
    _wait(device)
    seconds = clock() - start
    inputs.hidden.grad = None
    return seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _attention(model, layer, x: _Inputs) -> torch.Tensor:
    rotary = model.rotary_pos_emb(x.packed.max_seqlen_q, packed_seq=True)
    normed = layer.input_layernorm(x.hidden)
    output, bias = layer.self_attention(
        normed, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=x.packed
    )
    return output if bias is None else output + bias


def _router_and_shared(layer, x: _Inputs) -> torch.Tensor:
    normed = layer.pre_mlp_layernorm(x.hidden)
    probs, _ = layer.mlp.router(normed)
    return layer.mlp.shared_experts(normed) + probs.sum()


def _head(model, x: _Inputs) -> torch.Tensor:
    embedded = model.embedding(input_ids=x.tokens, position_ids=x.position_ids)
    logits, _ = model.output_layer(model.decoder.final_layernorm(embedded + x.hidden))
    return model.compute_language_model_loss(x.labels, logits)


def _experts(experts, x: _Inputs, shape: ModelConfig) -> torch.Tensor:
    tokens = x.hidden[:, 0].repeat(shape.top_k, 1)
    num_experts = shape.num_experts
    counts = torch.full((num_experts,), len(tokens) // num_experts)
    counts[: len(tokens) % num_experts] += 1
    probs = torch.ones(len(tokens), device=tokens.device)
    return experts(tokens, counts, probs)[0]
