"""slime's host copies of weights follow the experts: keyed by slot, permuted with the layout.

`TensorBackuper` (slime/utils/tensor_backper.py) keeps CPU copies of the tags actor, ref, old_actor,
rollout_actor and teacher by parameter name. Under slot names a move exchanges the values of equal
names between ranks, in place: the copies stay as large as they were, and no tag is loaded into the
model for it. They move inside the commit; the tag that equals the model is refreshed from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from train_hooks.expert_state import ExpertState


class SlimeHostCopies:
    """The tags of one TensorBackuper, read by parameter; an `expert_state.HostCopies`.

    backups: tag -> name -> CPU tensor, as slime keeps them. live_tag: the tag that is loaded into
    the model now; set it before each commit, None if no tag equals the model.
    """

    def __init__(self, backups: Mapping[str, Mapping[str, torch.Tensor]], names: Mapping[int, str]):
        self.backups, self.names = backups, names
        self.live_tag: str | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag that holds weights, in one order on all ranks."""
        return tuple(sorted(tag for tag, copy in self.backups.items() if copy))

    def of(self, tag: str, param: torch.Tensor) -> torch.Tensor:
        """The copy of `param` under `tag`; raises KeyError naming what the tag lacks."""
        name = self.names[id(param)]
        if name not in self.backups[tag]:
            raise KeyError(f"slime's host copy {tag!r} has no {name}")
        return self.backups[tag][name]


def names_of_experts(
    named: Sequence[tuple[str, torch.Tensor]], state: ExpertState
) -> dict[int, str]:
    """Slot name by `id(parameter)` of every parameter that local experts own.

    named: what slime's naming function yields under slot names. Raises ValueError when a parameter
    has no name, which means that slime names experts in a way this version does not know.
    """
    name_of = {id(tensor): name for name, tensor in named}
    wanted = [p for layer in state.inventory.values() for p in layer.parameters()]
    nameless = [p for p in wanted if id(p) not in name_of]
    if nameless:
        raise ValueError(
            f"{len(nameless)} of {len(wanted)} parameters of experts have no name in slime's "
            "_named_params_and_buffers_global; RoutePack knows slime's names of TEGroupedMLP only"
        )
    return {id(p): name_of[id(p)] for p in wanted}
