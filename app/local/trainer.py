"""The Megatron side of the embedded trainer: model, optimizer, layout, one optimizer step."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from app.config import RunConfig, TrainConfig
from app.local.grpo import LossFunction, loss_normaliser, policy_loss, training_trajectory
from app.local.model import build_megatron, megatron_config
from app.local.row_clock import RowClock
from app.local.weights import WeightBridge
from planner.plan import Plan
from rollout_hooks.trajectory import Trajectory
from train_hooks.commit import CommitOptions, Committer
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
    clip_fraction, kl: shares normalised as the loss is; kl is 0 without a reference model.
    row_seconds: [row, rank] forward and backward of each micro-batch.
    """

    loss: float
    loss_magnitude: float
    max_log_prob_difference: float
    clip_fraction: float
    kl: float
    num_positions: int
    seconds: float
    grad_norm: float
    row_seconds: np.ndarray

    @property
    def tps(self) -> float:
        """Positions per second of the training region."""
        return self.num_positions / self.seconds


def build_plain(
    config: TransformerConfig, train: TrainConfig
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Model and optimizer as Megatron makes them, RoutePack not in it."""
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        build_megatron(config),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            min_lr=train.lr,
            weight_decay=train.weight_decay,
            clip_grad=train.clip_grad,
            adam_beta2=0.95,
            params_dtype=torch.float32,
            use_distributed_optimizer=True,
        ),
        [ddp],
        use_gloo_process_groups=False,
    )
    return ddp, optimizer


class LocalTrainer:
    """GPTModel, DDP, DistributedOptimizer and the expert layout of one gloo rank."""

    def __init__(self, config: RunConfig, **megatron_changes):
        self.config = config
        self.megatron_config = megatron_config(config.model, config.ranks.ep, **megatron_changes)
        self.row_clock = RowClock(finalize_model_grads)
        self.megatron_config.finalize_model_grads_func = self.row_clock.finalize
        self.ddp, self.optimizer = build_plain(self.megatron_config, config.train)
        self.ddp.register_forward_pre_hook(self.row_clock.start_row)
        self.layout = ExpertLayout([self.ddp])
        self.state = ExpertState([self.ddp], self.optimizer, self.layout)
        options = CommitOptions(**asdict(config.commit))
        self.committer = Committer(self.layout, self.state, options)
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
        loss_function: LossFunction,
        *,
        routing: Routing = "replay",
        update: bool = True,
    ) -> StepResult:
        """Run one optimizer step over this rank's rows; `update=False` leaves only gradients."""
        dist.barrier()
        start = time.perf_counter()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.row_clock.times.clear()
        outputs = execute_rows(
            [self.ddp], micro_batches, loss_function, self.layout, routing=routing
        )
        self.committer.finish()
        grad_norm = float(self.optimizer.step()[1] or 0.0) if update else 0.0
        dist.barrier()
        seconds = time.perf_counter() - start
        return _reduced(outputs, micro_batches, seconds, grad_norm, self.row_clock.row_seconds())


def _reduced(
    outputs, micro_batches, seconds: float, grad_norm: float, row_seconds: np.ndarray
) -> StepResult:
    names = ("loss", "loss_magnitude", "clip_fraction", "kl")
    num_positions = sum(batch.num_positions for batch in micro_batches)
    sums = torch.tensor(
        [float(sum(out[n] for out in outputs)) for n in names] + [num_positions],
        dtype=torch.float64,
    )
    rows = torch.zeros(dist.get_world_size(), len(micro_batches), dtype=torch.float64)
    rows[dist.get_rank()] = torch.from_numpy(row_seconds)
    dist.all_reduce(rows)
    largest = torch.tensor(
        [seconds, float(max(out["max_log_prob_difference"] for out in outputs))],
        dtype=torch.float64,
    )
    dist.all_reduce(sums)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    loss, magnitude, clip_fraction, kl, num_positions = sums.tolist()
    return StepResult(
        loss=loss,
        loss_magnitude=magnitude,
        max_log_prob_difference=largest[1].item(),
        clip_fraction=clip_fraction,
        kl=kl,
        num_positions=int(num_positions),
        seconds=largest[0].item(),
        grad_norm=grad_norm,
        row_seconds=rows.numpy().T,
    )


def rows_of_rank(
    plan: Plan, trajectories: Sequence[TrainingTrajectory], padding_multiple: int = 1
) -> list[MicroBatch]:
    """Pack this rank's cells, one micro-batch per row; the DP rank is the planner's DP slot."""
    slot = mpu.get_data_parallel_rank()
    return [
        pack(
            row,
            [trajectories[i] for i in plan.rows.trajectories(row, slot)],
            padding_multiple=padding_multiple,
        )
        for row in range(plan.rows.num_rows)
    ]


def grpo_step_inputs(
    trajectories: Sequence[Trajectory],
    advantage: Sequence[float],
    plan: Plan,
    ratio_clip: float,
    *,
    per_token: bool = True,
    kl_coef: float = 0.0,
    reference: Sequence[np.ndarray] | None = None,
    padding_multiple: int = 1,
) -> tuple[list[MicroBatch], LossFunction]:
    """Return (this rank's micro-batches, loss function) of one planned optimizer step.

    trajectories, advantage, reference: `[trajectory]` of the step's window; reference log-probs
    of the response tokens add the KL penalty.
    """
    training = [
        training_trajectory(
            t, a, per_token=per_token, reference=None if reference is None else reference[i]
        )
        for i, (t, a) in enumerate(zip(trajectories, advantage, strict=True))
    ]
    kept = [training[i] for i in plan.rows.kept]
    loss = policy_loss(loss_normaliser(kept), ratio_clip, kl_coef)
    return rows_of_rank(plan, training, padding_multiple), loss
