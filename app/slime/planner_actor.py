"""The planner as a Ray actor of its own: never behind generate(n+1), never on the trainer's cores.

RolloutManager is a single-threaded actor and, in asynchronous training, busy with the next rollout
when a plan is wanted. This actor places on the sealed windows, searches rows on its reserved cores,
and packages each DP rank's data with slime's own code (`RolloutManager._split_train_data_by_dp`)
under the planned schedule.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from app.slime.config import SlimeConfig
from app.slime.cost import bytes_per_expert, cost_of_model
from app.slime.messages import Placed, PlanReport, Ready, Sealed
from app.slime.planning import RolloutPlanner, digest_of
from app.slime.seams import DRIVER_SEAMS, find, with_globals
from planner.options import PlannerOptions
from planner.placement import Placement
from planner.policies import POLICIES
from planner.warm_up import compile_planner
from rollout_hooks.slime_steps import SlimeSchedule, to_slime_schedule

logger = logging.getLogger(__name__)
KEEP = 4
"""Rollouts that no actor reports about (critic only) are forgotten after so many others."""
FAILED = "failed"
"""Policy of a rollout whose planning raised: slime's schedule on the placement already carried."""


@dataclass(kw_only=True, slots=True)
class OpenRollout:
    """A rollout between place() and report()."""

    sealed: Sealed
    policy: str
    started_at: float


class PlannerActor:
    """Methods are called by the driver in the order place(n), rows(n), place(n+1), ..."""

    def __init__(self, args: Any, config: SlimeConfig):
        self.args, self.config = args, config
        self._planner: RolloutPlanner | None = None
        self._open: dict[int, OpenRollout] = {}

    def warm_up(self) -> None:
        """Compile what planning runs; submitted before the first rollout is there."""
        compile_planner(
            self.config.stages() or cost_of_model(self.args, self.args.max_tokens_per_gpu),
            self._options(),
            pp=self.args.pipeline_model_parallel_size,
        )

    def place(self, sealed: Sealed, may_move: bool = True) -> Placed:
        """The placement to commit; row searches are running when this returns.

        may_move: False while only a critic trains: its actors would never commit.
        """
        rollout = sealed.rollout
        topology = rollout.parallel["routepack"]["topology"]
        if self._planner is None:
            self._planner = self._make_planner(topology.capacity)
        planner = self._planner
        base = planner.carried
        started_at = time.time()
        try:
            opened = planner.place(rollout, topology, may_move)
            policy, placement, started_at = opened.policy, opened.placement, opened.started_at
        except Exception:  # planning may never stop training
            logger.exception("rollout %d is trained on slime's own schedule", rollout.rollout_id)
            policy, placement = FAILED, base
            planner.num_fallbacks += 1
        for old in [i for i in self._open if i < rollout.rollout_id - KEEP]:
            self._open.pop(old)
            planner.forget(old)
        self._open[rollout.rollout_id] = OpenRollout(
            sealed=sealed, policy=policy, started_at=started_at
        )
        return Placed(
            rollout_id=rollout.rollout_id,
            policy=policy,
            placement=placement,
            base_version=0 if base is None else base.version,
            layer_numbers=rollout.spec.moe_layers,
            digest="" if placement is None else digest_of(placement),
            routing=sealed.routing,
            sealed_at=rollout.sealed_at,
            aux_seconds=rollout.aux_seconds,
            placed_at=time.time(),
            estimated=any(demand is None for demand in rollout.demands),
        )

    def rows(self, rollout_id: int) -> Ready:
        """Wait for the rows and package every DP rank's data; slime's own rows need no waiting."""
        import ray

        opened = self._open[rollout_id]
        rollout, schedule, ended_at = opened.sealed.rollout, None, opened.started_at
        if not self._runs_slime_rows(opened.policy):
            joined = self.planner.join(rollout_id)
            ended_at = joined.ended_at
            schedule = to_slime_schedule(joined.positions, joined.rows, rollout.rollout_ids)
        boxes = package(self.args, rollout.parallel, ray.get(opened.sealed.data), schedule)
        opened.sealed = replace(opened.sealed, data=None, routing=None)
        return Ready(boxes=boxes, schedule_started_at=opened.started_at, schedule_ended_at=ended_at)

    def report(self, rollout_id: int, executed: np.ndarray | None = None) -> PlanReport:
        """Figures of a trained rollout; also saves its plans where `log.save_plans` asks for it.

        executed: `[layer, expert]` tokens that the routers sent, where demand was estimated.
        """
        opened = self._open.pop(rollout_id)
        if opened.policy == FAILED:
            return PlanReport(
                figures={"fallback": float(self.planner.num_fallbacks)},
                slime_cost=0.0,
                num_tokens=sum(opened.sealed.rollout.lengths),
            )
        if self.config.log.folder and self.config.log.save_plans:
            folder = Path(self.config.log.folder)
            folder.mkdir(parents=True, exist_ok=True)
            for step, plan in enumerate(self.planner.join(rollout_id).plans):
                plan.save(folder / f"plan-{rollout_id:06d}-{step}.npz")
        return self.planner.report(rollout_id, executed)

    @property
    def planner(self) -> RolloutPlanner:
        assert self._planner is not None, "place() comes first"
        return self._planner

    def measured(
        self, policy: str, slime_cost: float, seconds: float, exposed: float
    ) -> str | None:
        """One trained rollout's time, for the guard; returns its message when it steps down."""
        message = self.planner.measured(policy, slime_cost, seconds, exposed)
        if message:
            logger.warning("RoutePack guard: %s", message)
        return message

    def _runs_slime_rows(self, policy: str) -> bool:
        if policy == FAILED:
            return True
        return POLICIES[policy].runs_slime_rows(self.config.planner.rows_from)

    def _make_planner(self, capacity: int) -> RolloutPlanner:
        args = self.args
        moves = POLICIES[args.routepack_policy].places
        return RolloutPlanner(
            policy=args.routepack_policy,
            config=self.config,
            cost=self.config.stages() or cost_of_model(args, capacity),
            options=self._options(),
            carried=saved_placement(args.load) if moves else None,
        )

    def _options(self) -> PlannerOptions:
        return self.config.options(
            shard_size=self.args.n_samples_per_prompt,
            balance_data=bool(self.args.balance_data),
            bytes_per_expert=bytes_per_expert(self.args),
        )


def saved_placement(folder: str | None) -> Placement | None:
    """The placement beside the checkpoint that a job loads; None, with a warning if damaged."""
    from train_hooks.checkpoint import load_layout
    from train_hooks.layout import LayoutError

    try:
        return None if folder is None else load_layout(folder)
    except LayoutError as error:  # it only saves moves: planning can start from identity
        logger.warning("planning starts from identity: %s", error)
        return None


def package(args: Any, parallel: dict, data: dict, schedule: SlimeSchedule | None) -> list[Any]:
    """slime's Box for every DP rank, under `schedule`, or under slime's own when it is None."""
    seam = next(s for s in DRIVER_SEAMS if s.name.endswith("_split_train_data_by_dp"))
    split = find(seam)
    if schedule is not None:
        split = with_globals(split, build_dp_schedule=lambda *args, **kwargs: schedule)
    return split(SimpleNamespace(args=args, train_parallel_config=parallel), data)


def start_planner(args: Any, config: SlimeConfig) -> Any:
    """A handle to the planner, with its cores reserved in Ray."""
    import ray

    options: dict[str, Any] = {"num_cpus": config.planner.num_cores, "num_gpus": 0}
    if getattr(args, "rollout_data_transport", "object-store") == "nixl":
        options["enable_tensor_transport"] = True
    planner = ray.remote(**options)(PlannerActor).remote(args, config)
    planner.warm_up.remote()  # calls run in order: place(0) finds compiled kernels
    return planner
