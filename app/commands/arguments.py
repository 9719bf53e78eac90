"""Types and groups of arguments that several commands share."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.config import RunConfig

Commands = argparse._SubParsersAction


def add_run(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    """--config, --seed and --json of a command that runs the embedded trainer."""
    command.add_argument("--config", required=required, metavar="FILE", help="YAML of the run")
    command.add_argument("--seed", type=int, help="replaces the configuration's seed")
    add_json(command)


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", help="write the figures here")


def add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("--report", metavar="HTML", help="write the page here")


def run_config(arguments: argparse.Namespace) -> RunConfig:
    """The configuration of `add_run`'s arguments; raises ConfigError."""
    from app.config import load_config

    config = load_config(arguments.config)
    return config if arguments.seed is None else replace(config, seed=arguments.seed)


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    return _at_least(text, 1)


def whole(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() else -1
    if value < least:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a whole number of at least {least}"
        )
    return value


def seconds(text: str) -> float:
    """A positive, finite number of seconds, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds above 0")
    return value


def seconds_or_zero(text: str) -> float:
    """As `seconds`, or 0."""
    return 0.0 if text in ("0", "0.0") else seconds(text)


def layers(text: str) -> tuple[int, ...]:
    """`3-91` or `1,2,5` as layer numbers, for argparse."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash)):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected layers as 3-91 or 1,2,5")
        found += range(int(first), int(last if dash else first) + 1)
    if not found or sorted(set(found)) != found:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected ascending layers without repeats")
    return tuple(found)
