"""`routepack warmup`: train the starting weights of a configuration."""

from __future__ import annotations

import argparse

from app.commands.arguments import add_run, run_config
from app.results.figures import write_figures


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_run(command)


def run(arguments: argparse.Namespace) -> int | None:
    from app.local.warmup import warm_up, warmup_path

    config = run_config(arguments)
    figures = warm_up(config)
    write_figures(arguments.json, "warmup", figures)
    print(
        f"{warmup_path(config)}: {figures['warmup.steps']:.0f} steps in "
        f"{figures['warmup.seconds']:.0f} s, loss {figures['warmup.first_loss']:.3f} -> "
        f"{figures['warmup.last_loss']:.3f}, {figures['warmup.mb']:.1f} MB"
    )
