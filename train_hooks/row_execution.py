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
from train_hooks.replay import set_replay

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
    """Run one micro-batch per planned row and accumulate gradients.

    `loss_function(log_probs [T], micro_batch)` returns this cell's share of the optimizer step's
    one loss sum and its metrics. Megatron averages over micro-batches and over DP ranks; both
    factors are cancelled here, so the loss does not depend on the number of rows (Section 5.1).

    routing: "replay" forces the captured ids and compares executed with captured counts per row
    and layer; "foreign" replays without comparing; "free" lets the router choose.
    Raises RoutingMismatch naming row and layer, ReplayError for ids that do not fit.
    """
    scale = len(micro_batches) * mpu.get_data_parallel_world_size(with_context_parallel=False)

    def forward_step(iterator, model):
        batch: MicroBatch = next(iterator)
        set_replay(layout, None if routing == "free" else batch.routed, batch.num_positions)
        checked = routing == "replay" and batch.counts is not None
        for index, seam in enumerate(layout.seams.values()):
            seam.expect(batch.counts[index] if checked else None)
        negative_log_probs = model(
            batch.tokens,
            batch.position_ids,
            None,
            labels=batch.labels,
            packed_seq_params=batch.packed,
        )
        if checked:
            _check_executed(layout, batch.row)

        def loss_of(output):
            loss, metrics = loss_function(-output[0], batch)
            return loss * scale, metrics

        return negative_log_probs, loss_of

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=list(model_chunks),
        num_microbatches=len(micro_batches),
        seq_length=max(batch.num_positions for batch in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    set_replay(layout, None, 0)
    for seam in layout.seams.values():
        seam.expect(None)
    return outputs


def _check_executed(layout: ExpertLayout, row: int) -> None:
    for number, seam in layout.seams.items():
        num_wrong, num_checked = seam.take_mismatches()
        if num_wrong or not num_checked:
            raise RoutingMismatch(
                f"row {row}, layer {number}: {num_wrong} experts executed another number of "
                f"tokens than rollout captured ({num_checked} forwards compared)"
            )
