"""What the rank processes of test_moves.py do; a module of its own so that ranks can import it."""

from __future__ import annotations

import app.local.cpu_megatron  # isort: skip  # noqa: F401  before megatron

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from app.local.admit import admit
from app.local.engine import EmbeddedEngine
from app.local.gradients import gather_gradients
from app.local.grpo import advantages
from app.local.model import build_hf
from app.local.policy_equivalence import random_placement
from app.local.rollout import sample_window
from app.local.trainer import LocalTrainer, grpo_step_inputs
from planner.placement import Placement
from rollout_hooks.admission import PlannerCalls
from train_hooks import transport
from train_hooks.slime_host_copies import SlimeHostCopies
from train_hooks.staging import Staging
from train_hooks.state_by_expert import num_different, state_by_expert


def trained(config):
    """A trainer after two real steps, with its window's inputs and its Hugging Face model."""
    hf = build_hf(config.model, config.routing_skew, 0)
    trainer = LocalTrainer(config)
    trainer.bridge.load(hf.state_dict())
    rollout = sample_window(config, EmbeddedEngine(hf, 0), 0)
    admitted = admit(config, trainer, rollout.window, "off", PlannerCalls())
    advantage = advantages(rollout.rewards, rollout.window.group)
    inputs = grpo_step_inputs(rollout.trajectories, advantage, admitted.plan, 0.2)
    for _ in range(2):
        trainer.step(*inputs)
    return trainer, inputs, hf


def move(trainer, placement, **changes):
    arguments = dict(base_version=trainer.layout.version, window_id=7, digest="same")
    return trainer.committer.commit(placement, **{**arguments, **changes})


def error_of(action) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def moves_are_exact(config) -> dict:
    """Random permutations of all layers, one after the other, then back to identity."""
    trainer, _, _ = trained(config)
    before = state_by_expert(trainer.layout, trainer.state)
    exported = trainer.bridge.export()
    result = {"tensors": len(before), "different": [], "exports_equal": [], "bytes": []}
    identity = trainer.layout.placement()
    targets = [random_placement(identity, seed) for seed in range(4)] + [identity]
    for number, target in enumerate(targets):
        if number == 1:  # as on CUDA with offloaded state: through host buffers, in many chunks
            trainer.committer.staging = Staging(
                50_000, torch.device("cpu"), on_host=lambda tensor: True
            )
        placement = replace(target, version=trainer.layout.version + 1)
        report = move(trainer, placement)
        after = state_by_expert(trainer.layout, trainer.state)
        now = trainer.bridge.export()
        result["different"].append(num_different(before, after))
        result["exports_equal"].append(all(torch.equal(now[n], exported[n]) for n in exported))
        sent = torch.tensor(report.bytes_sent)
        dist.all_reduce(sent)
        result["bytes"].append(int(sent))
    buffers = trainer.committer.staging._buffers
    result["host_buffers"] = sum(name.startswith("host") for name, _ in buffers)
    result["keys"] = sorted({key[3] for key in before})
    return result


def only_moved_bytes_travel(config) -> dict:
    """Swap two experts of different ranks and report the bytes against what they hold."""
    trainer, _, _ = trained(config)
    layer = trainer.layout.layer_numbers[0]
    owned = trainer.state.inventory[layer].experts[0]
    expert_bytes = sum(part.num_elements * 4 for part in owned)
    swapped = trainer.layout.placement().expert_of_slot.copy()
    last = swapped.shape[1] - 1
    swapped[0, [0, last]] = swapped[0, [last, 0]]
    report = move(
        trainer, Placement(expert_of_slot=swapped, num_ep_ranks=config.ranks.ep, version=1)
    )
    sent = torch.tensor(report.bytes_sent)
    dist.all_reduce(sent)
    return {
        "sent": int(sent),
        "expert_bytes": expert_bytes,
        "num_edp": trainer.state.num_edp_ranks,
        "num_moved": report.num_moved,
    }


def bad_plans_are_refused(config) -> dict:
    """Plans that must be refused on every rank before anything moves."""
    trainer, inputs, _ = trained(config)
    before = state_by_expert(trainer.layout, trainer.state)
    current = trainer.layout.placement()
    good = random_placement(current, 1)
    rank = dist.get_rank()
    wide = Placement.identity(current.num_layers, 2 * current.num_experts, current.num_ep_ranks)
    errors = {
        "another plan on one rank": error_of(lambda: move(trainer, good, digest=f"rank {rank}")),
        "same digest, another placement": error_of(
            lambda: move(trainer, random_placement(current, 1 + rank))
        ),
        "stale": error_of(lambda: move(trainer, good, base_version=trainer.layout.version - 1)),
        "other sizes": error_of(lambda: move(trainer, wide)),
        "repeated expert": error_of(
            lambda: Placement(expert_of_slot=np.zeros((3, 16), np.int32), num_ep_ranks=2)
        ),
        "uneven": error_of(lambda: Placement.identity(3, 10, 4)),
    }
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, errors)
    return {
        "errors": everyone,
        "different": num_different(before, state_by_expert(trainer.layout, trainer.state)),
        "still_trains": trainer.step(*inputs).loss,
    }


def a_broken_commit_stops_training(config) -> dict:
    """Fail inside the transport: the next forward must be refused on every rank."""
    trainer, inputs, _ = trained(config)

    def torn(works):
        raise RuntimeError("a torn cable")

    transport._wait = torn
    commit_error = error_of(lambda: move(trainer, random_placement(trainer.layout.placement(), 1)))
    batch = inputs[0][0]
    router = next(iter(trainer.layout.layers.values())).router
    forward_error = error_of(lambda: router(torch.zeros(4, 1, config.model.hidden_size)))
    return {"commit": commit_error, "forward": forward_error, "positions": batch.num_positions}


def export_survives_reload(config) -> dict:
    """Case 1: export -> import under another layout -> export reads the same values."""
    trainer, _, hf = trained(config)
    move(trainer, random_placement(trainer.layout.placement(), 5))
    first = trainer.bridge.export()
    move(trainer, random_placement(trainer.layout.placement(), 6))
    trainer.bridge.load(first)
    second = trainer.bridge.export()
    names = [n for n in first if "experts.down_proj" in n]
    order = torch.from_numpy(trainer.layout.expert_of_slot(1))
    misread = first[names[0]][order]  # what a reader of slots would see
    return {
        "equal": all(torch.equal(first[n], second[n]) for n in first),
        "loads_in_transformers": sorted(first) == sorted(hf.state_dict()),
        "slot_reader_differs": not torch.equal(misread, second[names[0]]),
    }


def schedules_agree(config) -> dict:
    """Gradients of two schedules of one window, and of a third with one trajectory dropped."""
    hf = build_hf(config.model, config.routing_skew, 0)
    trainer = LocalTrainer(config)
    trainer.bridge.load(hf.state_dict())
    rollout = sample_window(config, EmbeddedEngine(hf, 0), 0)
    advantage = advantages(rollout.rewards, rollout.window.group)
    losses, gradients, rows = {}, {}, {}
    for policy in ("off", "full"):
        admitted = admit(config, trainer, rollout.window, policy, PlannerCalls())
        inputs = grpo_step_inputs(rollout.trajectories, advantage, admitted.plan, 0.2)
        losses[policy] = trainer.step(*inputs, update=False)
        gradients[policy] = gather_gradients(trainer)
        rows[policy] = admitted.plan.rows.num_rows
    worst = max(
        ((gradients["off"][n] - gradients["full"][n]).norm() / gradients["off"][n].norm()).item()
        for n in gradients["off"]
        if gradients["off"][n].norm() > 1e-8
    )
    return {
        "worst": worst,
        "loss": [losses[p].loss for p in losses],
        "scale": losses["off"].loss_magnitude,
        "rows": rows,
    }


TAGS = ("actor", "ref", "old_actor", "rollout_actor", "teacher")


def host_copies_follow(config) -> dict:
    """Twenty random moves under five tags of host copies keyed by slot: values, places, size."""
    trainer = LocalTrainer(config)
    layout, state, committer = trainer.layout, trainer.state, trainer.committer
    committer.staging = Staging(20_000, torch.device("cpu"))
    slots = {
        (number, local, name): part.tensor
        for number, layer in state.inventory.items()
        for local, parts in enumerate(layer.experts)
        for name, part in zip(layer.names, parts)
    }
    names = {id(param): str(slot) for slot, param in slots.items()}
    generator = torch.Generator().manual_seed(dist.get_rank())
    copies = {
        tag: {str(s): torch.randn(p.shape, generator=generator) for s, p in slots.items()}
        for tag in TAGS
    }
    for slot, param in slots.items():  # one tag holds what the model holds, as slime's actor does
        copies["actor"][str(slot)].copy_(param.data)
    state.host_copies = SlimeHostCopies(copies, names)

    def by_expert() -> dict:
        mine = {
            (
                tag,
                number,
                layout.logical_expert(number, state.ep_rank, local),
                matrix,
                state.edp_rank,
            ): copies[tag][str((number, local, matrix))].clone()
            for tag in TAGS
            for number, local, matrix in slots
        }
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return {key: tensor for part in everyone for key, tensor in part.items()}

    def places() -> list[int]:
        return [t.data_ptr() for tag in TAGS for t in copies[tag].values()]

    before, addresses, different, sent = by_expert(), places(), 0, 0
    for seed in range(20):
        state.host_copies.live_tag = "actor" if seed % 2 else None
        sent += committer.move_to(random_placement(layout.placement(), seed), "test").bytes_sent
        different += num_different(before, by_expert())
    actor_follows = all(
        torch.equal(copies["actor"][str(slot)], param.data) for slot, param in slots.items()
    )
    state.host_copies = None
    committer.move_to(random_placement(layout.placement(), 99), "copies left behind")
    return {
        "tensors": len(before),
        "different": different,
        "same_memory": places() == addresses,
        "actor_follows": actor_follows,
        "sent": sent,
        "staging": committer.staging.num_bytes,
        "control": num_different(before, by_expert()),
    }
