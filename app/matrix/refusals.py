"""What is refused by name before anything moves, each provoked on real objects."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import nn

from app.config import RunConfig
from app.matrix.layouts import StateLayout
from app.matrix.prove import initialize_parallel
from app.matrix.trainer import MatrixTrainer
from train_hooks.expert_state import ExpertState
from train_hooks.inventory import take_inventory
from train_hooks.optimizer_state import foreseen_entries


def refusal_messages(config: RunConfig) -> dict[str, str]:
    """Provoke every refusal; return what each said, "" if it did not refuse."""
    said = {}
    for name, provoke in UNDER_EXPERTS.items():
        layer = _layer()
        said[name] = _said(partial(provoke, layer))
    return said | {name: _said(provoke) for name, provoke in OF_JOBS.items()}


class QuantisedParameter(nn.Parameter):
    """Nominally bf16 over a storage of its own, as Transformer Engine's fp8 primary weights are."""


class _WithExtraState(nn.Module):
    def get_extra_state(self):
        return {"calls": 7}


def _trainer(**shape) -> MatrixTrainer:
    layout = StateLayout(name="refusals", **shape)
    initialize_parallel(layout)
    return MatrixTrainer(layout)


def _layer() -> nn.Module:
    return next(iter(_trainer(optimizer="none").layout.layers.values()))


@contextmanager
def _instead(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` inside the block."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _sequential(layer) -> None:
    take_inventory(SimpleNamespace(experts=SequentialMLP.__new__(SequentialMLP)))


def _quantised_parameters(layer) -> None:
    fc1 = layer.experts.linear_fc1
    fc1.weight0 = QuantisedParameter(fc1.weight0.detach().bfloat16())
    take_inventory(layer)


def _partly_frozen(layer) -> None:
    layer.experts.linear_fc1.weight0.requires_grad = False
    take_inventory(layer)


def _shared_adapter(layer) -> None:
    layer.experts.linear_fc1.register_module("lora_a", nn.Linear(32, 6, bias=False))
    take_inventory(layer)


def _of_no_expert(layer) -> None:
    layer.experts.linear_fc2.register_buffer("running_maximum", torch.zeros(5))
    take_inventory(layer)


def _in_an_attribute(layer) -> None:
    layer.experts.linear_fc2.history = {"maxima": [torch.zeros(5)]}
    take_inventory(layer)


def _on_a_parameter(layer) -> None:
    layer.experts.linear_fc1.weight0.factor = torch.ones(1)
    take_inventory(layer)


def _hook(layer) -> None:
    layer.experts.linear_fc1.register_forward_hook(lambda module, args, output: output)
    take_inventory(layer)


def _replaced_forward(layer) -> None:
    layer.experts.linear_fc1.forward = lambda x, splits: (x, None)
    take_inventory(layer)


def _ordered_dispatch(layer) -> None:
    """As slime's SGLang-aligned DeepEP does: dispatch that reads ordered logical ids."""
    layer.dispatch = lambda hidden_states, probs: hidden_states
    take_inventory(layer)


def _extra_state(layer) -> None:
    layer.experts.register_module("watcher", _WithExtraState())
    take_inventory(layer)


def _delayed_scaling(layer) -> None:
    layer.experts.linear_fc1.fp8_meta = {
        "scaling_fwd": SimpleNamespace(amax_history=torch.zeros(16, 3))
    }
    take_inventory(layer)


UNDER_EXPERTS: dict[str, Callable[[nn.Module], None]] = {
    "SequentialMLP experts": _sequential,
    "fp8 primary weights": _quantised_parameters,
    "some experts of a layer frozen": _partly_frozen,
    "an adapter that experts share": _shared_adapter,
    "a tensor of no single expert": _of_no_expert,
    "a tensor in a plain attribute": _in_an_attribute,
    "a tensor on a parameter": _on_a_parameter,
    "an unknown hook on experts": _hook,
    "a replaced forward of experts": _replaced_forward,
    "a dispatch that reads logical ids": _ordered_dispatch,
    "an unknown _extra_state": _extra_state,
    "fp8 with delayed scaling": _delayed_scaling,
}


def _no_distributed_optimizer() -> None:
    trainer = _trainer()
    ExpertState(trainer.chunks, SimpleNamespace(buffers=[]), trainer.layout)


def _expert_tensor_parallel() -> None:
    trainer = _trainer()
    with _instead(mpu, "get_expert_tensor_parallel_world_size", lambda: 2):
        ExpertState(trainer.chunks, trainer.optimizer, trainer.layout)


def _experts_in_dense_buffers() -> None:
    _trainer(ep=1)


def _stepped() -> tuple[MatrixTrainer, torch.optim.Optimizer]:
    trainer = _trainer()
    trainer.step(0)
    return trainer, trainer.state.optimizer.optimizer


def _move(trainer: MatrixTrainer) -> None:
    from app.local.policy_equivalence import random_placement

    trainer.committer.move_to(random_placement(trainer.layout.placement(), 3), "refused")


def _state_of_another_shape() -> None:
    trainer, inner = _stepped()
    for entries in inner.state.values():
        entries["exp_avg"] = entries["exp_avg"].new_zeros(3)
    _move(trainer)


def _state_of_some_experts() -> None:
    trainer, inner = _stepped()
    del next(iter(inner.state.values()))["exp_avg_sq"]
    _move(trainer)


def _later_state() -> None:
    trainer, inner = _stepped()
    next(iter(inner.state.values()))["shadow"] = torch.zeros(7)
    _move(trainer)


def _map_of_parameters() -> None:
    trainer, inner = _stepped()
    inner.averages = {next(iter(inner.state)): torch.zeros(7)}
    _move(trainer)


def _different_counters() -> None:
    trainer, inner = _stepped()
    next(iter(inner.state.values()))["step"] = torch.tensor(9.0)
    _move(trainer)


def _later_parameter() -> None:
    trainer, _ = _stepped()
    layer = next(iter(trainer.layout.layers.values()))
    layer.experts.register_parameter("gain", nn.Parameter(torch.ones(6, 2)))
    _move(trainer)


def _factors_over_cuts() -> None:
    """As with expert data parallel size 2: a shard edge cuts through some experts."""
    trainer = _trainer(bf16=True, moments="fp16")
    trainer.step(0)
    layer = next(iter(trainer.layout.layers.values()))
    whole, first = ExpertState.owners, layer.experts.linear_fc1.weight0

    def cut(state, part):
        owners = whole(state, part)
        half = part.num_elements // 2
        return ((0, 0, half), (1, half, 2 * half)) if part.tensor is first else owners

    with _instead(ExpertState, "owners", cut):
        _move(trainer)


class _Unbuildable(torch.optim.SGD):
    """An optimizer that needs to know how many parameters there are."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        if len(self.param_groups[0]["params"]) < 2:
            raise ValueError("two parameters at least")


def _untriable_optimizer() -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    foreseen_entries(SimpleNamespace(optimizer=_Unbuildable(params)))


OF_JOBS: dict[str, Callable[[], None]] = {
    "no distributed optimizer": _no_distributed_optimizer,
    "expert tensor parallel size 2": _expert_tensor_parallel,
    "trained experts outside the expert buffers": _experts_in_dense_buffers,
    "optimizer state of another shape": _state_of_another_shape,
    "optimizer state of some experts only": _state_of_some_experts,
    "optimizer state that appears later": _later_state,
    "a map of the optimizer that is not known": _map_of_parameters,
    "experts with different step counters": _different_counters,
    "a parameter of experts that appears later": _later_parameter,
    "fp16 or fp8 moments whose shards cut experts": _factors_over_cuts,
    "an optimizer that cannot be tried on one element": _untriable_optimizer,
}


def _said(action: Callable[[], None]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""
