"""`routepack plan`: plan one window and write the plan to a file."""

from __future__ import annotations

import argparse
import warnings

from app.commands.arguments import whole
from app.commands.plan_file import drawing_of, load_plan_file, save_plan_file
from app.commands.plan_report import plan_details, plan_figures, print_report
from app.commands.source import add_source, options_of, recording_of
from app.results.figures import write_figures
from app.studies.recording import Recording
from planner.plan import Plan
from planner.policies import POLICIES
from planner.policy import PlannerOptions, make_plan


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_source(command)
    command.add_argument("--window", type=whole, default=0, metavar="K", help="0-based, default 0")
    command.add_argument("--policy", choices=POLICIES, default="full")
    command.add_argument(
        "--carried", metavar="PLAN", help="plan whose placement is carried (default: identity)"
    )
    command.add_argument("--output", required=True, metavar="PLAN.npz")


def run(arguments: argparse.Namespace) -> int | None:
    recording = recording_of(arguments, arguments.window + 1)
    plan(
        recording,
        options_of(arguments, recording.move),
        index=arguments.window,
        policy=arguments.policy,
        carried_file=arguments.carried,
        output=arguments.output,
        json_file=arguments.json,
    )


def plan(
    recording: Recording,
    options: PlannerOptions,
    *,
    index: int,
    policy: str,
    carried_file: str | None,
    output: str,
    json_file: str | None,
) -> Plan:
    """Plan one window, validate it, write it and say so.

    index: the window's place in the source. carried_file: plan whose placement is in force.
    Raises ValueError when the source is too short or the carried placement does not fit.
    """
    if index >= len(recording.windows):
        raise ValueError(
            f"--window: got {index}, {recording.name} holds windows 0 to "
            f"{len(recording.windows) - 1}"
        )
    window = recording.windows[index]
    carried = recording.identity()
    if carried_file is not None:
        carried = load_plan_file(carried_file)[0].placement
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make_plan(window, recording.topology, recording.cost, carried, policy, options)
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"window {window.window_id}: {text}")
    made.validate(window, recording.topology, carried)
    drawing = drawing_of(made, window, recording.topology, recording.cost, carried, recording.name)
    save_plan_file(output, made, drawing)
    print(recording.title)
    print_report(made)
    print(f"plan: {output}")
    write_figures(json_file, "plan", plan_figures(made), details=plan_details(made))
    return made
