"""What the rank processes of test_checkpoints.py do."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from app.local import checkpoint
from app.local.checkpoint_formats import load_state, save_state
from app.local.model import megatron_config
from app.local.policy_equivalence import random_placement
from app.local.trainer import LocalTrainer, build_plain
from train_hooks.moe_layers import unwrap
from train_hooks.state_by_expert import state_by_expert
from train_hooks_ranks.moves import trained

FORMATS = ("fully_reshardable", "dp_reshardable", "torch")


def everything(trainer) -> dict:
    """Expert state by logical id with one replica, and every other parameter by name."""
    experts = {
        (k[0], k[1], k[2], k[3]): v
        for k, v in state_by_expert(trainer.layout, trainer.state).items()
        if k[4] <= 0
    }
    dense = {n: t.clone() for n, t in trainer.bridge.export().items() if ".experts." not in n}
    return {str(k): v for k, v in {**experts, **dense}.items()}


def num_unequal(a: dict, b: dict) -> int:
    return sum(k not in a or k not in b or not torch.equal(a[k], b[k]) for k in {*a, *b})


def moved_trainer(config):
    """A trainer after two steps, with experts moved at random."""
    trainer, inputs, _ = trained(config)
    trainer.committer.move_to(random_placement(trainer.layout.placement(), 3), "test")
    return trainer, inputs


def save_under_a_moved_layout(config, folder: str, fmt: str) -> dict:
    """Train, move, save; return all state and the placement."""
    trainer, _ = moved_trainer(config)
    checkpoint.save(trainer, Path(folder), 5, fmt)
    return {
        "state": everything(trainer),
        "placement": trainer.layout.placement().expert_of_slot,
    }


def load_elsewhere(config, folder: str) -> dict:
    """Load into a fresh trainer of other sizes; return all state and what was resumed."""
    trainer = LocalTrainer(config)
    resumed = checkpoint.load(trainer, Path(folder))
    dist.barrier()
    return {
        "state": everything(trainer),
        "placement": trainer.layout.placement().expert_of_slot,
        "next_window": resumed.next_window,
        "layout_restored": resumed.layout_restored,
    }


def every_format_round_trips(config, folder: str) -> dict:
    """Save under a moved layout in every format and asynchronously; load each into a new trainer.

    The asynchronous save is followed at once by a move and an optimizer step. `unequal` counts
    tensors by logical id against those at the save, `placed` compares layouts.
    """
    trainer, inputs = moved_trainer(config)
    root = Path(folder)
    saved, layout = everything(trainer), trainer.layout.placement()
    for fmt in FORMATS:
        checkpoint.save(trainer, root / fmt, 5, fmt)
    result = {"after_saves": num_unequal(saved, everything(trainer)), "unequal": {}, "placed": {}}
    checkpoint.save(trainer, root / "async", 5, "dp_reshardable", asynchronous=True)
    held = trainer.layout.placement()
    result["home_while_writing"] = bool((held.expert_of_slot[0] == range(16)).all())
    result["there_before_the_move"] = (root / "async").exists()
    trainer.committer.move_to(random_placement(held, 8), "next window")
    result["there_after_the_move"] = (root / "async").exists()
    trainer.step(*inputs)
    result["trained_on"] = num_unequal(saved, everything(trainer))
    for name in (*FORMATS, "async"):
        fresh = LocalTrainer(config)
        resumed = checkpoint.load(fresh, root / name)
        result["unequal"][name] = num_unequal(saved, everything(fresh))
        same = (fresh.layout.placement().expert_of_slot == layout.expert_of_slot).all()
        result["placed"][name] = bool(same and resumed.layout_restored)
    return result


def plain_megatron_reads_and_writes_the_same(config, folder: str) -> dict:
    """A checkpoint of a moved layout in plain Megatron, and one of plain Megatron in RoutePack."""
    trainer, _ = moved_trainer(config)
    root = Path(folder)
    checkpoint.save(trainer, root / "ours", 5, "dp_reshardable")
    trainer.committer.move_to(_identity(trainer), "as plain Megatron has them")
    expected = _named(trainer.ddp, trainer.optimizer)

    plain = build_plain(megatron_config(config.model, config.ranks.ep), config.train)
    unlike = num_unequal(expected, _named(*plain))
    load_state(*plain, root / "ours", "dp_reshardable")
    ours_in_plain = num_unequal(expected, _named(*plain))

    if dist.get_rank() == 0:
        (root / "plain").mkdir()
    dist.barrier()
    save_state(*plain, root / "plain", "dp_reshardable")
    ours = LocalTrainer(config)
    ours.committer.move_to(random_placement(ours.layout.placement(), 4), "another layout")
    ours.committer.move_to(_identity(ours), "home, as a run starts")
    load_state(ours.ddp, ours.optimizer, root / "plain", "dp_reshardable")
    return {
        "tensors": len(expected),
        "unlike_before": unlike,
        "ours_in_plain": ours_in_plain,
        "plain_in_ours": num_unequal(expected, _named(ours.ddp, ours.optimizer)),
    }


def _identity(trainer):
    placement = trainer.layout.placement()
    return replace(placement, expert_of_slot=np.tile(np.arange(16, dtype=np.int32), (3, 1)))


def _named(ddp, optimizer) -> dict:
    """This rank's parameters, and its moments by order, as plain Megatron holds them."""
    tensors = {f"p {n}": p.detach().clone() for n, p in unwrap(ddp).named_parameters()}
    for number, part in enumerate(optimizer.chained_optimizers):
        for group in part.optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                for name in ("exp_avg", "exp_avg_sq"):
                    if name in part.optimizer.state[param]:
                        key = f"{number} {group.get('wd_mult')} {index} {name}"
                        tensors[key] = part.optimizer.state[param][name].clone()
    return tensors
