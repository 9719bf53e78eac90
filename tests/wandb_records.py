"""Read the real files of an offline wandb run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore


@dataclass
class OfflineRun:
    """What one offline run recorded."""

    group: str = ""
    job_type: str = ""
    history: list[dict] = field(default_factory=list)
    step_metric_of: dict[str, str] = field(default_factory=dict)


def offline_runs(folder: Path) -> list[OfflineRun]:
    """Every offline run below `folder`, oldest first."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime)
    return [_read(file) for file in files]


def _read(file: Path) -> OfflineRun:
    store = DataStore()
    store.open_for_scan(str(file))
    run, names = OfflineRun(), {}
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.group, run.job_type = record.run.run_group, record.run.job_type
        elif kind == "metric":
            metric = record.metric
            names[len(names) + 1] = metric.name or metric.glob_name
            step = metric.step_metric or names.get(metric.step_metric_index, "")
            run.step_metric_of[metric.name or metric.glob_name] = step
        elif kind == "history":
            row = {}
            for item in record.history.item:
                key = item.key or "/".join(item.nested_key)
                row[key] = json.loads(item.value_json)
            run.history.append(row)
    return run
