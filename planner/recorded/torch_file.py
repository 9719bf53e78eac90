"""Load a `torch.save` file without running code that it may contain."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np


def load_torch_file(path: Path) -> dict[str, Any]:
    """The dictionary in a `torch.save` file, with tensors, numpy arrays and plain values only.

    Tensors come to the CPU, memory-mapped where the file allows it.
    Raises ValueError naming the file when torch is missing, the file is damaged, it holds another
    type, or its content is not a dictionary.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"{path}: reading a torch file needs torch; pip install torch, or convert the file "
            "with write_windows on a machine that has it"
        ) from error
    try:
        with torch.serialization.safe_globals(_numpy_types()):
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except Exception as error:  # whatever a damaged file makes torch raise becomes one clear error
        raise ValueError(
            f"{path}: not a torch file with tensors, arrays and plain values only "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, expected a dictionary")
    return content


def as_array(value: Any, name: str) -> np.ndarray:
    """A tensor, array or nested list as a numpy array; ValueError naming `name` if ragged."""
    try:
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name}: not a rectangular array ({error})") from error
    if array.dtype.kind == "O":
        raise ValueError(f"{name}: not a rectangular array of numbers")
    return array


def _numpy_types() -> list[Any]:
    """What a pickled numpy array or scalar refers to, under the names of numpy 1 and numpy 2."""
    array = np.zeros(1)
    reconstruct = array.__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    dtypes = [type(np.dtype(code)) for code in "?bBhHiIlLqQefd"]
    names = [
        (reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")
    ] + [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return [np.ndarray, np.dtype, *dict.fromkeys(dtypes), *names]
