"""Recorded and synthetic windows: readers, a writer, frozen generators and presets."""

from planner.recorded.npz import write_windows
from planner.recorded.presets import Preset, preset
from planner.recorded.read import read

__all__ = ["Preset", "preset", "read", "write_windows"]
