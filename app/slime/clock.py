"""Table 10's times of one rollout, from wall-clock marks of three processes; pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Wall-clock seconds. Sealed and placed by manager and planner, state and rows by this rank."""

    sealed_at: float
    aux_seconds: float
    placed_at: float
    schedule_started_at: float
    schedule_ended_at: float
    state_started_at: float
    state_ended_at: float
    commit_seconds: float
    rows_at: float
    """When this rank had its rows in hand."""


def table_10(marks: Marks) -> dict[str, float]:
    """T_aux, T_place, gate tail, T_plan, T_state, commit, batch await, overlap, exposed.

    In slime rewards and conversion end before sealing, so T_aux (sealing to their end) is zero and
    the whole of T_place is gate tail; the conversion itself is `time/convert`. exposed_ms is what
    planning, commit and waiting added: nothing else stands between sealing and the first row.
    """
    time_place = max(0.0, marks.placed_at - marks.sealed_at)
    time_plan = max(0.0, marks.schedule_ended_at - marks.schedule_started_at)
    hidden = min(marks.schedule_ended_at, marks.state_ended_at) - max(
        marks.schedule_started_at, marks.state_started_at
    )
    batch_await = max(0.0, marks.rows_at - marks.state_ended_at)
    return {
        "time/convert": marks.aux_seconds,
        "time/aux": 0.0,
        "time/place": time_place,
        "time/gate_tail": time_place,
        "time/plan": time_plan,
        "time/state": marks.state_ended_at - marks.state_started_at,
        "time/commit": marks.commit_seconds,
        "time/batch_await": batch_await,
        "overlap": max(0.0, hidden) / time_plan if time_plan > 0 else 1.0,
        "exposed_ms": 1e3 * (time_place + marks.commit_seconds + batch_await),
    }
