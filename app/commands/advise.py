"""`routepack advise`: imbalance found, savings predicted, neighbours tried, one line of advice."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.advise.costs import BYTES_PER_SECOND, FLOPS_PER_SECOND, job_costs
from app.advise.job import JobSize
from app.advise.judge import Advice, advice_figures, judge
from app.advise.study import PolicyResult, identity
from app.advise.verdict import Worth
from app.commands.arguments import add_json, layers, positive, seconds, seconds_or_zero
from app.report.write import write_page
from app.results.figures import write_figures
from app.results.plan_details import rank_load_detail, rows_detail
from app.results.progress import print_table
from planner.policies import DECIDING, FULL_OVER_OFF
from planner.recorded import preset, read
from planner.recorded.presets import PRESET_NAMES
from planner.topology import Topology
from planner.window import Window


def add_arguments(command: argparse.ArgumentParser) -> None:
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
        type=seconds_or_zero,
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
        "--moe-layers", type=layers, metavar="A-B", help="MoE layers of a slime dump, as 3-91"
    )
    command.add_argument(
        "--budget", type=seconds, metavar="S", help="search seconds (default 1%% of the window)"
    )
    command.add_argument("--threads", type=positive, default=2, metavar="N", help="default 2")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--output", metavar="HTML", default="advise.html", help="the page")
    add_json(command)


def run(arguments: argparse.Namespace) -> int | None:
    from app.advise.job import JobSize

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


def advise(
    source: str,
    size: JobSize,
    *,
    cost: str | None,
    window_seconds: float | None,
    state_seconds: float,
    num_windows: int,
    num_trajectories: int | None,
    missing: str,
    num_steps: int,
    num_experts: int | None,
    moe_layers: tuple[int, ...] | None,
    budget: float | None,
    num_threads: int,
    seed: int,
    output: Path,
    json_file: str | None,
) -> dict[str, float]:
    """Read, plan, judge; print tables and the line, write the page and the JSON.

    Raises ValueError naming the flag or file that is wrong.
    """
    if output.suffix not in (".html", ".htm"):
        raise ValueError(f"--output: got {output}, expected a name that ends in .html")
    is_preset = source.startswith(("synthetic:", "slime:"))
    size = size.completed(source, preset(source).topology if is_preset else None)
    if cost in PRESET_NAMES:  # what a dump does not say, the model named by --cost does
        num_experts = num_experts or preset(cost).corpus.num_experts
        moe_layers = moe_layers or preset(cost).layer_numbers
    try:
        windows = read(
            source,
            num_windows=num_windows,
            num_trajectories=num_trajectories,
            num_experts=num_experts,
            moe_layers=moe_layers,
            missing=missing,
            num_steps=num_steps,
            pp=size.pp,
            ranks_per_slot=size.ranks_of_slot,
        )
    except ValueError as error:
        if num_experts is None and "num_experts" in str(error):
            help_text = "give --num-experts, or --cost with the preset of your model"
            raise ValueError(f"{error}: {help_text}") from error
        raise
    topology = size.topology(windows[0].num_experts)
    costs = job_costs(source, cost, windows[0], size)
    num_trajectories = windows[0].num_trajectories
    print(f"{source}: {len(windows)} windows of {num_trajectories} trajectories; {size.words}")
    found, said = judge(
        windows, topology, costs, window_seconds, state_seconds, budget, num_threads, seed
    )
    for text in said:
        print(f"note: {text}")
    figures, skipped = advice_figures(found)
    details = _details(found, source, windows, topology, size, window_seconds, state_seconds)
    content = {"command": "advise", "figures": figures, "skipped": skipped, "details": details}
    write_page(content, output, source)
    write_figures(json_file, "advise", figures, skipped, details)
    _print(details, found, output)
    return figures


def _details(
    advice: Advice,
    source: str,
    windows: Sequence[Window],
    topology: Topology,
    size: JobSize,
    window_seconds: float | None,
    state_seconds: float,
) -> dict[str, Any]:
    policies = {}
    for policy, result in advice.results.items():
        found = advice.worths[policy]
        policies[policy] = {"saved": found.saved, "table": _row(policy, result, found, advice)}
        if found.net is not None:
            policies[policy]["net_seconds"] = found.net
    full = advice.results["full"].plans[-1]
    last = windows[-1]
    return {
        "source": source,
        "job": f"{source}, {len(windows)} windows; {size.words}.",
        "answer": advice.line,
        "policies": policies,
        "neighbours": list(advice.neighbours),
        "assumptions": _assumptions(advice, window_seconds, state_seconds),
        "rank_load": rank_load_detail(last, identity(last, topology), full.placement),
        "rows": {
            policy: rows_detail(advice.results[policy].plans[-1], last, topology, advice.costs.cost)
            for policy in reversed(FULL_OVER_OFF)
        },
    }


def _row(policy: str, result: PolicyResult, found: Worth, advice: Advice) -> dict[str, str]:
    moved = advice.costs.bytes_per_expert()
    experts = result.mean("moved_experts")
    unknown = "-" if policy == "off" else "?"
    return {
        "rows": f"{result.mean('rows'):.1f}",
        "global excess": f"{result.mean('global_excess'):.1%}",
        "row-local excess": f"{result.mean('row_local_excess'):.1%}",
        "saved": "-" if policy == "off" else f"{found.saved:.1%}",
        "experts moved": f"{experts:.0f}",
        "MB moved": "?" if moved is None and experts else f"{experts * (moved or 0) / 2**20:,.0f}",
        "exposed s": unknown if found.exposed is None else f"{found.exposed:.2f}",
        "net s": unknown if found.net is None else f"{found.net:+.2f}",
    }


def _assumptions(
    advice: Advice, window_seconds: float | None, state_seconds: float
) -> list[list[str]]:
    costs, unit = advice.costs, advice.seconds_per_cost
    kind = "--cost file" if costs.from_file is not None else "FLOPs of the model's shape"
    rows = [["dense-side costs", costs.model, kind]]
    if unit is None:
        rows.append(["speed", "unknown", "give --window-seconds"])
    elif window_seconds is not None:
        rows.append(["speed", f"{window_seconds:g} s per window under off", "--window-seconds"])
    elif costs.from_file is not None:
        rows.append(["speed", f"{1e3 * unit:.3g} ms per unit of cost", "--cost file"])
    else:
        rows.append(["speed", f"{FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s per GPU", "assumed"])
    moved = costs.bytes_per_expert()
    if moved is not None:
        rows.append(["bytes of an expert", f"{moved / 2**20:.1f} MB", "bf16 + fp32 Adam state"])
        given = costs.from_file is not None and costs.from_file.seconds_per_byte
        rate = "--cost file" if given else f"{BYTES_PER_SECOND / 1e9:.0f} GB/s per EP rank"
        rows.append(["moves", rate, "given" if given else "assumed"])
    rows.append(["state loading that hides the search", f"{state_seconds:g} s", "--state-seconds"])
    return rows


def _print(details: Mapping[str, Any], advice: Advice, output: Path) -> None:
    tables = {policy: row["table"] for policy, row in details["policies"].items()}
    header = ("policy", *next(iter(tables.values())))
    rows = [[policy, *row.values()] for policy, row in tables.items()]
    print_table("Modelled, against slime's own schedule (window means)", header, rows)
    if advice.neighbours:
        rows = [
            [n["choice"], f"{n['off']:.3f}", f"{n['full']:.3f}", n["note"]]
            for n in advice.neighbours
        ]
        title = "Neighbours, time over yours"
        print_table(title, ("choice", "off", "full", "note"), rows)
    best = max(DECIDING, key=lambda name: advice.worths[name].decisive)
    print(advice.line)
    if advice.line.startswith("No"):
        print(f"page: {output}")
    else:
        print(f"page: {output}; next: run with policy observe, compare its log, then {best}")
