"""The optimizer's tensors of one parameter shard: main copy, moments, factors; all in place.

Known by the class that holds them:
- DistributedOptimizer over a torch or fused Adam: fp32 main shards beside or as views of the
  parameters;
- the precision-aware optimizer (Transformer Engine's FusedAdam): 16 remainder bits of an fp32 main
  copy whose other half is the bf16 parameter, or a main copy of another type; moments in fp32,
  bf16, fp16 or fp8, the last two with a factor a tensor;
- HybridDeviceOptimizer (slime's launch scripts): main copies and moments on the host;
- an optimizer without moments, such as slime's StatelessAdam.

What an optimizer will hold is tried on a one-element copy of its class, never on live state.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from train_hooks import may_stay

MAIN = "param"
COUNTER = "step"
_INSTEAD = "use Megatron's Adam, or run with --routepack-policy reschedule, which moves no experts"


class UnknownOptimizer(RuntimeError):
    """The optimizer keeps expert state in a way that RoutePack does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardState:
    """This rank's state of one parameter.

    start: where the shard begins in the flat parameter. elements: flat tensors with one element a
    parameter element; `param` is the main copy, left out where it is a view of the parameter.
    factors: one-element tensors that belong to a whole shard. counter: the optimizer's `step` of
    this parameter, None if it keeps none.
    """

    start: int
    elements: dict[str, torch.Tensor]
    factors: dict[str, torch.Tensor]
    counter: Any = None


def shard_state(optimizer: DistributedOptimizer, param: nn.Parameter) -> ShardState | None:
    """This rank's state of `param`, to be read or written in place; None without a local shard.

    Raises UnknownOptimizer for entries that are neither one element a parameter element, nor a
    factor or counter that is known.
    """
    if param not in optimizer.model_param_gbuf_map:
        return None
    inner = optimizer.optimizer
    group_index, order = optimizer.model_param_group_index_map[param]
    shard = inner.param_groups[group_index]["params"][order]
    entries = dict(inner.state.get(shard) or {})
    precise = _main_copy(inner, shard, entries)
    counter = entries.pop(COUNTER, None)
    if not _is_view_of(precise, param):
        entries[MAIN] = precise
    entries.pop("master_param", None)
    elements: dict[str, torch.Tensor] = {}
    factors: dict[str, torch.Tensor] = {}
    for name, value in entries.items():
        for part, tensor in _plain_parts(name, value):
            if part == name and tensor.numel() == shard.numel() and tensor.is_contiguous():
                elements[part] = tensor.detach().view(-1)
            elif part != name and tensor.numel() == 1:
                factors[part] = tensor.detach().view(-1)
            else:
                raise UnknownOptimizer(
                    f"{type(inner).__name__} keeps {part} of shape {tuple(tensor.shape)} for an "
                    f"expert's shard of {shard.numel()} elements, which RoutePack would leave "
                    f"behind; {_INSTEAD}"
                )
    for name, factor in getattr(inner, "_scales", {}).get(shard, {}).items():
        kept = inner.state[shard].get(name)
        if kept is not None and kept.dtype in may_stay.FACTORS_OF and not hasattr(kept, "_data"):
            continue
        factors[f"{MAIN if name == 'master_param' else name} factor"] = factor.detach().view(-1)
    start = optimizer._get_model_param_range_map(param)["param"].start
    return ShardState(start=start, elements=elements, factors=factors, counter=counter)


def identity_of(optimizer: DistributedOptimizer, param: nn.Parameter) -> tuple | None:
    """What `shard_state` was made of, by identity: as long as it is equal, so is the result.

    Whoever compares must hold the tensors, so that no identity is used twice.
    """
    if param not in optimizer.model_param_gbuf_map:
        return None
    inner = optimizer.optimizer
    group_index, order = optimizer.model_param_group_index_map[param]
    shard = inner.param_groups[group_index]["params"][order]
    copies = getattr(inner, "param_to_inner_param", None)
    entries = inner.state.get(shard) or {}
    stepped_on = None if copies is None else id(copies.get(shard))
    factors = getattr(inner, "_scales", {}).get(shard, {})
    return (id(shard), shard.data_ptr(), param.data_ptr(), stepped_on, *entries,
            *map(id, entries.values()), *map(id, factors.values()))  # fmt: skip


def foreseen_entries(optimizer: DistributedOptimizer) -> frozenset[str]:
    """Names that the optimizer will hold for every parameter from its first step on.

    Found on a one-element copy of the same class and settings. Raises UnknownOptimizer for a class
    that cannot be copied so.
    """
    inner = optimizer.optimizer
    parts = getattr(inner, "sub_optimizers", None)
    names: set[str] = set()
    for part in {type(p): p for p in (parts or [inner])}.values():
        names |= _tried_on_one_element(part)
    if getattr(inner, "param_update_in_fp32", False):
        names.add("master_param")
    return frozenset(names)


def _tried_on_one_element(inner: torch.optim.Optimizer) -> set[str]:
    sample = inner.param_groups[0]["params"][0]
    one = nn.Parameter(torch.zeros(1, dtype=sample.dtype, device=sample.device))
    settings = {}
    for name in list(inspect.signature(type(inner).__init__).parameters)[2:]:
        if name in inner.defaults:
            settings[name] = inner.defaults[name]
        elif hasattr(inner, name):
            settings[name] = getattr(inner, name)
    try:
        copy = type(inner)([one], **settings)
        one.grad = torch.zeros_like(one)
        if getattr(inner, "use_decoupled_grad", False):
            one.decoupled_grad, one.grad = one.grad, None
        copy.step()
    except Exception as error:
        raise UnknownOptimizer(
            f"{type(inner).__module__}.{type(inner).__qualname__} cannot be tried on a one-element "
            f"copy ({type(error).__name__}: {error}), so what it holds is not known; {_INSTEAD}"
        ) from error
    return set(copy.state.get(one) or {})


def what_is_new(optimizer: DistributedOptimizer, foreseen: frozenset[str]) -> str | None:
    """Name what the optimizer holds beyond `foreseen`, or counters that differ; None if neither.

    Counters stay in their slots, since they are equal: every step counts for every expert.
    """
    inner = optimizer.optimizer
    known = foreseen | {"master_param"}
    counters: set[float] = set()
    for entries in inner.state.values():
        if not known.issuperset(entries):
            return (
                f"{type(inner).__name__} now keeps {sorted(set(entries) - known)} of an expert, "
                "which its class did not when RoutePack was switched on (it kept "
                f"{sorted(foreseen)}); {_INSTEAD}"
            )
        if COUNTER in entries:
            counters.add(float(entries[COUNTER]))
    if len(counters) > 1:
        return (
            f"{type(inner).__name__} has taken different numbers of steps for different experts, "
            f"{sorted(counters)[:4]}, and counters stay in their slots: load the optimizer's state "
            f"whole; {_INSTEAD}"
        )
    for name, mapping in vars(inner).items():
        if name in may_stay.OPTIMIZER_ATTRIBUTES or not isinstance(mapping, dict):
            continue
        if any(isinstance(key, torch.Tensor) for key in mapping):
            return (
                f"{type(inner).__name__}.{name} holds something of parameters that RoutePack would "
                f"leave behind; {_INSTEAD}"
            )
    return None


def _plain_parts(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors of one entry: itself, or a quantised tensor's data and factors."""
    if not isinstance(value, torch.Tensor):
        raise UnknownOptimizer(
            f"an expert's optimizer state {name} is a {type(value).__name__}, not a tensor; "
            f"{_INSTEAD}"
        )
    data = getattr(value, "_data", None)
    if data is None:
        yield name, value
        return
    yield name, data
    yield f"{name} inverse factor", value._scale_inv
    quantizer = getattr(value, "_quantizer", None)
    if quantizer is not None:
        yield f"{name} quantizer factor", quantizer.scale


def _main_copy(inner: torch.optim.Optimizer, shard: torch.Tensor, entries: dict) -> torch.Tensor:
    """The tensor that the next step reads and writes.

    HybridDeviceOptimizer steps on a copy of its own, on the host or in fp32. After
    `load_state_dict` its state names another tensor of the same values `master_param` until the
    next step makes them one: here they are made one at once, since that name is what is saved.
    """
    named = entries.get("master_param")
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
        inner.state[shard]["master_param"] = stepped_on
    return stepped_on


def _is_view_of(tensor: torch.Tensor, param: nn.Parameter) -> bool:
    same_device = tensor.device == param.device
    ours, theirs = tensor.untyped_storage(), param.data.untyped_storage()
    return same_device and ours.data_ptr() == theirs.data_ptr()
