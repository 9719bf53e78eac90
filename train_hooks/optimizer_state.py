"""The optimizer's tensors of one parameter shard: fp32 main copy and Adam moments, in place.

Three optimizers are known, each by the class that holds its tensors:
- DistributedOptimizer over a torch or fused Adam: main shards beside or as views of the parameters;
- DistributedOptimizer over HybridDeviceOptimizer with the precision-aware optimizer (slime's launch
  scripts): main copies and moments on the host, present before their first step;
- an optimizer without moments, such as slime's StatelessAdam.
"""

from __future__ import annotations

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

MAIN = "param"
MOMENTS = ("exp_avg", "exp_avg_sq")


class UnknownOptimizer(RuntimeError):
    """The optimizer keeps expert state in a way that RoutePack does not know."""


def shard_tensors(optimizer: DistributedOptimizer, param: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return this rank's flat tensors of `param`, to be read or written in place.

    Keys are `param` (the fp32 main copy, left out where it is a view of the model parameter) and
    `exp_avg`, `exp_avg_sq` (left out before the first step). Empty without a local shard.
    Raises UnknownOptimizer for state that is not float32 or that would be read as a copy.
    """
    if param not in optimizer.model_param_gbuf_map:
        return {}
    inner = optimizer.optimizer
    group_index, order = optimizer.model_param_group_index_map[param]
    shard = inner.param_groups[group_index]["params"][order]
    state = inner.state.get(shard) or {}
    tensors = {name: state[name] for name in MOMENTS if name in state}
    precise = _main_copy(inner, shard, state)
    if not _is_view_of(precise, param):
        tensors[MAIN] = precise
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise UnknownOptimizer(
                f"{type(inner).__name__} keeps {name} of an expert as {tensor.dtype}: only float32 "
                "state can be moved exactly; set --main-params-dtype, --exp-avg-dtype and "
                "--exp-avg-sq-dtype to fp32"
            )
    return {name: tensor.detach().view(-1) for name, tensor in tensors.items()}


def shard_offset(optimizer: DistributedOptimizer, param: nn.Parameter) -> int:
    """Where this rank's shard starts inside the flat `param`."""
    return optimizer._get_model_param_range_map(param)["param"].start


def _main_copy(inner: torch.optim.Optimizer, shard: torch.Tensor, state: dict) -> torch.Tensor:
    """The tensor that the next step reads and writes.

    HybridDeviceOptimizer steps on a copy of its own, on the host or in fp32. After
    `load_state_dict` its state names another tensor of the same values `master_param` until the
    next step makes them one: here they are made one at once, since that name is what is saved.
    """
    named = state.get("master_param")
    copies = getattr(inner, "param_to_inner_param", None)
    if copies is None:
        return shard if named is None else named
    stepped_on = copies.get(shard, shard)
    if named is not None and named is not stepped_on:
        if not torch.equal(named, stepped_on.detach()):
            raise UnknownOptimizer(
                f"{type(inner).__name__} holds two fp32 copies of an expert with different values: "
                "the one it steps on and state['master_param']. Load the optimizer's state whole, "
                "or not at all"
            )
        state["master_param"] = stepped_on
    return stepped_on


def _is_view_of(tensor: torch.Tensor, param: nn.Parameter) -> bool:
    same_device = tensor.device == param.device
    ours, theirs = tensor.untyped_storage(), param.data.untyped_storage()
    return same_device and ours.data_ptr() == theirs.data_ptr()
