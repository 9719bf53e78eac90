"""From modelled savings to seconds per window, and to one line that can be "no"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.advise.study import PolicyResult
from planner.policies import DECIDING

WORTH = 0.02
"""Share of training time below which a saving is not worth the change: within a job's noise, and
traffic that the model leaves out can eat it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """One policy against off, means over windows.

    saved: share of off's modelled training time. seconds, exposed, net: per window, None where the
    speed or the bytes are not known; net = seconds - exposed.
    """

    saved: float
    seconds: float | None = None
    exposed: float | None = None
    net: float | None = None
    net_share: float | None = None

    @property
    def decisive(self) -> float:
        """The net share where it is known, else the modelled one."""
        return self.saved if self.net_share is None else self.net_share


def worth(
    result: PolicyResult,
    off: PolicyResult,
    *,
    seconds_per_cost: float | None,
    moves_known: bool,
    state_seconds: float,
) -> Worth:
    """Exposed time: placement, and what search and commit take beyond the state loading.

    The search runs beside state loading and commit (Figure 9): exposed = T_place +
    max(T_plan, T_state + T_commit) - T_state.
    """
    saved = 1.0 - result.makespan / off.makespan
    if result is off:
        return Worth(saved=0.0)
    if seconds_per_cost is None:
        return Worth(saved=saved)
    seconds = seconds_per_cost * (off.makespan - result.makespan)
    moved = result.mean("moved_experts") > 0
    if moved and not moves_known:
        return Worth(saved=saved, seconds=seconds)
    commit = result.mean("predicted_move_cost") if moved else 0.0
    searched = max(result.mean("schedule_seconds"), state_seconds + commit)
    exposed = result.mean("place_seconds") + searched - state_seconds
    net = seconds - exposed
    return Worth(
        saved=saved,
        seconds=seconds,
        exposed=exposed,
        net=net,
        net_share=net / (seconds_per_cost * off.makespan),
    )


def answer(found: Mapping[str, Worth], imbalance: float, is_assumed: bool) -> str:
    """One line: yes, hardly or no, with the policy, its saving and the reason."""
    policy = max(DECIDING, key=lambda name: found[name].decisive)
    best = found[policy]
    if best.net is None:
        gain = f"{policy} would save {best.saved:.1%} of modelled training time, moves not priced"
    else:
        gain = (
            f"{policy} would save {best.net:.2f} s a window net ({best.net_share:.1%} of training "
            f"time: {best.seconds:.2f} s modelled, {best.exposed:.2f} s exposed)"
        )
    if best.decisive >= WORTH:
        line = f"Yes: {gain}."
    elif best.decisive > 0:
        line = f"Hardly: {gain}; that is within the noise of a job."
    else:
        line = (
            f"No: no policy pays on this job; the best, {policy}, saves {best.saved:.1%} before "
            "its own cost"
        )
        line += f" and loses {-best.net:.2f} s a window after it." if best.net is not None else "."
    if imbalance < 1.05:
        line += f" The busiest EP rank has only {imbalance:.2f}x the mean load."
    if is_assumed:
        line += " Seconds rest on an assumed speed: give --window-seconds from your log."
    return line
