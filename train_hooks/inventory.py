"""The closed inventory of a MoE layer's experts: what moves, what may stay, what is refused.

One walk over everything that lives under `layer.experts`: parameters, buffers, plain tensor
attributes, sub-modules, `_extra_state` and hooks. Two shapes of tensors belong to experts and
move: one tensor a local expert (`linear_fc1.weight0`, `linear_fc1.weight1`, ...), and one tensor
with a leading dimension of local experts. The mover, checksums, the witness, exported names and
host copies all read what this finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import nn

from train_hooks import may_stay
from train_hooks.layout import LayoutError

_NUMBERED = re.compile(r"(.*\D)(\d+)")
_MODULE_INTERNALS = set(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_METHODS = ("forward", "route", "dispatch", "combine", "routed_experts_compute")
_INSTEAD = "or run with --routepack-policy reschedule, which moves no experts"


class Slice(NamedTuple):
    """One expert's part of a tensor: `shape` elements from `start` of the flat tensor."""

    tensor: torch.Tensor
    start: int
    shape: torch.Size

    @property
    def num_elements(self) -> int:
        """How many elements the expert has here."""
        return self.shape.numel()

    def of(self, like: torch.Tensor) -> torch.Tensor:
        """The same part of a tensor that is shaped as `tensor` is, such as its gradient."""
        flat = like.detach().reshape(-1)
        return flat[self.start : self.start + self.num_elements].view(self.shape)

    def live(self) -> torch.Tensor:
        """The part itself, to be read or written in place."""
        flat = self.tensor.detach().view(-1)
        return flat[self.start : self.start + self.num_elements].view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInventory:
    """What the local experts of one layer own.

    names: of what every expert owns, such as `linear_fc1.weight`. experts: `[local expert][name]`.
    quantising: modules that hold copies derived from weights. seen: everything the walk met;
    fingerprint: the same in short, to notice quickly what appears later.
    """

    names: tuple[str, ...]
    experts: tuple[tuple[Slice, ...], ...]
    quantising: tuple[nn.Module, ...]
    seen: frozenset[tuple]
    fingerprint: tuple

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter that experts own, once."""
        yielded: set[int] = set()
        for slices in self.experts:
            for part in slices:
                if isinstance(part.tensor, nn.Parameter) and id(part.tensor) not in yielded:
                    yielded.add(id(part.tensor))
                    yield part.tensor


class _Item(NamedTuple):
    path: str
    tensor: torch.Tensor


def take_inventory(layer: nn.Module) -> LayerInventory:
    """Walk everything under `layer.experts`.

    Raises LayoutError, naming the item, for what is neither known to belong to single experts nor
    listed in `may_stay`: experts other than TEGroupedMLP, tensors of other shapes, adapters that
    experts share, parameters over a storage of their own, delayed scaling, unknown hooks, and
    parameters of which only some are frozen.
    """
    experts = layer.experts
    if not isinstance(experts, TEGroupedMLP):
        raise LayoutError(
            f"{type(experts).__name__} is not supported: RoutePack moves TEGroupedMLP experts "
            "(linear_fc1.weight0, ...); set --moe-grouped-gemm with Transformer Engine"
        )
    _refuse_replaced_methods("", layer)
    items: list[_Item] = []
    quantising: list[nn.Module] = []
    seen: set[tuple] = set()
    for path, module in experts.named_modules():
        _refuse_unknown_hooks(path, module)
        _refuse_replaced_methods(f"experts.{path}", module)
        _refuse_recipe_state(path, module)
        if hasattr(module, "is_first_microbatch"):
            quantising.append(module)
        mine = [_Item(_join(path, name), tensor) for name, tensor in _tensors(path, module)]
        seen |= {(i.path, id(i.tensor), tuple(i.tensor.shape), i.tensor.dtype) for i in mine}
        seen |= {(i.path, "trained", i.tensor.requires_grad) for i in mine}
        items += mine
    owned = _by_expert(items, int(experts.num_local_experts))
    return LayerInventory(
        names=tuple(owned),
        experts=tuple(zip(*owned.values())) or ((),) * int(experts.num_local_experts),
        quantising=tuple(quantising),
        seen=frozenset(seen),
        fingerprint=fingerprint_of(layer),
    )


def fingerprint_of(layer: nn.Module) -> tuple:
    """Names and identities of all that the walk reads, and which parameters are trained."""
    found: list = _replaced_methods(layer)
    for module in layer.experts.modules():
        found += [id(module), *_replaced_methods(module)]
        for tensors in (module._parameters, module._buffers):
            found += tensors
            found += map(id, tensors.values())
        found += [p.requires_grad for p in module._parameters.values() if p is not None]
        found += [len(getattr(module, kind)) for kind in _HOOKS]
        found += [
            (name, id(value))
            for name, value in vars(module).items()
            if isinstance(value, (torch.Tensor, dict, list, tuple))
            and name not in _MODULE_INTERNALS
            and any(True for _ in _found_in(value, 3))
            and name not in may_stay.MODULE_ATTRIBUTES
        ]
    return tuple(found)


def _by_expert(items: list[_Item], num_local: int) -> dict[str, list[Slice]]:
    """Name -> `[local expert]` slices; raises LayoutError for what is nobody's."""
    numbered: dict[str, dict[int, _Item]] = {}
    for item in items:
        match = _NUMBERED.fullmatch(item.path)
        if match:
            numbered.setdefault(match[1], {})[int(match[2])] = item
    complete = {
        stem for stem, group in numbered.items() if set(group) == set(range(num_local))
        and len({(i.tensor.shape, i.tensor.dtype) for i in group.values()}) == 1
    }  # fmt: skip
    owned: dict[str, list[Slice]] = {}
    for item in items:
        _refuse_unknown_parameter(item)
        match = _NUMBERED.fullmatch(item.path)
        if match and match[1] in complete:
            if match[1] not in owned:
                group = [numbered[match[1]][index] for index in range(num_local)]
                _refuse_partly_frozen(match[1], group)
                owned[match[1]] = [Slice(i.tensor, 0, i.tensor.shape) for i in group]
        else:
            owned[item.path] = _leading_dimension(item, num_local)
    return owned


def _leading_dimension(item: _Item, num_local: int) -> list[Slice]:
    tensor = item.tensor
    shape = tensor.shape if num_local == 1 else tensor.shape[1:]
    fits = num_local == 1 or (tensor.dim() > 0 and tensor.shape[0] == num_local)
    shared = re.search("lora|adapter", item.path, re.IGNORECASE)
    if not fits or shared or not tensor.is_contiguous():
        what = "an adapter that experts may share" if shared else "of no single expert"
        raise LayoutError(
            f"experts.{item.path} {tuple(tensor.shape)} is {what}: with {num_local} local experts "
            "RoutePack moves one tensor an expert (name0, name1, ...) or a contiguous tensor with "
            f"a leading dimension of {num_local}. Keep it outside the experts, {_INSTEAD}"
        )
    return [Slice(tensor, index * shape.numel(), shape) for index in range(num_local)]


def _tensors(path: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a module that is not listed as one that may stay."""
    registered = {**module._parameters, **module._buffers}
    held = {id(tensor) for tensor in registered.values()}
    for name, tensor in registered.items():
        if tensor is not None and tensor.numel():
            yield name, tensor
    for name, value in vars(module).items():
        if name in _MODULE_INTERNALS or name in may_stay.MODULE_ATTRIBUTES:
            continue
        for inner, tensor in _found_in(value, 3):
            if id(tensor) not in held and tensor.numel():
                yield name + inner, tensor


def _found_in(value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in nested dicts, lists and tuples, with their place."""
    if isinstance(value, torch.Tensor):
        yield "", value
    elif depth and isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            for place, tensor in _found_in(inner, depth - 1):
                yield f"[{key!r}]{place}", tensor


def _refuse_unknown_parameter(item: _Item) -> None:
    tensor = item.tensor
    if type(tensor) not in (nn.Parameter, torch.Tensor, nn.Buffer):
        raise LayoutError(
            f"experts.{item.path}: parameters of class {type(tensor).__name__}, nominally "
            f"{tensor.dtype}, keep their values in a storage of their own, which would stay "
            "behind; keep parameters in bf16 (no --fp8-param-gather; blockwise fp8 compute on "
            "bf16 parameters is fine)"
        )
    for name, value in vars(tensor).items():
        if name in may_stay.PARAMETER_ATTRIBUTES:
            continue
        if any(True for _ in _found_in(value, 2)):
            raise LayoutError(
                f"experts.{item.path} carries a tensor in its attribute {name}, which RoutePack "
                f"does not know and would leave behind: remove it, {_INSTEAD}"
            )


def _refuse_partly_frozen(stem: str, group: list[_Item]) -> None:
    frozen = [index for index, item in enumerate(group) if not item.tensor.requires_grad]
    if 0 < len(frozen) < len(group):
        raise LayoutError(
            f"{stem}{{i}} is frozen for local experts {frozen} and trained for the others: a name "
            "freezes a slot, and experts change slots. Freeze all experts of a layer or none, "
            f"{_INSTEAD}"
        )


def _refuse_unknown_hooks(path: str, module: nn.Module) -> None:
    for kind in _HOOKS:
        for hook in getattr(module, kind).values():
            function = getattr(hook, "func", hook)  # of functools.partial
            name = f"{getattr(function, '__module__', '?')}."
            name += getattr(function, "__qualname__", type(function).__qualname__)
            if not name.startswith(tuple(may_stay.HOOKS)):
                raise LayoutError(
                    f"experts.{path or '(itself)'} has an unknown hook {name} ({kind[1:-6]}): it "
                    "may depend on which expert sits in the slot. Remove it, or put it on the MoE "
                    f"layer, {_INSTEAD}"
                )


def _replaced_methods(module: nn.Module) -> list[str]:
    return [name for name in vars(module) if name in _METHODS and hasattr(type(module), name)]


def _refuse_replaced_methods(path: str, module: nn.Module) -> None:
    for name in _replaced_methods(module):
        function = vars(module)[name]
        function = getattr(function, "__func__", function)
        raise LayoutError(
            f"{path or 'the MoE layer'}.{name} was replaced by "
            f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}: it "
            "may read logical expert ids where experts sit in slots (slime's SGLang-aligned DeepEP "
            f"does). Remove it, {_INSTEAD}"
        )


def _refuse_recipe_state(path: str, module: nn.Module) -> None:
    """Delayed scaling keeps a history of maxima for each slot; other recipes keep nothing."""
    recipe_states = getattr(module, "fp8_meta", None) or {}
    config = getattr(module, "config", None)
    delayed = any(hasattr(state, "amax_history") for state in recipe_states.values())
    if delayed or (getattr(config, "fp8", None) and getattr(config, "fp8_recipe", "") == "delayed"):
        raise LayoutError(
            f"experts.{path or '(itself)'} computes in fp8 with delayed scaling, whose history of "
            "maxima belongs to a slot and would stay behind: set --fp8-recipe blockwise, "
            f"{_INSTEAD}"
        )
    own = type(module).get_extra_state is not nn.Module.get_extra_state
    if own and not type(module).__module__.startswith(may_stay.EXTRA_STATE):
        state = module.get_extra_state()
        if state is not None and not (torch.is_tensor(state) and not state.numel()):
            raise LayoutError(
                f"experts.{path or '(itself)'} ({type(module).__name__}) keeps an _extra_state "
                f"that RoutePack does not know and would leave behind: remove it, {_INSTEAD}"
            )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
