"""Read the real files of an offline wandb run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wandb.proto import wandb_internal_pb2

FILE_HEADER, BLOCK, RECORD_HEADER = 7, 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


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


def _records(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format: blocks of 32 KiB, each chunk with checksum, length, type."""
    position, partial = FILE_HEADER, b""
    while position + RECORD_HEADER <= len(data):
        if BLOCK - position % BLOCK < RECORD_HEADER:
            position += BLOCK - position % BLOCK
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        chunk = data[position + RECORD_HEADER : position + RECORD_HEADER + length]
        position += RECORD_HEADER + length
        partial = chunk if kind in (FULL, FIRST) else partial + chunk
        if kind in (FULL, LAST):
            yield partial


def _read(file: Path) -> OfflineRun:
    data = file.read_bytes()
    assert data[:4] == b":W&B", f"{file} is not a wandb run file"
    run, names = OfflineRun(), {}
    for encoded in _records(data):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(encoded)
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
