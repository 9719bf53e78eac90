"""`routepack replay SOURCE`: the paper's offline studies on any recorded windows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.commands.arguments import add_report, positive, seconds
from app.commands.source import add_source, options_of, recording_of
from app.report.write import checked_page, write_results
from app.results.plan_details import rank_load_detail, rows_detail
from app.results.progress import print_table
from app.studies.communication import study_communication
from app.studies.ilp import study_ilp
from app.studies.labels import read_labels
from app.studies.placement import study_placement
from app.studies.policies import study_policies
from app.studies.recording import Recording
from app.studies.rescheduling import SCHEDULES, study_rescheduling
from app.studies.result import StudyResult
from app.studies.skew import study_skew
from planner.placement import rank_load
from planner.plan import Plan
from planner.policies import POLICIES
from planner.policy import PlannerOptions

STUDIES = ("policies", "placement", "rescheduling", "ilp", "communication", "skew")

PLACEMENT_ONLY = ("placement", "skew")
"""Studies that need no trajectories."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_source(command)
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
    add_report(command)


def run(arguments: argparse.Namespace) -> int | None:
    recording = recording_of(arguments, arguments.windows)
    replay(
        recording,
        options_of(arguments, recording.move),
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


@dataclass(slots=True)
class Report:
    """What the studies of one replay found, printed as it comes."""

    output: Path | None
    figures: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, result: StudyResult) -> None:
        print(result.title)  # not as the table's title, which wraps at the table's width
        print_table("", result.header, result.rows)
        for name, reason in result.skipped.items():
            print(f"skipped {name}: {reason}")
        self.figures |= result.figures
        self.skipped |= result.skipped

    def skip(self, study: str, reason: str) -> None:
        print(f"skipped {study}: {reason}")
        self.skipped[f"replay.{study}"] = reason

    def picture(self, name: str) -> Path | None:
        """Where to draw a picture; None without an output folder."""
        if self.output is None:
            return None
        self.pictures.append(str(self.output / name))
        return self.output / name


def replay(
    recording: Recording,
    options: PlannerOptions,
    *,
    policies: Sequence[str],
    studies: Sequence[str] = STUDIES,
    tokens: str | None = None,
    labels: str | None = None,
    ilp_seconds: float = 10.0,
    ilp_sizes: Sequence[int] = (32, 64, 128, 256),
    output: str | None = None,
    json_file: str | None = None,
    page: str | None = None,
) -> dict[str, float]:
    """Run the studies, print their tables, draw their pictures, write and return the figures.

    page: an HTML page to write as well.

    A study that the source does not allow is skipped with its reason. Raises ValueError naming what
    is wrong with the source or the sizes.
    """
    if page is not None:
        checked_page(page, "--report")
    print(recording.title)
    report = Report(output=Path(output) if output else None)
    if recording.is_aggregate:
        for study in [study for study in studies if study not in PLACEMENT_ONLY]:
            report.skip(study, "the source holds aggregate counts without trajectories")
        studies = [study for study in studies if study in PLACEMENT_ONLY]
    if "policies" in studies:
        _policies(recording, options, policies, report)
    if "placement" in studies:
        if len(recording.windows) > 1:
            report.add(study_placement(recording, options))
        else:
            report.skip("placement", "one window has no transition; record two or more")
    if "rescheduling" in studies:
        _rescheduling(recording, options, report)
    if "ilp" in studies:
        _ilp(recording, options, ilp_seconds, ilp_sizes, report)
    if "communication" in studies:
        report.add(study_communication(recording, options, tokens))
    if "skew" in studies:
        _skew(recording, labels, report)
    for picture in report.pictures:
        print(f"picture: {picture}")
    details = {
        "source": recording.name,
        "num_windows": len(recording.windows),
        "mode": options.rows,
        "pictures": report.pictures,
        **report.details,
    }
    write_results("replay", report.figures, report.skipped, details, json_file, page)
    return report.figures


def _policies(
    recording: Recording, options: PlannerOptions, policies: Sequence[str], report: Report
) -> None:
    study = study_policies(recording, options, policies)
    report.add(study.result)
    if path := report.picture("figure-8-policies.png"):
        from app.studies.pictures import draw_splits

        draw_splits(study.splits, path)
    if path := report.picture("rank-load.png"):
        from app.results.plots import plot_rank_load

        window = recording.windows[-1]
        before, after = recording.identity(), study.last_plan[policies[-1]].placement
        loads = [rank_load(window.expert_load, placement) for placement in (before, after)]
        plot_rank_load(loads[0], loads[1], window.layer_numbers, path)
    report.details |= _plan_details(recording, study.last_plan, policies)


def _plan_details(
    recording: Recording, plans: dict[str, Plan], policies: Sequence[str]
) -> dict[str, Any]:
    """What the page draws of the last window: off beside full, or beside the last policy."""
    window = recording.windows[-1]
    shown = "full" if "full" in plans else policies[-1]
    return {
        "rank_load": rank_load_detail(window, recording.identity(), plans[shown].placement),
        "rows": {
            policy: rows_detail(plans[policy], window, recording.topology, recording.cost)
            for policy in dict.fromkeys(("off", shown))
            if policy in plans
        },
    }


def _rescheduling(recording: Recording, options: PlannerOptions, report: Report) -> None:
    study = study_rescheduling(recording, options)
    report.add(study.result)
    if study.joint and (path := report.picture("figure-14-schedules.png")):
        from app.studies.pictures import draw_schedules

        draw_schedules(study.joint, SCHEDULES, path)


def _ilp(
    recording: Recording,
    options: PlannerOptions,
    seconds: float,
    sizes: Sequence[int],
    report: Report,
) -> None:
    try:
        report.add(study_ilp(recording, options, seconds=seconds, sizes=sizes))
    except ImportError:
        report.skip("ilp", "OR-Tools is not installed: pip install ortools")
    except ValueError as error:
        report.skip("ilp", str(error))


def _skew(recording: Recording, labels: str | None, report: Report) -> None:
    tasks = None if labels is None else read_labels(labels, recording.windows[0])
    skew, result = study_skew(recording, tasks)
    report.add(result)
    if path := report.picture("figure-5-skew.png"):
        from app.studies.pictures import draw_skew

        draw_skew(skew, path)
