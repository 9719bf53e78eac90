"""What the routers really did in a rollout's training, where its demand was only estimated.

Without any capture (speculative decoding, PD) this is the only source of demand: the next rollout
is planned on it, and the placement that was used is judged by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from planner.options import PlannerOptions
from planner.placement import Placement, rank_load
from planner.placing.place import place
from planner.topology import Topology
from planner.window import Window


class ExecutedDemand:
    """Counts the slots that every router of this rank sends tokens to, in the training region.

    Recomputed forwards and padding are counted too: shares are what it is for.
    """

    def __init__(self, layout: Any | None):
        """layout: None for policies that leave the model alone; then nothing may be wanted."""
        self.layout, self.wanted = layout, False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside this block if `wanted`."""
        if self.wanted:
            for seam in self.layout.seams.values():
                seam.received_counts = []
        yield

    def take(self, layer_numbers: tuple[int, ...]) -> np.ndarray | None:
        """`[layer, logical expert]` over all ranks and layers of the model; None if not wanted.

        Collective over the world when wanted, which all ranks decide alike.
        """
        if not self.wanted:
            return None
        import torch
        import torch.distributed as dist
        from slime.utils.distributed_utils import get_gloo_group

        total = torch.zeros(len(layer_numbers), self.layout.num_experts, dtype=torch.int64)
        for number, seam in self.layout.seams.items():
            if not seam.received_counts:
                continue  # no forward ran here
            by_slot = torch.stack(seam.received_counts).sum(0).cpu()
            total[layer_numbers.index(number)][seam.expert_of_slot.cpu()] = by_slot
            seam.received_counts = None
        dist.all_reduce(total, group=get_gloo_group())
        return total.numpy()


def excess(load: np.ndarray) -> float:
    """Peak rank load above uniform, summed over layers (Section 4.2); load `[layer, EP rank]`."""
    return float(load.max(axis=1).sum() / load.mean(axis=1).sum() - 1.0)


def regret(
    executed: np.ndarray,
    used: Placement,
    carried: Placement,
    topology: Topology,
    options: PlannerOptions,
    top_k: int,
) -> dict[str, float]:
    """Global excess on the real trace: of the used placement, of identity, and over a known one.

    executed: `[layer, expert]` tokens. carried: the placement that `used` was planned from.
    """
    tokens = max(1, int(executed[0].sum()) // top_k)
    window = Window(
        window_id=0,
        length=np.array([tokens]),
        routed_rows=np.array([tokens]),
        demand=executed[None],
        top_k=top_k,
        estimated=np.array([True]),
    )
    known = place(window, topology, carried, "full", options).placement
    used_excess = excess(rank_load(executed, used))
    identity = Placement.identity(*executed.shape, used.num_ep_ranks)
    return {
        "capture/executed_excess": used_excess,
        "capture/executed_excess_identity": excess(rank_load(executed, identity)),
        "capture/regret": used_excess - excess(rank_load(executed, known)),
    }
