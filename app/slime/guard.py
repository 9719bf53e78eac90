"""The guard: measured window time decides whether a policy may go on (design.md, Moving or not).

The first windows run as `observe` and calibrate seconds per unit of modelled cost of slime's own
schedule. From then on a window loses when it took longer, exposed time included, than slime's
schedule of the same window would have by that calibration. After `patience` losing windows in a row
the policy steps down (`Policy.steps_down_to`): full -> reschedule -> observe, reroute -> observe.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from planner.policies import POLICIES


@dataclass(kw_only=True, slots=True)
class Guard:
    """State of the guard; `patience` 0 switches it off."""

    policy: str
    patience: int
    calibration_windows: int = 3
    tolerance: float = 0.02
    num_losses: int = 0
    message: str | None = None
    """What the last step down says; None if there was none."""
    _calibration: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def seconds_per_cost(self) -> float | None:
        """Median seconds per unit of slime's modelled cost; None before calibration."""
        if len(self._calibration) < self.calibration_windows:
            return None
        return median(self._calibration)

    @property
    def effective(self) -> str:
        """The policy of the next window: `observe` while calibrating."""
        if self.patience and POLICIES[self.policy].executes and not self.seconds_per_cost:
            return "observe"
        return self.policy

    def measured(self, policy: str, slime_cost: float, seconds: float, exposed: float) -> bool:
        """Take one window's measurement; True when the policy stepped down because of it.

        policy: what the window ran as. slime_cost: modelled cost of slime's schedule of that
        window. seconds: its training region. exposed: seconds that RoutePack added.
        """
        if policy == "observe":
            if slime_cost > 0:
                self._calibration.append(seconds / slime_cost)
            return False
        scale = self.seconds_per_cost
        if not self.patience or scale is None or policy != self.policy:
            return False
        expected = scale * slime_cost
        lost = seconds + exposed > expected * (1 + self.tolerance)
        self.num_losses = self.num_losses + 1 if lost else 0
        if self.num_losses < self.patience:
            return False
        lower = POLICIES[self.policy].steps_down_to
        self.message = (
            f"policy {self.policy} lost {self.num_losses} windows in a row (the last took "
            f"{seconds + exposed:.2f} s, slime's own schedule would take {expected:.2f} s): "
            f"going on as {lower}"
        )
        self.policy, self.num_losses = lower, 0
        return True
