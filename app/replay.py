"""`routepack replay SOURCE`: recorded windows planned under every policy, side by side."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np

from app.figures import write_figures
from app.progress import print_table, track
from planner.cost import CostModel
from planner.placement import Placement, rank_load
from planner.policy import PlannerOptions, make_plan
from planner.recorded.flops import ModelShape, cost_from_shape, gqa_params
from planner.recorded.presets import preset
from planner.recorded.read import read
from planner.topology import Topology
from planner.window import Window

# From the model's public configuration; every second layer attends to 128 tokens, taken as full.
GPT_OSS_20B = ModelShape(
    num_layers=24,
    num_dense_layers=0,
    num_experts=32,
    top_k=4,
    hidden=2880,
    dense_ffn=0,
    expert_ffn=2880,
    vocab=201088,
    num_heads=64,
    head_dim=64,
    value_dim=64,
    attention_params=gqa_params(2880, 64, 8, 64),
)
FIGURES = ("rows", "global_excess", "row_local_excess", "moved_experts", "joint_saved")


def replay(arguments: argparse.Namespace) -> dict[str, float]:
    """Plan every window from identity under each policy; print a table; return the figures.

    `joint_saved` is per cent of the base policy's modelled joint cost; placements carry on from
    window to window. Raises ValueError naming what is wrong with the source or the sizes.
    """
    windows = read(arguments.source)
    topology = Topology.uniform(
        dp=arguments.dp, ep=arguments.ep, edp=arguments.edp, capacity=arguments.capacity
    )
    cost = _cost_of(arguments.source, windows[0], topology)
    options = PlannerOptions(rows="paper", stop="cv", budget_seconds=arguments.budget)
    figures: dict[str, float] = {}
    placements: dict[str, Placement] = {}
    rows = []
    for policy in track(list(arguments.policies), "replay"):
        reports, placements[policy] = _plan_all(windows, topology, cost, policy, options)
        values = {name: float(np.mean([r[name] for r in reports])) for name in FIGURES}
        figures |= {f"replay.{policy}.{name}": value for name, value in values.items()}
        rows.append(
            [
                policy,
                f"{values['rows']:.1f}",
                f"{100 * values['global_excess']:.2f}",
                f"{100 * values['row_local_excess']:.2f}",
                f"{values['moved_experts']:.0f}",
                f"{values['joint_saved']:.2f}",
            ]
        )
    first = windows[0]
    title = (
        f"{arguments.source}: {len(windows)} windows, {first.num_trajectories} trajectories x "
        f"{first.num_layers} MoE layers x {first.num_experts} experts; DP {arguments.dp}, EP "
        f"{arguments.ep}, C {arguments.capacity}"
    )
    header = ("policy", "rows", "global excess %", "row-local %", "experts moved", "joint saved %")
    print_table(title, header, rows)
    if arguments.output:
        picture = _draw(Path(arguments.output), windows[-1], placements[arguments.policies[-1]])
        print(f"picture: {picture}")
    details = {"source": str(arguments.source), "num_windows": len(windows)}
    write_figures(arguments.json, "replay", figures, details=details)
    return figures


def _plan_all(
    windows: list[Window],
    topology: Topology,
    cost: CostModel,
    policy: str,
    options: PlannerOptions,
) -> tuple[list[dict[str, float]], Placement]:
    first = windows[0]
    carried = Placement.identity(first.num_layers, first.num_experts, topology.num_ep_ranks)
    reports = []
    for window in windows:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = make_plan(window, topology, cost, carried, policy, options)
        if caught and policy == "base":
            print(f"window {window.window_id}: {caught[0].message}")
        saved = 1 - plan.report["joint_cost"] / plan.report["base_joint_cost"]
        reports.append({**plan.report, "joint_saved": 100 * saved})
        carried = plan.placement
    return reports, carried


def _cost_of(source: str, window: Window, topology: Topology) -> CostModel:
    if str(source).startswith(("synthetic:", "slime:")):
        return preset(source).cost
    known = GPT_OSS_20B
    if (window.num_layers, window.num_experts) == (known.num_moe_layers, known.num_experts):
        return cost_from_shape(known, topology.capacity, tp=1, cp=1)
    raise ValueError(
        f"{source}: no cost coefficients for {window.num_layers} MoE layers x "
        f"{window.num_experts} experts; known are the shape of GPT-OSS-20B and the presets"
    )


def _draw(folder: Path, window: Window, placement: Placement) -> Path:
    from app.plots import plot_rank_load

    folder.mkdir(parents=True, exist_ok=True)
    identity = Placement.identity(window.num_layers, window.num_experts, placement.num_ep_ranks)
    path = folder / "rank-load.png"
    plot_rank_load(
        rank_load(window.expert_load, identity),
        rank_load(window.expert_load, placement),
        window.layer_numbers,
        path,
    )
    return path
