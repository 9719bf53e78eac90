"""Read recorded windows from whatever a source is.

- `synthetic:*`, `slime:*`: a preset's synthetic windows.
- `*.npz`: windows of `write_windows`, or the count file of a trace.
- A directory of `*.npz`: all their windows, by window id.
- A directory with `router_trace_rank*.jsonl`: Megatron's routing trace.
- A torch file, a directory of them, or a template with `{rollout_id}`: slime's rollout dumps, or
  SGLang's expert distribution.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner.recorded.estimate import demand_shares
from planner.recorded.megatron_trace import is_megatron_trace, megatron_windows
from planner.recorded.npz import read_npz
from planner.recorded.presets import preset
from planner.recorded.sglang_dump import sglang_window
from planner.recorded.slime_dump import slime_windows
from planner.recorded.torch_file import load_torch_file
from planner.window import Window

_TORCH = (".pt", ".pth", ".pkl", ".bin")


def read(
    source: str | os.PathLike[str],
    *,
    num_windows: int | None = None,
    num_trajectories: int | None = None,
    num_experts: int | None = None,
    moe_layers: Sequence[int] | None = None,
    top_k: int | None = None,
    missing: str = "error",
    num_steps: int = 1,
    pp: int = 1,
    ranks_per_slot: int = 1,
) -> list[Window]:
    """Read all windows of a source, in order.

    num_windows: first windows to keep (default: all; 20 of a preset).
    num_trajectories: first trajectories of each window to keep.
    num_experts, moe_layers, top_k: the model, where the source does not say it.
    missing: `error` or `estimate`, for slime samples without routed experts.
    num_steps: optimizer steps of one slime rollout.
    pp, ranks_per_slot: pipeline stages and TP x CP of a Megatron trace.
    Raises ValueError naming the source when it is missing, damaged, of no known kind, or needs an
    argument that was not given.
    """
    for name, value in (("num_windows", num_windows), ("num_trajectories", num_trajectories)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    text = os.fspath(source)
    if text.startswith(("synthetic:", "slime:")):
        windows = list(preset(text).windows(20 if num_windows is None else num_windows))
    else:
        windows = _read_files(
            Path(text),
            num_windows=num_windows,
            num_experts=num_experts,
            moe_layers=moe_layers,
            top_k=top_k,
            missing=missing,
            num_steps=num_steps,
            pp=pp,
            ranks_per_slot=ranks_per_slot,
        )
    if num_trajectories is not None:
        short = [w for w in windows if w.num_trajectories < num_trajectories]
        if short:
            raise ValueError(
                f"{text}: window {short[0].window_id} has {short[0].num_trajectories} "
                f"trajectories, num_trajectories asks for {num_trajectories}"
            )
        windows = [window.select(np.arange(num_trajectories)) for window in windows]
    return windows


def _read_files(
    path: Path,
    *,
    num_windows: int | None,
    num_experts: int | None,
    moe_layers: Sequence[int] | None,
    top_k: int | None,
    missing: str,
    num_steps: int,
    pp: int,
    ranks_per_slot: int,
) -> list[Window]:
    if path.is_dir() and is_megatron_trace(path):
        windows = megatron_windows(
            path, num_experts=num_experts, pp=pp, ranks_per_slot=ranks_per_slot
        )
        return windows[:num_windows]
    files = _files(path)
    if files[0].suffix == ".npz":
        windows = [window for file in files for window in read_npz(file, top_k)]
        return sorted(windows, key=lambda window: window.window_id)[:num_windows]
    windows = []
    shares = None
    for file in files:
        content = load_torch_file(file)
        if "samples" in content:
            windows += slime_windows(
                content,
                file,
                num_experts=num_experts,
                moe_layers=moe_layers,
                top_k=top_k,
                missing=missing,
                num_steps=num_steps,
                previous_shares=shares,
            )
            shares = demand_shares(windows[-1].demand)
        elif "logical_count" in content or "records" in content:
            windows.append(
                sglang_window(
                    content, file, top_k=top_k, moe_layers=moe_layers, window_id=len(windows)
                )
            )
        else:
            raise ValueError(
                f"{file}: holds {sorted(map(str, content))[:8]}, which is neither slime's rollout "
                "dump (samples) nor SGLang's expert distribution (logical_count)"
            )
        if num_windows is not None and len(windows) >= num_windows:
            break
    return windows[:num_windows]


def _files(path: Path) -> list[Path]:
    """The files that a path, directory or `{rollout_id}` template names, in rollout order."""
    if "{rollout_id}" in str(path):
        before, after = (re.escape(part) for part in path.name.split("{rollout_id}", 1))
        pattern = re.compile(f"{before}\\d+{after}$")
        candidates = path.parent.iterdir() if path.parent.is_dir() else iter(())
        found = [entry for entry in candidates if pattern.match(entry.name)]
        if not found:
            raise ValueError(f"{path}: no file matches, with digits for {{rollout_id}}")
        return sorted(found, key=_rollout_order)
    if path.is_file():
        if path.suffix == ".npz" or path.suffix in _TORCH:
            return [path]
        raise ValueError(
            f"{path}: expected .npz, a torch file {_TORCH}, or a directory of a routing trace"
        )
    if not path.is_dir():
        raise ValueError(f"{path}: no such file, directory or preset")
    for suffixes in ((".npz",), _TORCH):
        found = [
            entry
            for entry in path.iterdir()
            if entry.suffix in suffixes and not entry.name.startswith((".", "eval_"))
        ]
        if found:
            return sorted(found, key=_rollout_order)
    raise ValueError(
        f"{path}: a directory without .npz files, torch files or router_trace_rank*.jsonl"
    )


def _rollout_order(path: Path) -> tuple[list[int], str]:
    """Sort names by the numbers in them, so that rollout 10 follows 9."""
    return [int(number) for number in re.findall(r"\d+", path.name)], path.name
