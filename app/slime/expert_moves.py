"""What a train actor keeps right when experts move: layout, state, copies, names, buckets."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from app.config import CommitConfig
from planner.placement import Placement


class ExpertMoves:
    """The expert layout of one MegatronTrainRayActor and everything that follows it.

    One object a train process. `model` and `optimizer` are slime's; `copies` is its TensorBackuper
    (slime/utils/tensor_backper.py), `updater` its weight updater.
    """

    def __init__(
        self,
        args: Any,
        model: Sequence[Any],
        optimizer: Any,
        copies: Any,
        updater: Any,
        config: CommitConfig | None = None,
    ):
        from train_hooks.commit import CommitOptions, Committer
        from train_hooks.expert_state import ExpertState
        from train_hooks.layout import ExpertLayout
        from train_hooks.slime_buckets import ColocatedBuckets
        from train_hooks.slime_host_copies import SlimeHostCopies, names_of_experts
        from train_hooks.slime_names import ExpertNames

        update = "slime.backends.megatron_utils.update_weight"
        self.args, self.copies = args, copies
        self.layout = ExpertLayout(model)
        self.state = ExpertState(model, optimizer, self.layout)
        config = config or CommitConfig()
        options = CommitOptions(
            staging_mb=config.staging_mb, verify=config.verify, restart_from=restart_from(args)
        )
        self.committer = Committer(self.layout, self.state, options)
        self.names = ExpertNames(importlib.import_module(f"{update}.common"))
        named = list(self.names.slot_named(args, model))
        self.host_copies = SlimeHostCopies(copies._backups, names_of_experts(named, self.state))
        self.state.host_copies = self.host_copies
        self.fresh = True
        self.whole: Placement | None = None
        self.layer_numbers: tuple[int, ...] = ()
        copies._source_getter = lambda: self.names.slot_named(args, model)
        if hasattr(updater, "weights_getter"):
            updater.weights_getter = self._logical_actor_copy
        self.buckets = None
        if hasattr(updater, "_full_param_info_buckets"):
            routing = importlib.import_module(f"{update}.expert_routing")
            self.buckets = ColocatedBuckets(updater, routing.configure_expert_routing)

    def commit(
        self,
        placement: Placement,
        layer_numbers: tuple[int, ...],
        base_version: int,
        label: str,
        live_tag: str | None = None,
    ) -> dict[str, float]:
        """Move experts so that the layout becomes `placement` (of all MoE layers of the model).

        Collective over this stage; call before the first forward of a rollout. A fresh actor, whose
        layout is the checkpoint's logical order, takes a plan from any base version. live_tag: the
        host copy that equals the model now. Returns commit seconds, experts moved and bytes sent
        by this rank. Raises LayoutError on all ranks for a stale or different plan.
        """
        started = time.perf_counter()
        mine = [layer_numbers.index(number) for number in self.layout.layer_numbers]
        new = Placement(
            expert_of_slot=placement.expert_of_slot[mine],
            num_ep_ranks=placement.num_ep_ranks,
            version=placement.version,
        )
        self.host_copies.live_tag = live_tag
        report = self.committer.commit(
            new,
            base_version=self.layout.version if self.fresh else base_version,
            window_id=placement.version,
            digest=label,
            moves_elsewhere=self._moves_anywhere(placement),
        )
        self.fresh, self.whole, self.layer_numbers = False, placement, layer_numbers
        self.names.follow(placement, layer_numbers)
        if self.buckets is not None:
            self.buckets.follow(placement, layer_numbers)
        return {
            "seconds": time.perf_counter() - started,
            "moved": float(report.num_moved),
            "bytes": float(report.bytes_sent),
        }

    def needs(self, placement: Placement | None) -> bool:
        """Whether `placement` (of the whole model) is not where experts are; all ranks agree.

        Equal versions do not decide: experts are at identity while an asynchronous save runs.
        """
        if placement is None:
            return False
        if not self.fresh and placement.version != self.layout.version:
            return True
        return self._moves_anywhere(placement)

    def _moves_anywhere(self, placement: Placement) -> bool:
        """Whether any stage's experts are elsewhere than in `placement` of the whole model."""
        identity = np.arange(placement.num_experts)
        here = identity if self.whole is None else self.whole.expert_of_slot
        return bool((placement.expert_of_slot != here).any())

    def warm(self) -> None:
        """Use the commit's group once after a wake-up, so that no commit pays for its start."""
        self.state.warm_group()

    def release(self) -> None:
        """Give staging back before a sleep, which would copy it to the host and back."""
        self.committer.staging.release()

    def to_identity(self, live_tag: str | None = None) -> Placement | None:
        """Bring every expert home for a save; returns where to go back to, None if it was home."""
        whole = self.whole
        if whole is None or (whole.expert_of_slot == np.arange(whole.num_experts)).all():
            return None
        home = Placement(
            expert_of_slot=np.tile(np.arange(whole.num_experts), (whole.num_layers, 1)),
            num_ep_ranks=whole.num_ep_ranks,
            version=self.layout.version,
        )
        label = "identity before a save"
        self.commit(home, self.layer_numbers, self.layout.version, label, live_tag)
        return whole

    def back(self, placement: Placement, live_tag: str | None = None) -> None:
        """Return to `placement` after a save, under its own version: plans chain from it."""
        label = "back after a save"
        self.commit(placement, self.layer_numbers, self.layout.version, label, live_tag)

    def _logical_actor_copy(self) -> dict[str, Any]:
        copy = self.copies.get("actor")
        return {self.names.translate(name): tensor for name, tensor in copy.items()}


def restart_from(args: Any) -> str:
    """What to restart a job from after a torn commit, for messages."""
    save = getattr(args, "save", None)
    if not save:
        return (
            "a checkpoint (this job has no --save: without one, from the weights it started with)"
        )
    return (
        f"the last checkpoint in {save} (latest_checkpointed_iteration.txt names it; "
        "routepack_layout.json beside it restores the layout): launch the job again with --load "
        f"{save}"
    )
