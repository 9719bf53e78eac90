"""The commands around training: advise, calibrate, doctor and report."""

from __future__ import annotations

import argparse
from pathlib import Path

from app.cli_planner import positive, seconds

AREAS = ("local", "sglang", "slime", "deepep")


def add_tool_commands(commands: argparse._SubParsersAction) -> None:
    """Add the tools' subcommands to `routepack`."""
    _add_advise(commands)
    _add_calibrate(commands)
    _add_doctor(commands)
    _add_report(commands)


def _add_advise(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "advise", help="from your own rollouts: what would RoutePack save, in one line"
    )
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="a slime rollout dump (file, folder or template), an .npz of windows, or a preset",
    )
    for name, what in (
        ("tp", "tensor-parallel size"),
        ("pp", "pipeline stages"),
        ("cp", "context-parallel size"),
        ("ep", "EP ranks"),
        ("dp", "data-parallel ranks without CP (DP slots)"),
    ):
        command.add_argument(f"--{name}", type=positive, metavar="N", help=what)
    command.add_argument(
        "--capacity", type=positive, metavar="C", help="tokens of a cell: max_tokens_per_gpu x CP"
    )
    command.add_argument("--ranks-per-node", type=positive, metavar="N", help="EP ranks of a node")
    command.add_argument(
        "--cost",
        metavar="FILE|PRESET",
        help="YAML of `routepack calibrate`, or a preset whose model this is (slime:qwen3-30b)",
    )
    command.add_argument(
        "--window-seconds",
        type=seconds,
        metavar="S",
        help="training time of one window as you measure it now; otherwise assumed from FLOPs",
    )
    command.add_argument(
        "--state-seconds",
        type=_seconds_or_zero,
        default=0.0,
        metavar="S",
        help="state loading before training that can hide the search (default 0: nothing hides)",
    )
    command.add_argument("--windows", type=positive, default=4, metavar="N", help="default 4")
    command.add_argument("--trajectories", type=positive, metavar="N", help="first N of a window")
    command.add_argument(
        "--missing", choices=("error", "estimate"), default="error", help="samples without routing"
    )
    command.add_argument(
        "--steps", type=positive, default=1, metavar="N", help="optimizer steps of a slime rollout"
    )
    command.add_argument("--num-experts", type=positive, metavar="E", help="of a slime dump")
    command.add_argument(
        "--moe-layers", type=_layers, metavar="A-B", help="MoE layers of a slime dump, as 3-91"
    )
    command.add_argument(
        "--budget", type=seconds, metavar="S", help="search seconds (default 1%% of the window)"
    )
    command.add_argument("--threads", type=positive, default=2, metavar="N", help="default 2")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--output", metavar="HTML", default="advise.html", help="the page")
    command.add_argument("--json", metavar="FILE", help="write the figures here")

    def run(arguments: argparse.Namespace) -> None:
        from app.advise.job import JobSize
        from app.commands.advise import advise

        size = JobSize(
            tp=arguments.tp,
            pp=arguments.pp,
            cp=arguments.cp,
            ep=arguments.ep,
            dp=arguments.dp,
            capacity=arguments.capacity,
            ranks_per_node=arguments.ranks_per_node,
        )
        advise(
            arguments.source,
            size,
            cost=arguments.cost,
            window_seconds=arguments.window_seconds,
            state_seconds=arguments.state_seconds,
            num_windows=arguments.windows,
            num_trajectories=arguments.trajectories,
            missing=arguments.missing,
            num_steps=arguments.steps,
            num_experts=arguments.num_experts,
            moe_layers=arguments.moe_layers,
            budget=arguments.budget,
            num_threads=arguments.threads,
            seed=arguments.seed,
            output=Path(arguments.output),
            json_file=arguments.json,
        )

    command.set_defaults(run=run)


def _add_calibrate(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "calibrate", help="measure the model's own modules and fit the planner's cost model"
    )
    command.add_argument("--config", required=True, metavar="FILE", help="YAML of the run")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--quick", action="store_true", help="fewer rows and repeats")
    command.add_argument(
        "--compare",
        type=positive,
        metavar="N",
        help="then train N windows under both cost models, paired, and report the TPS ratio",
    )
    command.add_argument("--seed", type=int, help="replaces the configuration's seed")
    command.add_argument(
        "--output", metavar="YAML", default="cost.yaml", help="the cost block (default cost.yaml)"
    )
    command.add_argument("--json", metavar="FILE", help="write the figures here")

    def run(arguments: argparse.Namespace) -> None:
        from dataclasses import replace

        from app.commands.calibrate import calibrate
        from app.config import load_config

        config = load_config(arguments.config)
        if arguments.seed is not None:
            config = replace(config, seed=arguments.seed)
        calibrate(
            config,
            device=arguments.device,
            quick=arguments.quick,
            num_windows=arguments.compare,
            output=Path(arguments.output),
            json_file=arguments.json,
        )

    command.set_defaults(run=run)


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "doctor", help="what this machine and environment can run, and what is missing"
    )
    command.add_argument(
        "--need",
        nargs="+",
        choices=AREAS,
        default=["local"],
        metavar="AREA",
        help=f"exit with 1 unless these are ready: {', '.join(AREAS)} (default local)",
    )
    command.add_argument("--json", metavar="FILE", help="write the figures here")

    def run(arguments: argparse.Namespace) -> int:
        from app.commands.doctor import doctor

        return 0 if doctor(tuple(arguments.need), arguments.json) else 1

    command.set_defaults(run=run)


def _add_report(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "report", help="one HTML page from the JSON of compare, train, replay or advise"
    )
    command.add_argument("results", metavar="JSON", help="what --json FILE wrote")
    command.add_argument(
        "--output", metavar="HTML", help="default: the JSON's name with .html instead"
    )

    def run(arguments: argparse.Namespace) -> None:
        from app.report.write import report

        report(arguments.results, arguments.output)

    command.set_defaults(run=run)


def _seconds_or_zero(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else seconds(text)


def _layers(text: str) -> tuple[int, ...]:
    """`3-91` or `1,2,5` as layer numbers, for argparse."""
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash)):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected layers as 3-91 or 1,2,5")
        layers += range(int(first), int(last if dash else first) + 1)
    if not layers or sorted(set(layers)) != layers:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected ascending layers without repeats")
    return tuple(layers)
