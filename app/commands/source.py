"""The recorded windows that `replay` and `plan` read, and the planner's options for them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from app.commands.arguments import add_json, layers, positive, seconds
from planner.move_cost import MoveCost
from planner.options import PlannerOptions

if TYPE_CHECKING:
    from app.studies.recording import Recording


def add_source(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="a preset (synthetic:tiny, slime:qwen3-30b, ...), an .npz file or a dump",
    )
    for name, what in (("ep", "EP ranks"), ("dp", "DP slots")):
        command.add_argument(f"--{name}", type=positive, help=f"{what} (a preset has its own)")
    command.add_argument("--edp", type=positive, help="EDP shards (default 1, or the preset's)")
    command.add_argument("--capacity", type=positive, help="tokens of a cell")
    for name, what in (("pp", "pipeline stages"), ("tp", "TP size"), ("cp", "CP size")):
        command.add_argument(f"--{name}", type=positive, help=f"{what} (default 1, or preset's)")
    command.add_argument("--trajectories", type=positive, metavar="N", help="first N of a window")
    dump = command.add_argument_group("dumps and traces that do not say it themselves")
    dump.add_argument("--num-experts", type=positive, metavar="E")
    dump.add_argument("--top-k", type=positive, metavar="K")
    dump.add_argument("--moe-layers", type=layers, metavar="A-B", help="MoE layers, as 3-91")
    dump.add_argument(
        "--missing", choices=("error", "estimate"), default="error", help="samples without routing"
    )
    dump.add_argument(
        "--steps", type=positive, default=1, metavar="N", help="optimizer steps of one rollout"
    )
    command.add_argument(
        "--cost", metavar="FILE", help="YAML with stages (name, alpha, beta) and, if known, move"
    )
    command.add_argument(
        "--mode",
        choices=("paper", "cluster"),
        default="paper",
        help="paper: CV target and max(R_min, 2 PP) rows; cluster: net benefit and 1F1B makespan",
    )
    budget = command.add_mutually_exclusive_group()
    budget.add_argument(
        "--budget", type=seconds, metavar="S", help="seconds of one search (default 1)"
    )
    budget.add_argument(
        "--proposals", type=positive, metavar="N", help="proposals of one search (deterministic)"
    )
    command.add_argument("--threads", type=positive, default=2, metavar="N", help="default 2")
    command.add_argument("--seed", type=int, default=0)
    add_json(command)


def recording_of(arguments: argparse.Namespace, num_windows: int | None) -> Recording:
    """The first windows of the source; raises ValueError naming what is wrong with it."""
    from app.studies.recording import open_recording

    return open_recording(
        arguments.source,
        dp=arguments.dp,
        ep=arguments.ep,
        edp=arguments.edp,
        capacity=arguments.capacity,
        num_windows=num_windows,
        num_trajectories=arguments.trajectories,
        cost_file=arguments.cost,
        pp=arguments.pp,
        tp=arguments.tp,
        cp=arguments.cp,
        reading={
            "num_experts": arguments.num_experts,
            "top_k": arguments.top_k,
            "moe_layers": arguments.moe_layers,
            "missing": arguments.missing,
            "num_steps": arguments.steps,
        },
    )


def options_of(arguments: argparse.Namespace, move: MoveCost) -> PlannerOptions:
    """The options of the arguments: the paper's, or those of a cluster."""
    budget = arguments.budget
    if budget is None and arguments.proposals is None:
        budget = 1.0
    cluster = arguments.mode == "cluster"
    return PlannerOptions(
        rows="makespan" if cluster else "paper",
        stop="net_benefit" if cluster else "cv",
        rows_from="slime" if cluster else "dp_local_ffd",
        move=move,
        budget_seconds=budget,
        budget_proposals=arguments.proposals,
        num_threads=arguments.threads,
        seed=arguments.seed,
    )
