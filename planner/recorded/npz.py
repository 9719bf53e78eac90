"""Windows in `.npz` files: our own format with its writer, and shipped count files.

Our format holds any number of windows of one model, trajectories concatenated in order:
`format` = "routepack-windows-1", `window_id` and `num_trajectories` `[window]`, `top_k`,
`layer_numbers` `[layer]`, `length`, `routed_rows`, `group`, `estimated` `[trajectory]` and
`demand` `[trajectory, layer, expert]`.
A count file holds `counts` `[sample, layer, expert]`, `routed_tokens` and `prompt_tokens`
`[sample]`.
"""

from __future__ import annotations

import lzma
import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.recorded.routing import smallest_demand
from planner.window import Window

FORMAT = "routepack-windows-1"
_KEYS = (
    "window_id",
    "num_trajectories",
    "top_k",
    "layer_numbers",
    "length",
    "routed_rows",
    "group",
    "estimated",
    "demand",
)
_COUNT_KEYS = ("counts", "routed_tokens", "prompt_tokens")
DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RuntimeError,  # zipfile: a member that says it is encrypted, or made by a later version
    SyntaxError,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What numpy and zipfile raise for an archive with wrong bytes in it."""


def write_windows(path: str | os.PathLike[str], windows: Iterable[Window]) -> None:
    """Write windows of one model to one `.npz`, whole or not at all.

    Raises ValueError when there is none, they differ in layers, experts or top_k, or the name does
    not end in `.npz`.
    """
    target = Path(path)
    if target.suffix != ".npz":
        raise ValueError(f"{target}: expected a name that ends in .npz")
    held = list(windows)
    if not held:
        raise ValueError(f"{target}: no windows to write")
    first = held[0]
    for window in held:
        if (window.layer_numbers, window.num_experts, window.top_k) != (
            first.layer_numbers,
            first.num_experts,
            first.top_k,
        ):
            raise ValueError(
                f"{target}: window {window.window_id} and window {first.window_id} differ in "
                "layers, experts or top_k; write the windows of one model to one file"
            )
    arrays = {
        "format": np.array(FORMAT),
        "window_id": np.array([window.window_id for window in held], np.int64),
        "num_trajectories": np.array([window.num_trajectories for window in held], np.int64),
        "top_k": np.array(first.top_k, np.int64),
        "layer_numbers": np.array(first.layer_numbers, np.int64),
        "length": np.concatenate([window.length for window in held]),
        "routed_rows": np.concatenate([window.routed_rows for window in held]),
        "group": np.concatenate([window.group for window in held]),
        "estimated": np.concatenate([window.estimated for window in held]),
        "demand": np.concatenate([smallest_demand(window.demand) for window in held]),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def read_npz(path: Path, top_k: int | None = None) -> list[Window]:
    """Read our windows or a count file; raises ValueError naming a damaged or foreign file.

    top_k: needed by no format; where given, a count file must agree with it.
    """
    arrays = load_npz(path)
    if "format" in arrays:
        return _ours(path, arrays)
    if all(key in arrays for key in _COUNT_KEYS):
        return [_of_counts(path, arrays, top_k)]
    raise ValueError(
        f"{path}: holds {sorted(arrays)}, which is neither a file of write_windows "
        f"(format {FORMAT}) nor a count file {list(_COUNT_KEYS)}"
    )


def load_npz(path: Path) -> dict[str, NDArray[np.generic]]:
    """All arrays of an `.npz`, never unpickling; ValueError naming a file that cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it is not an .npz archive")
            return {key: archive[key] for key in archive.files}
    except DAMAGE as error:
        raise ValueError(f"{path}: not a readable .npz file ({error})") from error


def _ours(path: Path, arrays: dict[str, NDArray[np.generic]]) -> list[Window]:
    if str(arrays["format"]) != FORMAT:
        raise ValueError(
            f"{path}: format {str(arrays['format'])!r}, expected {FORMAT!r}; read it with the "
            "version of RoutePack that wrote it"
        )
    absent = [key for key in _KEYS if key not in arrays]
    if absent:
        raise ValueError(f"{path}: damaged, {absent} are missing")
    try:
        sizes = arrays["num_trajectories"].astype(np.int64)
        ends = np.cumsum(sizes)
        num = arrays["demand"].shape[0]
        if len(arrays["window_id"]) != len(sizes) or not len(sizes) or ends[-1] != num:
            raise ValueError(f"num_trajectories {sizes.tolist()} do not add up to {num}")
        return [
            Window(
                window_id=int(window_id),
                length=arrays["length"][end - size : end],
                routed_rows=arrays["routed_rows"][end - size : end],
                demand=arrays["demand"][end - size : end],
                top_k=int(arrays["top_k"]),
                group=arrays["group"][end - size : end],
                estimated=arrays["estimated"][end - size : end],
                layer_numbers=tuple(int(number) for number in arrays["layer_numbers"]),
            )
            for window_id, size, end in zip(arrays["window_id"], sizes, ends, strict=True)
        ]
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: damaged ({error})") from error


def _of_counts(path: Path, arrays: dict[str, NDArray[np.generic]], top_k: int | None) -> Window:
    """One window of all samples; tokens are prompt + routed, demand covers routed tokens only."""
    counts, routed, prompt = (arrays[key] for key in _COUNT_KEYS)
    try:
        if counts.ndim != 3 or not len(routed) or len(prompt) != len(routed):
            raise ValueError(f"shapes {counts.shape}, {routed.shape} and {prompt.shape}")
        rows = routed.astype(np.int64)
        found = int(counts[0, 0].sum()) // max(1, int(rows[0]))
        if top_k is not None and top_k != found:
            raise ValueError(f"counts sum to top-{found}, top_k says {top_k}")
        return Window(
            window_id=0,
            length=prompt.astype(np.int64) + rows,
            routed_rows=rows,
            demand=counts,
            top_k=found,
        )
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: not a count file ({error})") from error
