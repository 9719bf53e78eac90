"""Do the sampler and the trainer compute the same model? Checked when a run starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from app.local.grpo import training_trajectory
from app.local.rollout import SampledWindow
from app.local.trainer import LocalTrainer
from train_hooks.micro_batch import pack

MAX_LOG_PROB_DIFFERENCE = 1e-4
MIN_EQUAL_ROWS = 0.999


class EnginesDiffer(RuntimeError):
    """Sampler and trainer disagree at the same weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCheck:
    """How far apart the engines are at the same weights.

    max_log_prob_difference: over sampled tokens. equal_rows: share of (row, layer) in which both
    routers picked the same experts; None without a capture.
    """

    max_log_prob_difference: float
    equal_rows: float | None


@torch.no_grad()
def check_engines(trainer: LocalTrainer, rollout: SampledWindow) -> EngineCheck:
    """Compare Megatron without replay against what the sampler recorded, over all ranks.

    Raises EnginesDiffer above 1e-4 in log-probability or below 99.9% equal routing rows.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = rollout.trajectories[rank::world]
    batch = pack(0, [training_trajectory(t, 0.0) for t in mine])
    maps: list[torch.Tensor] = []
    hooks = [
        layer.router.register_forward_hook(
            lambda router, args, output: maps.append(output[1].clone()), prepend=True
        )
        for layer in trainer.layout.layers.values()
    ]
    trainer.ddp.eval()
    negative = trainer.ddp(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed,
    )
    trainer.ddp.train()
    for hook in hooks:
        hook.remove()
    mask, old = batch.targets["mask"], batch.targets["old_log_probs"]
    difference = ((-negative[0] - old) * mask).abs().max().double()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    check = EngineCheck(
        max_log_prob_difference=difference.item(), equal_rows=_equal_rows(batch.routed, maps)
    )
    worse = check.max_log_prob_difference > MAX_LOG_PROB_DIFFERENCE
    if worse or (check.equal_rows is not None and check.equal_rows < MIN_EQUAL_ROWS):
        raise EnginesDiffer(
            f"sampler and trainer disagree at the same weights: log-probs by "
            f"{check.max_log_prob_difference:.1e} (allowed {MAX_LOG_PROB_DIFFERENCE:.0e}), share "
            f"of equal routing rows {check.equal_rows} (needed {MIN_EQUAL_ROWS})"
        )
    return check


def _equal_rows(routed: torch.Tensor | None, maps: list[torch.Tensor]) -> float | None:
    """Share over all ranks; `routed` is `[layer, token, top_k]`, each map `[token, expert]`."""
    totals = torch.zeros(2, dtype=torch.float64)
    if routed is not None:
        captured = torch.zeros(len(maps), *maps[0].shape, dtype=torch.bool)
        captured.scatter_(2, routed, True)
        equal = (captured == torch.stack(maps)).all(dim=2)
        totals += torch.tensor([equal.sum(), equal.numel()], dtype=torch.float64)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item() if totals[1] else None
