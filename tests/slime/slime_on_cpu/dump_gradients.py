"""`--custom-megatron-before-train-step-hook-path`: write this rank's gradients of its first step.

The file `gradients-{rank}.pt` under ROUTEPACK_TEST_OUTPUT maps logical names to (start, stop, flat
fp32 gradient) of the optimizer shard that this rank owns.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

_seen: list[tuple[int, int]] = []


def before_train_step(args, rollout_id, step_id, model, optimizer, scheduler) -> None:
    """slime's hook (backends/megatron_utils/model.py); the first step of this process counts."""
    if _seen:
        return
    _seen.append((rollout_id, step_id))
    prepare = optimizer.prepare_grads

    def prepare_and_write():
        found = prepare()
        _write(args, model, optimizer)
        optimizer.prepare_grads = prepare
        return found

    optimizer.prepare_grads = prepare_and_write


def _write(args, model, optimizer) -> None:
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers

    name_of = {id(p): name for name, p in named_params_and_buffers(args, model)}
    shards = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for param in part.model_param_group_index_map:
            where = part._get_model_param_range_map(param)["param"]
            group, order = part.model_param_group_index_map[param]
            main = part.optimizer.param_groups[group]["params"][order]
            grad = main.grad if main.grad is not None else main.decoupled_grad
            grad = grad.detach().float().reshape(-1).clone()
            shards[name_of[id(param)]] = (where.start, where.end, grad)
    folder = Path(os.environ["ROUTEPACK_TEST_OUTPUT"])
    torch.save(shards, folder / f"gradients-{dist.get_rank()}.pt")


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Whole flat gradients by logical name, joined over the ranks' shards."""
    parts: dict[str, list] = {}
    for path in sorted(folder.glob("gradients-*.pt")):
        for name, shard in torch.load(path).items():
            parts.setdefault(name, []).append(shard)
    return {
        name: torch.cat([grad for _, _, grad in sorted(shards, key=lambda shard: shard[0])])
        for name, shards in parts.items()
    }
