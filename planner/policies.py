"""The only list of the policies (definitions.md, Policies and where rows come from).

Every command, flag, table and check derives its choice of policies from `POLICIES`; a test reads
the sources and refuses another list of these names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Need = Literal["capture", "movable_experts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What a policy decides, and what it asks of a job."""

    name: str
    places: bool
    """Moves experts between EP ranks (Section 3.2)."""
    rows: Literal["slime", "dp_local_ffd", "rows_from", "searched"]
    """slime's schedule; the paper's DP-local FFD; those that the option `rows_from` names; or
    searched (Section 4)."""
    executes: bool
    """Training runs its plan; otherwise slime's own schedule, as it stands."""
    needs: tuple[Need, ...]
    """`capture`: routed experts of the rollouts. `movable_experts`: whole experts on EP ranks."""
    steps_down_to: str
    """What the guard goes on with when the policy loses; itself where nothing is below."""
    compared: bool
    """In the default choice of commands that compare policies."""
    meaning: str
    """One clause for --help and the docs."""

    @property
    def searches_rows(self) -> bool:
        return self.rows == "searched"

    @property
    def decides(self) -> bool:
        """Places experts, searches rows, or both: what RoutePack adds to a fixed schedule."""
        return self.places or self.searches_rows

    @property
    def without_moves(self) -> str:
        """The policy that keeps this one's rows where no expert may move."""
        return self.steps_down_to if self.places else self.name

    def runs_slime_rows(self, rows_from: str) -> bool:
        """Whether its rows are slime's own under the option `rows_from`."""
        return self.rows == "slime" or (self.rows == "rows_from" and rows_from == "slime")


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(
            name="off",
            places=False,
            rows="slime",
            executes=False,
            needs=(),
            steps_down_to="off",
            compared=True,
            meaning="slime untouched",
        ),
        Policy(
            name="observe",
            places=False,
            rows="slime",
            executes=False,
            needs=("capture",),
            steps_down_to="observe",
            compared=False,
            meaning="slime's schedule; plans are made and logged only",
        ),
        Policy(
            name="base",
            places=False,
            rows="dp_local_ffd",
            executes=True,
            needs=("capture",),
            steps_down_to="observe",
            compared=True,
            meaning="the paper's DP-local FFD",
        ),
        Policy(
            name="reschedule",
            places=False,
            rows="searched",
            executes=True,
            needs=("capture",),
            steps_down_to="observe",
            compared=False,
            meaning="searched rows, experts stay",
        ),
        Policy(
            name="reroute",
            places=True,
            rows="rows_from",
            executes=True,
            needs=("capture", "movable_experts"),
            steps_down_to="observe",
            compared=True,
            meaning="expert placement, rows stay",
        ),
        Policy(
            name="full",
            places=True,
            rows="searched",
            executes=True,
            needs=("capture", "movable_experts"),
            steps_down_to="reschedule",
            compared=True,
            meaning="placement and searched rows",
        ),
    )
}

COMPARED = tuple(name for name, policy in POLICIES.items() if policy.compared)
"""Default of `compare`, `train --online`, `verify` and `bench gpu-replay`: off first."""
TRAINED = tuple(name for name, policy in POLICIES.items() if policy.executes or not policy.needs)
"""Policies that train differently from each other: all but observe, which trains as off does."""
DECIDING = tuple(name for name, policy in POLICIES.items() if policy.decides)
"""Policies in which RoutePack decides something."""

OFF, BASE = "off", "base"
"""slime's own schedule and the paper's: what everything is compared with."""
FULL_OVER_OFF = ("full", OFF)
"""What a user wants to know, as (above, below)."""


def policy_of(name: str) -> Policy:
    """The policy of that name; raises ValueError with the names that there are."""
    if name not in POLICIES:
        raise ValueError(f"policy: got {name!r}, expected one of {tuple(POLICIES)}")
    return POLICIES[name]


def help_text() -> str:
    """All policies with their meaning, for --help."""
    return " ".join(f"{name}: {policy.meaning}." for name, policy in POLICIES.items())
