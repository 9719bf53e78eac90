"""The Megatron side of the embedded trainer: model, optimizer, layout, one optimizer step."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from app.config import RunConfig
from app.local.grpo import num_loss_tokens, policy_loss, training_trajectory
from app.local.model import build_megatron, megatron_config
from app.local.weights import WeightBridge
from planner.plan import Plan
from train_hooks.commit import Committer
from train_hooks.expert_state import ExpertState
from train_hooks.layout import ExpertLayout
from train_hooks.micro_batch import MicroBatch, TrainingTrajectory, pack
from train_hooks.row_execution import Routing, execute_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One optimizer step over a window: sums over all ranks, the slowest rank's time.

    seconds: from a barrier before zero_grad to a barrier after optimizer.step.
    num_positions: positions fed to the model on all ranks, padding excluded.
    loss_magnitude: sum of absolute per-token loss terms, the scale of loss differences.
    """

    loss: float
    loss_magnitude: float
    max_log_prob_difference: float
    num_clipped: int
    num_positions: int
    seconds: float
    grad_norm: float

    @property
    def tps(self) -> float:
        """Positions per second of the training region."""
        return self.num_positions / self.seconds


class LocalTrainer:
    """GPTModel, DDP, DistributedOptimizer and the expert layout of one gloo rank."""

    def __init__(self, config: RunConfig, **megatron_changes):
        self.config = config
        self.megatron_config = megatron_config(config.model, config.ranks.ep, **megatron_changes)
        self.megatron_config.finalize_model_grads_func = finalize_model_grads
        model = build_megatron(self.megatron_config)
        self.ddp = DistributedDataParallel(
            self.megatron_config,
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            model,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.train.lr,
                min_lr=config.train.lr,
                weight_decay=config.train.weight_decay,
                clip_grad=config.train.clip_grad,
                adam_beta2=0.95,
                params_dtype=torch.float32,
                use_distributed_optimizer=True,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
        )
        self.layout = ExpertLayout([self.ddp])
        self.state = ExpertState([self.ddp], self.optimizer, self.layout)
        self.committer = Committer(self.layout, self.state)
        self.bridge = WeightBridge(
            config=config.model, model=self.ddp, layout=self.layout, state=self.state
        )

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function,
        *,
        routing: Routing = "replay",
        update: bool = True,
    ) -> StepResult:
        """Run one optimizer step over this rank's rows; `update=False` leaves only gradients."""
        dist.barrier()
        start = time.perf_counter()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = execute_rows(
            [self.ddp], micro_batches, loss_function, self.layout, routing=routing
        )
        grad_norm = float(self.optimizer.step()[1] or 0.0) if update else 0.0
        dist.barrier()
        seconds = time.perf_counter() - start
        return _reduced(outputs, micro_batches, seconds, grad_norm)


def _reduced(outputs, micro_batches, seconds: float, grad_norm: float) -> StepResult:
    names = ("loss", "loss_magnitude", "num_clipped")
    num_positions = sum(batch.num_positions for batch in micro_batches)
    sums = torch.tensor(
        [float(sum(out[n] for out in outputs)) for n in names] + [num_positions],
        dtype=torch.float64,
    )
    largest = torch.tensor(
        [seconds, float(max(out["max_log_prob_difference"] for out in outputs))],
        dtype=torch.float64,
    )
    dist.all_reduce(sums)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    loss, magnitude, num_clipped, num_positions = sums.tolist()
    return StepResult(
        loss=loss,
        loss_magnitude=magnitude,
        max_log_prob_difference=largest[1].item(),
        num_clipped=int(num_clipped),
        num_positions=int(num_positions),
        seconds=largest[0].item(),
        grad_norm=grad_norm,
    )


def rows_of_rank(plan: Plan, trajectories: Sequence[TrainingTrajectory]) -> list[MicroBatch]:
    """Pack this rank's cells, one micro-batch per row; the DP rank is the planner's DP slot."""
    slot = mpu.get_data_parallel_rank()
    return [
        pack(row, [trajectories[i] for i in plan.rows.trajectories(row, slot)])
        for row in range(plan.rows.num_rows)
    ]


def grpo_step_inputs(trajectories, advantage, plan: Plan, ratio_clip: float):
    """Return (this rank's micro-batches, loss function) of one planned window."""
    training = [training_trajectory(t, a) for t, a in zip(trajectories, advantage)]
    kept = [training[i] for i in plan.rows.kept]
    return rows_of_rank(plan, training), policy_loss(num_loss_tokens(kept), ratio_clip)
