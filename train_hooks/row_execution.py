"""Execute planned rows through Megatron's own schedule, with routing replayed and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from train_hooks.layout import ExpertLayout
from train_hooks.micro_batch import MicroBatch
from train_hooks.replay import ReplayError, check_ids, counts_of

LossFunction = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
Routing = Literal["replay", "free", "foreign"]


class RoutingMismatch(RuntimeError):
    """A row executed other expert counts than rollout captured."""


def execute_rows(
    model_chunks: Sequence[nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    layout: ExpertLayout,
    *,
    routing: Routing = "replay",
    forward_only: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Run one micro-batch per planned row and accumulate gradients; works under PP and VPP.

    `loss_function(log_probs [T], micro_batch)` returns this cell's share of the optimizer step's
    one loss sum and its metrics. Megatron averages over micro-batches and over DP ranks; both
    factors are cancelled here, so the loss does not depend on the number of rows (Section 5.1).

    routing: "replay" forces the captured ids and compares executed with captured counts per row,
    layer and rank, recomputed forwards included; "foreign" replays ids without captured counts;
    "free" lets the router choose. Returns the metrics of the last pipeline stage.
    Raises RoutingMismatch naming row and layer, ReplayError for ids that do not fit.
    """
    scale = len(micro_batches) * mpu.get_data_parallel_world_size(with_context_parallel=False)

    def forward_step(iterator, model):
        batch: MicroBatch = next(iterator)
        _set_routing(layout, batch, routing)
        output = model(
            batch.tokens,
            batch.position_ids,
            None,
            labels=batch.labels,
            packed_seq_params=batch.packed,
        )

        def loss_of(negative_log_probs):
            loss, metrics = loss_function(-negative_log_probs[0], batch)
            return loss * scale, metrics

        return output, loss_of

    iterators = [iter(micro_batches) for _ in model_chunks]
    layout.replay.begin(backward_follows=not forward_only)
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(model_chunks),
        num_microbatches=len(micro_batches),
        seq_length=max(batch.tokens.size(1) for batch in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    layout.replay.end()
    _check_executed(layout, micro_batches, routing)
    return outputs


def _set_routing(layout: ExpertLayout, batch: MicroBatch, routing: Routing) -> None:
    if routing == "free" or batch.routed is None:
        layout.replay.use(batch.row, None, None)
        return
    config = layout.config
    num_experts, num_tokens = config.num_moe_experts, batch.tokens.size(1)
    num_layers = sum(config.moe_layer_freq) if isinstance(config.moe_layer_freq, list) else None
    ids = batch.routed.long()
    check_ids(ids, num_layers or ids.size(0), num_tokens, num_experts, config.moe_router_topk)
    if routing == "replay":
        real = counts_of(ids[:, : batch.num_positions], num_experts)
        if not torch.equal(real, batch.counts):
            raise ReplayError(f"row {batch.row}: replay ids and captured demand do not agree")
    if config.sequence_parallel and config.tensor_model_parallel_size > 1:
        ids = ids.chunk(config.tensor_model_parallel_size, dim=1)[
            mpu.get_tensor_model_parallel_rank()
        ]
    index = {number: i for i, number in enumerate(_all_moe_layers(config, ids.size(0)))}
    counts = counts_of(ids, num_experts)
    mine = layout.layer_numbers
    layout.replay.use(
        batch.row,
        {n: ids[index[n]] for n in mine},
        {n: counts[index[n]] for n in mine},
    )


def _all_moe_layers(config, num_layers: int) -> list[int]:
    """Global numbers of the MoE layers of the whole model, all pipeline stages."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [int(i % frequency == 0) for i in range(config.num_layers)]
    numbers = [number for number, is_moe in enumerate(frequency) if is_moe]
    assert len(numbers) == num_layers, (numbers, num_layers)
    return numbers


def _check_executed(layout: ExpertLayout, micro_batches, routing: Routing) -> None:
    num_replayed = sum(batch.routed is not None for batch in micro_batches)
    for number, seam in layout.seams.items():
        compared = seam.take_mismatches()
        wrong = [(row, experts) for row, experts in compared if experts]
        if wrong:
            row, experts = wrong[0]
            raise RoutingMismatch(
                f"row {row}, layer {number}: {experts} experts executed another number of tokens "
                "than rollout captured"
            )
        if routing != "free" and len(compared) < num_replayed:
            raise RoutingMismatch(
                f"layer {number}: {len(compared)} forwards compared for {num_replayed} rows"
            )
