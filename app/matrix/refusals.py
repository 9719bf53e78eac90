"""Layouts that are refused by name before anything moves."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from app.config import RunConfig
from app.matrix.layouts import StateLayout
from app.matrix.prove import initialize_parallel
from app.matrix.trainer import MatrixTrainer
from train_hooks.expert_state import ExpertState, expert_parameters
from train_hooks.optimizer_state import shard_tensors


def refusal_messages(config: RunConfig) -> dict[str, str]:
    """Provoke every refusal on real objects; return what each said, "" if it did not refuse."""
    initialize_parallel(StateLayout(name="refusals"))
    trainer = MatrixTrainer(StateLayout(name="refusals"))
    trainer.step(0)
    layer = next(iter(trainer.layout.layers.values()))
    sequential = SimpleNamespace(experts=SequentialMLP.__new__(SequentialMLP))
    eight_bit = SimpleNamespace(experts=TEGroupedMLP.__new__(TEGroupedMLP))
    weights = SimpleNamespace(weight0=torch.zeros(2, 2, dtype=torch.float8_e4m3fn))
    eight_bit.experts.__dict__.update(
        num_local_experts=1, _modules={}, linear_fc1=weights, linear_fc2=weights
    )
    messages = {
        "SequentialMLP": _said(lambda: expert_parameters(sequential)),
        "8-bit parameters": _said(lambda: expert_parameters(eight_bit)),
        "parameters over quantised storage": _said(lambda: expert_parameters(_quantised())),
        "some experts of a layer frozen": _said(lambda: _partly_frozen(layer)),
        "no distributed optimizer": _said(
            lambda: ExpertState(trainer.chunks, SimpleNamespace(buffers=[]), trainer.layout)
        ),
        "optimizer state in bf16": _said(lambda: _bf16_moments(trainer, layer)),
        "ETP 2": _said(lambda: _with_expert_tensor_parallel(trainer)),
    }
    return messages


class QuantisedParameter(torch.nn.Parameter):
    """Nominally bf16 over a storage of its own, as Transformer Engine's fp8 primary weights are."""


def _quantised() -> SimpleNamespace:
    experts = TEGroupedMLP.__new__(TEGroupedMLP)
    param = QuantisedParameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    weights = SimpleNamespace(weight0=param)
    experts.__dict__.update(
        num_local_experts=1, _modules={}, linear_fc1=weights, linear_fc2=weights
    )
    return SimpleNamespace(experts=experts)


def _partly_frozen(layer) -> None:
    param = layer.experts.linear_fc1.weight0
    param.requires_grad = False
    try:
        expert_parameters(layer)
    finally:
        param.requires_grad = True


def _bf16_moments(trainer: MatrixTrainer, layer) -> None:
    part = trainer.state.optimizer
    for states in part.optimizer.state.values():
        states["exp_avg"] = states["exp_avg"].bfloat16()
    for param in trainer.state.parameters[1][0]:
        shard_tensors(part, param)


def _with_expert_tensor_parallel(trainer: MatrixTrainer) -> None:
    from megatron.core import parallel_state as mpu

    original = mpu.get_expert_tensor_parallel_world_size
    mpu.get_expert_tensor_parallel_world_size = lambda: 2
    try:
        ExpertState(trainer.chunks, trainer.optimizer, trainer.layout)
    finally:
        mpu.get_expert_tensor_parallel_world_size = original


def _said(action) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""
