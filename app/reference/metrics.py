"""Write docs/metrics.md from the metric table: `python -m app.reference.metrics`."""

from __future__ import annotations

from pathlib import Path

from app.local.metrics import METRICS
from app.results.wandb_log import PREFIX, STEP_KEY

PATH = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = f"""# Metrics

wandb names start with `{PREFIX}`; the step axis is `{STEP_KEY}`. Fractions unless a unit is named;
MB = 2^20 bytes. This page is written by `python -m app.reference.metrics` from
`app/local/metrics.py`.
"""
TIMES = """
## When a time starts and ends

| time | starts | ends |
|---|---|---|
| `time/place` (T_place) | sealing of the window | placement ready |
| `time/aux` (T_aux) | sealing | rewards, statistics and safety gates are done |
| `time/gate_tail` | T_aux | T_place, if that is later; else 0 |
| `time/plan` (T_plan) | the row search starts | rows are ready |
| `time/state` (T_state) | state loading starts | state is loaded, commit included |
| `time/batch_await` | end of T_state | the first row is ready on the last rank |
| `time/train` | barrier before zero_grad | barrier after optimizer.step, slowest rank |

`overlap` is the part of T_plan that lies inside T_state, over T_plan. `exposed_ms` is what nothing
hid. `tps` counts positions fed to the model on all ranks, padding excluded, over `time/train`; over
several windows it is the sum of positions over the sum of seconds.
"""


def reference() -> str:
    """Return the page: one table in the order of `METRICS`, then the times."""
    rows = [f"| `{PREFIX}{name}` | {_cell(meaning)} |" for name, meaning in METRICS.items()]
    return "\n".join([HEAD, "| metric | meaning |", "|---|---|", *rows]) + "\n" + TIMES


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PATH.write_text(reference())
