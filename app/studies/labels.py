"""Task labels of a recorded window's trajectories, from a CSV beside it (Figure 5c)."""

from __future__ import annotations

import csv
from pathlib import Path

from planner.window import Window

COLUMNS = ("label", "family", "category", "task")


def read_labels(path: str | Path, window: Window) -> list[str]:
    """One label for each trajectory of the window.

    The CSV has `index` (place of the trajectory in the window) and one of COLUMNS. Raises
    ValueError when it is not such a file, or leaves a trajectory without a label.
    """
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        held = rows[0].keys() if rows else ()
        column = next((name for name in COLUMNS if name in held), None)
        if column is None or "index" not in held:
            raise ValueError(f"expected the columns index and one of {', '.join(COLUMNS)}")
        by_index = {int(row["index"]): str(row[column]) for row in rows}
    except (UnicodeDecodeError, csv.Error, ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a CSV of task labels ({error})") from error
    absent = [i for i in range(window.num_trajectories) if i not in by_index]
    if absent:
        raise ValueError(f"{path}: trajectory {absent[0]} has no label; give one row for each")
    return [by_index[i] for i in range(window.num_trajectories)]
