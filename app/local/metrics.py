"""The metrics of one window under their wandb names; every name is documented here."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from app.local.admit import Admitted
from app.local.rollout import SampledWindow
from app.local.steps import combined
from app.local.trainer import StepResult

METRICS: dict[str, str] = {
    "tps": "positions per second of the training region, padding excluded, over all ranks",
    "window_seconds": "end to end: admission + log-probs + training region + weight export",
    "exposed_ms": "what planning, commit and waiting added between sealing and the first row",
    "plan/J0_over_B": "joint cost of global length FFD over the lower bound B (Equation 17)",
    "plan/J1_over_B": "joint cost of the plan over the lower bound B",
    "plan/excess_removed": "eta = (J0 - J1) / (J0 - B), a fraction",
    "plan/reduction": "1 - J1 / J0",
    "plan/rows": "execution rows of the window, over its optimizer steps",
    "plan/rows_bound": "lower bound on the rows, over the optimizer steps",
    "plan/token_utilization": "tokens over rows x DP slots x capacity",
    "plan/capture_coverage": "share of trajectories with captured routing",
    "plan/row_local_excess": "expert load above the global peak, over uniform load (Section 4.2)",
    "plan/dropped": "trajectories dropped so that no cell is empty",
    "place/moved_experts": "experts that changed their slot, over all layers",
    "place/moved_mb": "megabytes (2^20) of expert state that left a rank, over all ranks",
    "place/churn": "moved experts over all experts",
    "place/cv_max": "largest rank-load coefficient of variation of any layer after placing",
    "place/global_excess": "peak rank load above uniform, summed over layers (Section 4.2)",
    "time/place": "T_place: sealing to placement ready, seconds",
    "time/aux": "T_aux: sealing to the end of rewards and statistics, seconds",
    "time/gate_tail": "max(0, T_place - T_aux), seconds",
    "time/plan": "T_plan: start of the row search to rows ready, seconds",
    "time/state": "T_state: state loading, commit included, seconds",
    "time/commit": "commit of the placement, seconds",
    "time/verify": "checksums of that commit, seconds (`commit.verify`)",
    "time/batch_await": "end of T_state to the first row ready on the last rank, seconds",
    "time/log_probs": "reference log-probs for the KL penalty, seconds",
    "time/train": "training region, all optimizer steps, seconds",
    "overlap": "share of T_plan that lies inside T_state",
    "fallback": "windows so far that fell back to base rows",
    "capture/missing": "trajectories without usable capture",
    "capture/executed_equals_captured": "1 when every row executed the captured expert counts",
    "reward": "mean reward of the window",
    "loss": "policy loss, normalised by one sum over the optimizer step",
    "grad_norm": "gradient norm before clipping, mean over the optimizer steps",
    "clip_fraction": "share of response tokens whose ratio is clipped, over the optimizer steps",
    "clip_fraction_last": "the same in the last optimizer step; 0 with one step a rollout",
    "kl": "KL to the starting weights (low_var_kl); with train.use_kl_loss",
    "response_tokens": "mean response length",
    "calibrate/drift": "largest relative change of a re-fitted cost coefficient from the "
    "configured one; with planner.recalibrate_every",
    "calibrate/r2": "share of the variance of row times that the re-fitted cost explains",
}

PLAN_MEANS = (
    "J0_over_B",
    "J1_over_B",
    "excess_removed",
    "reduction",
    "token_utilization",
    "capture_coverage",
    "row_local_excess",
)
PLAN_SUMS = ("rows", "rows_bound", "dropped")


def window_metrics(
    rollout: SampledWindow,
    admitted: Admitted,
    steps: Sequence[StepResult],
    *,
    time_aux: float,
    time_log_probs: float,
    export_seconds: float,
    num_fallbacks: int,
) -> dict[str, float]:
    """Return this window's metrics by short name, without prefix and step key.

    Figures of plans are means over the optimizer steps, rows and dropped trajectories sums.
    """
    window, step = rollout.window, combined(steps)
    reports = [plan.report for plan in admitted.plans]
    num_slots = window.num_layers * window.num_experts
    response = [t.num_tokens - t.num_prompt_tokens for t in rollout.trajectories]
    outside = time_aux + time_log_probs + export_seconds
    return {
        "tps": step.tps,
        "window_seconds": admitted.exposed + step.seconds + outside,
        "exposed_ms": 1e3 * admitted.exposed,
        **{f"plan/{name}": fmean(r[name] for r in reports) for name in PLAN_MEANS},
        **{f"plan/{name}": sum(r[name] for r in reports) for name in PLAN_SUMS},
        "place/moved_experts": float(admitted.commit.num_moved),
        "place/moved_mb": admitted.moved_mb,
        "place/churn": admitted.commit.num_moved / num_slots,
        "place/cv_max": reports[0]["cv_max"],
        "place/global_excess": fmean(r["global_excess"] for r in reports),
        "time/place": admitted.time_place,
        "time/aux": time_aux,
        "time/gate_tail": max(0.0, admitted.time_place - time_aux),
        "time/plan": admitted.time_plan,
        "time/state": admitted.time_state,
        "time/commit": admitted.commit.seconds,
        "time/verify": admitted.commit.verify_seconds,
        "time/batch_await": admitted.time_batch_await,
        "time/log_probs": time_log_probs,
        "time/train": step.seconds,
        "overlap": admitted.overlap,
        "fallback": float(num_fallbacks),
        "capture/missing": float(window.estimated.sum()),
        "capture/executed_equals_captured": float(not window.estimated.any()),
        "reward": float(rollout.rewards.mean()),
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "clip_fraction": step.clip_fraction,
        "clip_fraction_last": steps[-1].clip_fraction,
        "response_tokens": sum(response) / len(response),
    }
