"""One rollout after another, planned from the last emitted placement; no Ray, no slime.

Placement is one per rollout, on the demand of all its optimizer steps; every step gets rows of its
own (design.md, Quantities). `place` returns in milliseconds with the row searches running on
threads; `join` waits for them. A planner that fails or overruns falls back to base rows on the
carried placement (`rollout_hooks.admission`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass

import numpy as np

from app.slime.config import SlimeConfig
from app.slime.executed import regret
from app.slime.guard import Guard
from app.slime.messages import PlanReport
from planner.cost import CostModel
from planner.placement import Placement, rank_load
from planner.plan import Plan
from planner.policies import POLICIES
from planner.policy import PlannerOptions, schedule
from planner.rows import Rows
from planner.topology import Topology
from planner.window import Window
from rollout_hooks.admission import Admission, Once, PlannerCalls
from rollout_hooks.estimate import demand_shares
from rollout_hooks.slime_windows import SealedRollout, windows_of

logger = logging.getLogger(__name__)
MEAN_FIGURES = (
    "J0_over_B",
    "J1_over_B",
    "excess_removed",
    "reduction",
    "token_utilization",
    "row_local_excess",
    "cv_max",
    "global_excess",
    "predicted_saving",
    "predicted_move_cost",
)
SUM_FIGURES = ("rows", "rows_bound", "dropped", "joint_cost")


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """The plans of a rollout, one a step, over the sample positions of each step."""

    plans: list[Plan]
    positions: list[np.ndarray]
    fallback: str | None
    ended_at: float

    @property
    def rows(self) -> list[Rows]:
        return [plan.rows for plan in self.plans]


@dataclass(kw_only=True, slots=True)
class PlacedRollout:
    """A rollout between `place` and `join`."""

    policy: str
    sealed: SealedRollout
    carried: Placement
    placement: Placement
    whole: Window
    positions: list[np.ndarray]
    admissions: list[Admission]
    started_at: float
    joined: Joined | None = None


class RolloutPlanner:
    """The planner's state over a run: carried placement, demand shares, guard."""

    def __init__(
        self,
        *,
        policy: str,
        config: SlimeConfig,
        cost: CostModel,
        options: PlannerOptions,
        carried: Placement | None = None,
        calls: PlannerCalls | None = None,
    ):
        self.config, self.cost, self.options = config, cost, options
        self.calls = calls or PlannerCalls()
        self.guard = Guard(
            policy=policy,
            patience=config.guard.patience,
            calibration_windows=config.guard.calibration_windows,
            tolerance=config.guard.tolerance,
        )
        self.carried = carried
        self.shares: np.ndarray | None = None
        self.num_fallbacks = 0
        self._go_home = False
        self._open: dict[int, PlacedRollout] = {}

    def place(
        self, sealed: SealedRollout, topology: Topology, may_move: bool = True
    ) -> PlacedRollout:
        """Place one sealed rollout and start its row searches.

        may_move: False keeps the carried placement, whatever the policy.
        """
        whole, steps, positions = windows_of(sealed, self.shares)
        if self.carried is not None and not _fits(self.carried, whole, topology):
            logger.warning("the saved placement is of another job: planning starts from identity")
            self.carried = None
        if self.carried is None:
            self.carried = Placement.identity(
                whole.num_layers, whole.num_experts, topology.num_ep_ranks
            )
        carried, policy = self.carried, self.guard.effective
        blind = self.shares is None and bool(whole.estimated.all())
        if blind or not may_move:
            policy = POLICIES[policy].without_moves
        planned_as = self.config.planner.observe_as if policy == "observe" else policy
        calls = PlannerCalls(place=Once(self.calls.place), schedule=self.calls.schedule)
        admissions = [
            Admission(
                window=window,
                topology=topology,
                cost=self.cost,
                carried=carried,
                policy=planned_as,
                options=self.options,
                deadline_seconds=self.config.planner.deadline_seconds,
                calls=calls,
            )
            for window in [whole, *steps]
        ][1:]
        started_at = time.time()
        for admission in admissions:
            admission.start_schedule()
        placement = self._emit(policy, admissions[0].placement)
        known = ~whole.estimated
        if known.any():
            self.shares = demand_shares(whole.demand[known])
        found = PlacedRollout(
            policy=policy,
            sealed=sealed,
            carried=carried,
            placement=placement,
            whole=whole,
            positions=positions,
            admissions=admissions,
            started_at=started_at,
        )
        self._open[sealed.rollout_id] = found
        return found

    def join(self, rollout_id: int) -> Joined:
        """The validated plans of a placed rollout, waiting for its rows until the deadline."""
        rollout = self._open[rollout_id]
        if rollout.joined is None:
            plans = [admission.join() for admission in rollout.admissions]
            fallback = next((a.fallback for a in rollout.admissions if a.fallback), None)
            rollout.joined = Joined(
                plans=plans,
                positions=rollout.positions,
                fallback=fallback,
                ended_at=time.time(),
            )
            self.num_fallbacks += fallback is not None
        return rollout.joined

    def report(self, rollout_id: int, executed: np.ndarray | None = None) -> PlanReport:
        """What to log about a rollout; the planner forgets it afterwards.

        executed: `[layer, expert]` of the real trace where demand was estimated; later rollouts
        without capture are planned on it.
        """
        joined = self.join(rollout_id)
        rollout = self._open.pop(rollout_id)
        slime_cost = sum(self._slime_cost(admission) for admission in rollout.admissions)
        reports = [plan.report for plan in joined.plans]
        figures = {f"plan/{n}": float(np.mean([r[n] for r in reports])) for n in MEAN_FIGURES}
        figures |= {f"plan/{n}": float(sum(r[n] for r in reports)) for n in SUM_FIGURES}
        placement = joined.plans[0].placement
        moved = placement.num_moved(rollout.carried)
        saving = 1.0 - figures["plan/joint_cost"] / slime_cost if slime_cost else 0.0
        figures |= {
            "plan/capture_coverage": float(1.0 - rollout.whole.estimated.mean()),
            "plan/saving_over_slime": saving,
            "place/planned_moves": float(moved),
            "place/planned_mb": moved * self.options.move.bytes_per_expert / 2**20,
            "place/churn": moved / placement.expert_of_slot.size,
            "place/cv_max": figures.pop("plan/cv_max"),
            "place/global_excess": figures.pop("plan/global_excess"),
            "capture/missing": float(rollout.whole.estimated.sum()),
            "capture/filler_rows": float((rollout.whole.length - rollout.whole.routed_rows).sum()),
            "capture/stale": float(rollout.sealed.num_stale),
            "capture/mixed": float(rollout.sealed.num_mixed),
            "fallback": float(self.num_fallbacks),
        }
        if executed is not None:
            self.shares = demand_shares(executed[None])
            topology, top_k = rollout.admissions[0].topology, rollout.whole.top_k
            figures |= regret(
                executed, rollout.placement, rollout.carried, topology, self.options, top_k
            )
        if self.guard.seconds_per_cost is not None:
            figures["guard/seconds_per_cost"] = self.guard.seconds_per_cost
        load = rollout.whole.expert_load
        identity = Placement.identity(*load.shape, placement.num_ep_ranks)
        return PlanReport(
            figures=figures,
            slime_cost=slime_cost,
            num_tokens=int(rollout.whole.length.sum()),
            loads=(rank_load(load, identity), rank_load(load, placement)),
        )

    def forget(self, rollout_id: int) -> None:
        """Drop a rollout that nobody will report about."""
        self._open.pop(rollout_id, None)

    def measured(
        self, policy: str, slime_cost: float, seconds: float, exposed: float
    ) -> str | None:
        """Take one trained rollout's time; returns what the guard says when it steps down."""
        if not self.guard.measured(policy, slime_cost, seconds, exposed):
            return None
        self._go_home = self.config.guard.return_to_identity
        return self.guard.message

    def _emit(self, policy: str, planned: Placement) -> Placement:
        """The placement that training must commit; plans chain from it."""
        carried = self.carried
        assert carried is not None
        if POLICIES[policy].places:
            self.carried = planned
        elif self._go_home:
            self._go_home = False
            home = Placement.identity(*carried.expert_of_slot.shape, carried.num_ep_ranks)
            if carried.num_moved(home):
                self.carried = Placement(
                    expert_of_slot=home.expert_of_slot,
                    num_ep_ranks=home.num_ep_ranks,
                    version=carried.version + 1,
                )
        return self.carried  # type: ignore[return-value]

    def _slime_cost(self, admission: Admission) -> float:
        """Modelled joint cost of slime's own schedule under identity placement."""
        window, topology = admission.window, admission.topology
        identity = Placement.identity(window.num_layers, window.num_experts, topology.num_ep_ranks)
        try:
            result = schedule(window, topology, self.cost, identity, "off", self.options)
        except ValueError:
            return 0.0
        return result.report["joint_cost"]


def _fits(placement: Placement, window: Window, topology: Topology) -> bool:
    """Whether a placement has the sizes of this job; a resumed job may have another EP size."""
    shape = (window.num_layers, window.num_experts)
    return placement.expert_of_slot.shape == shape and (
        placement.num_ep_ranks == topology.num_ep_ranks
    )


def digest_of(placement: Placement) -> str:
    """What all ranks must agree on before experts move."""
    return hashlib.sha256(placement.expert_of_slot.tobytes()).hexdigest()
