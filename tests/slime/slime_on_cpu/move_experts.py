"""`--custom-megatron-before-train-step-hook-path`: twenty random moves inside a real train actor.

At rollout 1, step 0 (Adam moments exist): export, move all layers at random twenty times through
`app.slime.expert_moves`, export again, and go back. Writes `moves-{rank}.json` under
ROUTEPACK_TEST_OUTPUT; the exports are `hf_before` and `hf_after` there.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

NUM_MOVES = 20


def before_train_step(args, rollout_id, step_id, model, optimizer, scheduler) -> None:
    """slime's hook (backends/megatron_utils/model.py)."""
    if (rollout_id, step_id) != (1, 0):
        return
    from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path

    from app.slime.expert_moves import ExpertMoves
    from planner.placement import Placement
    from train_hooks.state_by_expert import num_different, state_by_expert

    moves = next(o for o in gc.get_objects() if isinstance(o, ExpertMoves))
    folder, whole = Path(os.environ["ROUTEPACK_TEST_OUTPUT"]), moves.whole
    tags = moves.copies.backup_tags
    save_hf_model_to_path(args, folder / "hf_before", model)
    before = state_by_expert(moves.layout, moves.state)
    copies = {tag: logical_copy(moves, tag) for tag in tags}
    sizes = [host_bytes(moves)]
    rng = np.random.default_rng(3)
    num_moved = 0.0
    for k in range(NUM_MOVES):
        placement = Placement(
            expert_of_slot=np.stack(
                [rng.permutation(whole.num_experts) for _ in range(whole.num_layers)]
            ),
            num_ep_ranks=whole.num_ep_ranks,
            version=moves.layout.version + 1,
        )
        report = moves.commit(placement, moves.layer_numbers, moves.layout.version, f"move {k}")
        num_moved += report["moved"]
        sizes.append(host_bytes(moves))
    save_hf_model_to_path(args, folder / "hf_after", model)
    after = state_by_expert(moves.layout, moves.state)
    result = {
        "tags": tags,
        "moved": num_moved,
        "host_bytes": sizes,
        "state_different": num_different(before, after),
        "state_tensors": len(before),
        "copies_different": {tag: different(copies[tag], logical_copy(moves, tag)) for tag in tags},
        "stale_infos": stale_infos(args, model, moves),
    }
    (folder / f"moves-{dist.get_rank()}.json").write_text(json.dumps(result))
    moves.back(
        Placement(
            expert_of_slot=whole.expert_of_slot,
            num_ep_ranks=whole.num_ep_ranks,
            version=whole.version,
        )
    )


def host_bytes(moves) -> int:
    copies = moves.copies._backups.values()
    return sum(t.numel() * t.element_size() for copy in copies for t in copy.values())


def logical_copy(moves, tag) -> dict[str, torch.Tensor]:
    """One tag's host copy of all ranks, by logical name."""
    mine = {moves.names.translate(n): t.clone() for n, t in moves.copies.get(tag).items()}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=moves.state.group)
    return {name: tensor for copy in everyone for name, tensor in copy.items()}


def different(a, b) -> int:
    return sum(name not in b or not torch.equal(a[name], b[name]) for name in a) + len(
        b.keys() - a.keys()
    )


def stale_infos(args, model, moves) -> int:
    """Cached infos, relocated by us, against infos that slime makes anew under this layout."""
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator_direct import (
        _get_megatron_local_param_info_buckets as fresh,
    )

    from planner.placement import Placement
    from train_hooks.slime_buckets import relocated_infos

    with moves.names.by_slot():
        identity = fresh(args, model)
    whole: Placement = moves.whole
    ours = relocated_infos(identity, whole, moves.layer_numbers)
    theirs = {info.name: info.src_rank for bucket in fresh(args, model) for info in bucket}
    mine = {info.name: info.src_rank for bucket in ours for info in bucket}
    return sum(theirs[name] != rank for name, rank in mine.items()) + len(
        theirs.keys() ^ mine.keys()
    )
