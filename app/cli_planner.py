"""The commands that need no trainer: replay, plan, show and bench."""

from __future__ import annotations

import argparse
import math

POLICIES = ("off", "observe", "base", "reschedule", "reroute", "full")
STUDIES = ("policies", "placement", "rescheduling", "ilp", "communication", "skew")
BENCHES = (
    "placement",
    "schedule",
    "slime",
    "rows",
    "scale",
    "start",
    "capture",
    "commit",
    "admission",
    "gpu-replay",
)


def add_planner_commands(commands: argparse._SubParsersAction) -> None:
    """Add the planner's subcommands to `routepack`."""
    _add_replay(commands)
    _add_plan(commands)
    _add_show(commands)
    _add_bench(commands)


def _add_source(command: argparse.ArgumentParser) -> None:
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
    command.add_argument("--json", metavar="FILE", help="write the figures here")


def _recording(arguments: argparse.Namespace, num_windows: int | None):
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


def _options(arguments: argparse.Namespace, move):
    from planner.policy import PlannerOptions

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


def _add_replay(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("replay", help="the paper's offline studies on recorded windows")
    _add_source(command)
    command.add_argument("--windows", type=positive, metavar="N", help="first N windows")
    command.add_argument(
        "--studies",
        nargs="+",
        choices=(*STUDIES, "all"),
        default=["all"],
        help="Tables 6, 5, 21, 7, 11 and Figure 5, in that order (default all)",
    )
    command.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    command.add_argument("--tokens", metavar="FILE", help="token-level routing of the source")
    command.add_argument(
        "--labels", metavar="CSV", help="tasks of the first window's trajectories (index, label)"
    )
    command.add_argument(
        "--ilp-seconds", type=seconds, default=10.0, metavar="S", help="CP-SAT limit (default 10)"
    )
    command.add_argument(
        "--ilp-sizes", type=positive, nargs="+", default=[32, 64, 128, 256], metavar="N"
    )
    command.add_argument("--output", metavar="DIR", help="write pictures here")
    command.add_argument("--report", metavar="HTML", help="write the page here")

    def run(arguments: argparse.Namespace) -> None:
        from app.commands.replay import replay

        recording = _recording(arguments, arguments.windows)
        replay(
            recording,
            _options(arguments, recording.move),
            policies=arguments.policies,
            studies=STUDIES if "all" in arguments.studies else arguments.studies,
            tokens=arguments.tokens,
            labels=arguments.labels,
            ilp_seconds=arguments.ilp_seconds,
            ilp_sizes=arguments.ilp_sizes,
            output=arguments.output,
            json_file=arguments.json,
            page=arguments.report,
        )

    command.set_defaults(run=run)


def _add_plan(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("plan", help="plan one window and write the plan to a file")
    _add_source(command)
    command.add_argument("--window", type=whole, default=0, metavar="K", help="0-based, default 0")
    command.add_argument("--policy", choices=POLICIES, default="full")
    command.add_argument(
        "--carried", metavar="PLAN", help="plan whose placement is carried (default: identity)"
    )
    command.add_argument("--output", required=True, metavar="PLAN.npz")

    def run(arguments: argparse.Namespace) -> None:
        from app.commands.plan import plan

        recording = _recording(arguments, arguments.window + 1)
        plan(
            recording,
            _options(arguments, recording.move),
            index=arguments.window,
            policy=arguments.policy,
            carried_file=arguments.carried,
            output=arguments.output,
            json_file=arguments.json,
        )

    command.set_defaults(run=run)


def _add_show(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("show", help="print a plan file and draw its rows")
    command.add_argument("plan", metavar="PLAN.npz")
    command.add_argument("--rows", type=positive, default=12, metavar="N", help="rows to print")
    command.add_argument("--output", metavar="PNG", help="draw the rows here")
    command.add_argument("--json", metavar="FILE", help="write the figures here")

    def run(arguments: argparse.Namespace) -> None:
        from app.commands.plan import show

        show(arguments.plan, arguments.rows, arguments.output, arguments.json)

    command.set_defaults(run=run)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("bench", help="measure the planner against its bars")
    command.add_argument(
        "what",
        nargs="+",
        choices=(*BENCHES, "all"),
        metavar="BENCH",
        help=", ".join((*BENCHES, "or all")),
    )
    command.add_argument("--quick", action="store_true", help="fewer windows")
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="of gpu-replay (default: cuda where there is one)"
    )
    command.add_argument("--json", metavar="FILE", help="write the figures here")
    command.add_argument("--output", metavar="DIR", help="write pictures here")

    def run(arguments: argparse.Namespace) -> None:
        from app.commands.bench import bench

        names = BENCHES if "all" in arguments.what else tuple(dict.fromkeys(arguments.what))
        bench(names, arguments.quick, arguments.output, arguments.json, arguments.device)

    command.set_defaults(run=run)


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    return _at_least(text, 1)


def whole(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    return _at_least(text, 0)


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
