"""A model and optimizer of one state layout, fed with random tokens and random valid routing."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

from app.config import ModelConfig
from app.config.model import VOCAB_SIZE
from app.local.cpu_modules import EXPERT_LINEARS
from app.local.model import build_megatron, megatron_config
from app.matrix.expert_variants import VARIANTS
from app.matrix.layouts import StateLayout
from app.matrix.offload import pretend_parameters_are_on_a_device
from app.matrix.precise_adam import PreciseAdam
from train_hooks.commit import CommitOptions, Committer
from train_hooks.expert_state import ExpertState
from train_hooks.inventory import take_inventory
from train_hooks.layout import ExpertLayout
from train_hooks.micro_batch import MicroBatch, TrainingTrajectory, pack
from train_hooks.moe_layers import moe_layers
from train_hooks.replay import counts_of
from train_hooks.row_execution import execute_rows

MODEL = ModelConfig(
    hidden_size=32, head_dim=16, ffn_hidden_size=64, moe_ffn_hidden_size=36, num_experts=12,
    num_groups=1, top_k=2,
)  # fmt: skip
NUM_ROWS = 4
LONGEST_ROW = 3 * 4 * 6


class StatelessSGD(torch.optim.Optimizer):
    """An optimizer without moments under Adam's arguments, as slime's StatelessAdam is."""

    def __init__(self, params, lr=1e-3, **unused):
        super().__init__(params, {"lr": lr, **unused})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad.sign(), alpha=-group["lr"])


def model_of(shape: StateLayout) -> ModelConfig:
    """The small model of one layout."""
    return replace(
        MODEL,
        top_k=shape.top_k,
        num_groups=shape.num_groups,
        group_top_k=1,
        num_dense_layers=shape.num_dense_layers,
    )


class MatrixTrainer:
    """One rank of one state layout; the process groups must be initialised."""

    def __init__(self, shape: StateLayout, seed: int = 5):
        self.shape = shape
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        dtype = torch.bfloat16 if shape.bf16 else torch.float32
        self.config = megatron_config(model_of(shape), shape.ep, **_changes(shape, dtype))
        self.config.finalize_model_grads_func = finalize_model_grads
        chunks = [
            build_megatron(
                self.config,
                stage if shape.vpp > 1 else None,
                VARIANTS[shape.experts] if shape.experts else EXPERT_LINEARS,
            )
            for stage in range(shape.vpp)
        ]
        if shape.bf16:
            chunks = [Float16Module(self.config, chunk) for chunk in chunks]
        if shape.frozen_experts:
            for layer in moe_layers(chunks).values():
                for param in take_inventory(layer).parameters():
                    param.requires_grad = False
        self.optimizer = None
        if shape.optimizer != "none":
            chunks = [self._ddp(chunk) for chunk in chunks]
            self.optimizer = self._optimizer(chunks, dtype)
        self.chunks = chunks
        if shape.overlap_grad_reduce:
            self.config.no_sync_func = [chunk.no_sync for chunk in chunks]
            if len(chunks) == 1:
                self.config.no_sync_func = chunks[0].no_sync
        self.layout = ExpertLayout(chunks)
        self.state = ExpertState(chunks, self.optimizer, self.layout)
        options = CommitOptions(staging_mb=shape.staging_mb, split=shape.split, verify="full")
        self.committer = Committer(self.layout, self.state, options)

    def step(self, seed: int) -> float:
        """One optimizer step on the random rows of `seed`; returns the loss summed over ranks."""
        batches, routing = random_rows(self.shape, seed), self.shape.routing
        self._begin_step()
        if self.optimizer is None:
            return self.evaluate(seed)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = execute_rows(self.chunks, batches, _loss, self.layout, routing=routing)
        self.committer.finish()
        self.optimizer.step()
        return _summed(outputs)

    def evaluate(self, seed: int) -> float:
        """The loss on the random rows of `seed` summed over ranks, with what layers keep cached."""
        batches = random_rows(self.shape, seed)
        with torch.no_grad():
            outputs = execute_rows(
                self.chunks, batches, _loss, self.layout, routing=self.shape.routing,
                forward_only=True,
            )  # fmt: skip
        return _summed(outputs)

    def reload_optimizer(self) -> None:
        """Save the expert optimizer's state and load it again, as a resume does."""
        for part in self.optimizer.chained_optimizers:
            part.optimizer.load_state_dict(copy.deepcopy(part.optimizer.state_dict()))

    def _begin_step(self) -> None:
        """Megatron marks the first micro-batch of a step only where it computes in fp8."""
        for chunk in self.chunks:
            for module in chunk.modules():
                if hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = True

    def _ddp(self, chunk) -> DistributedDataParallel:
        return DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=self.shape.overlap_grad_reduce,
                overlap_param_gather=self.shape.overlap_param_gather,
                bucket_size=self.shape.bucket_size,
            ),
            chunk,
            disable_bucketing=False,
        )

    def _optimizer(self, chunks: Sequence[DistributedDataParallel], dtype: torch.dtype):
        shape = self.shape
        if shape.offload:
            pretend_parameters_are_on_a_device()
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-3,
            weight_decay=0.01,
            clip_grad=0.0,
            bf16=shape.bf16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=shape.overlap_param_gather,
            optimizer_cpu_offload=shape.offload,
            optimizer_offload_fraction=1.0,
            use_precision_aware_optimizer=shape.offload,
        )
        original = torch.optim.AdamW
        if shape.optimizer == "stateless":
            torch.optim.AdamW = StatelessSGD
        if shape.moments:  # the settings themselves ask for Transformer Engine
            torch.optim.AdamW = PreciseAdam
            config.use_precision_aware_optimizer = True
            config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
            config.exp_avg_dtype = config.exp_avg_sq_dtype = MOMENT_TYPES[shape.moments]
        try:
            return get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
        finally:
            torch.optim.AdamW = original


MOMENT_TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}


def random_rows(shape: StateLayout, seed: int) -> list[MicroBatch]:
    """Rows of random tokens with random valid routing, different on every DP rank.

    Under CP each rank holds its part of every trajectory; parts are drawn on their own.
    """
    data_rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    generator = torch.Generator().manual_seed(1000 * seed + data_rank)
    return [_random_row(shape, row, generator) for row in range(NUM_ROWS)]


def _random_row(shape: StateLayout, row: int, generator: torch.Generator) -> MicroBatch:
    num_moe = len(model_of(shape).moe_layers)
    trajectories = []
    lengths = torch.Generator().manual_seed(row)  # CP ranks must cut the same trajectories
    for _ in range(3):
        length = 4 * int(torch.randint(2, 7, (1,), generator=lengths))
        order = torch.rand(num_moe, length, MODEL.num_experts, generator=generator).argsort(-1)
        ids = order[..., : shape.top_k]
        trajectories.append(
            TrainingTrajectory(
                tokens=torch.randint(0, VOCAB_SIZE, (length + 1,), generator=generator),
                routed=ids,
                counts=counts_of(ids, MODEL.num_experts),
                targets={"mask": torch.rand(length, generator=generator)},
            )
        )
    batch = pack(row, trajectories, padding_multiple=LONGEST_ROW if shape.vpp > 1 else shape.tp)
    if shape.cp > 1:  # thd offsets count whole trajectories, of which this rank holds its part
        packed = batch.packed
        packed.cu_seqlens_q = packed.cu_seqlens_kv = packed.cu_seqlens_q * shape.cp
        packed.max_seqlen_q = packed.max_seqlen_kv = packed.max_seqlen_q * shape.cp
    return batch


def _changes(shape: StateLayout, dtype: torch.dtype) -> dict:
    changes = dict(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=shape.bf16,
        tensor_model_parallel_size=shape.tp,
        sequence_parallel=shape.tp > 1,
        context_parallel_size=shape.cp,
        pipeline_model_parallel_size=shape.pp,
        variable_seq_lengths=shape.pp > 1,
        moe_token_dispatcher_type=shape.dispatcher,
        moe_router_bias_update_rate=shape.bias_update_rate,
        moe_z_loss_coeff=shape.z_loss_coeff or None,
        moe_expert_capacity_factor=shape.capacity_factor,
        moe_pad_expert_input_to_capacity=shape.pad_to_capacity,
        mtp_num_layers=shape.num_mtp_layers or None,
    )
    if shape.aux_loss_coeff:
        changes |= dict(
            moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=shape.aux_loss_coeff
        )
    if shape.vpp > 1:
        # With two stages both neighbours are one rank: Megatron then needs unbatched p2p to tell
        # forward from backward, and exchanges no shapes, so that rows are padded to one length.
        changes |= dict(
            virtual_pipeline_model_parallel_size=shape.vpp,
            variable_seq_lengths=False,
            overlap_p2p_comm=True,
            batch_p2p_comm=False,
        )
    if shape.recompute == "full":
        changes |= dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    if shape.recompute == "selective":
        changes |= dict(recompute_granularity="selective", recompute_modules=["moe"])
    return changes


def _loss(log_probs: torch.Tensor, batch: MicroBatch):
    loss = -(log_probs * batch.targets["mask"]).sum() / 100
    return loss, {"loss": loss.detach().double()}


def _summed(outputs) -> float:
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        total += output["loss"]
    dist.all_reduce(total)
    return total.item()
