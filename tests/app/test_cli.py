"""The command line: wrong input ends with one clear message and exit code 2, never a traceback."""

from __future__ import annotations

import json

import pytest

from app.cli import main


def exit_code(arguments) -> int:
    try:
        return main(arguments)
    except SystemExit as error:
        return int(error.code)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], ["COMMAND"]),
        (["fly"], ["invalid choice: 'fly'"]),
        (["train", "--config", "x.yaml"], ["--policy"]),
        (["train", "--config", "x.yaml", "--policy", "best"], ["invalid choice: 'best'"]),
        (["train", "--config", "x.yaml", "--policy", "full"], ["no configuration file x.yaml"]),
        (
            ["train", "--config", "x.yaml", "--policy", "full", "--windows", "0"],
            ["got '0'", "at least 1"],
        ),
        (["compare", "--config", "x.yaml"], ["no configuration file x.yaml"]),
        (["verify", "--config", "x.yaml", "--seed", "one"], ["--seed", "'one'"]),
        (
            ["replay", "nothing.npz", "--ep", "2", "--dp", "2", "--capacity", "64"],
            ["nothing.npz"],
        ),
        (["replay", "nothing.npz", "--ep", "-1", "--dp", "2", "--capacity", "64"], ["got '-1'"]),
    ],
)
def test_wrong_input_is_named(in_tmp, capsys, arguments, words):
    assert exit_code(arguments) == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message
    assert "Traceback" not in message


def test_replay_of_the_shipped_trace_meets_the_placement_bar(in_tmp, traces, capsys):
    source = str(traces / "counts_703x24x32.npz")
    arguments = ["--ep", "4", "--dp", "4", "--capacity", "4096", "--json", "r.json"]
    assert main(["replay", source, *arguments, "--budget", "0.2"]) == 0
    figures = json.loads((in_tmp / "r.json").read_text())["figures"]
    for policy in ("off", "observe", "base", "reschedule", "reroute", "full"):
        for name in ("rows", "global_excess", "row_local_excess", "moved_experts", "joint_saved"):
            assert f"replay.{policy}.{name}" in figures
    assert figures["replay.full.global_excess"] <= 0.0014
    assert figures["replay.full.joint_saved"] > figures["replay.reroute.joint_saved"]
    assert figures["replay.full.joint_saved"] > figures["replay.reschedule.joint_saved"]
    assert figures["replay.base.joint_saved"] == 0
    assert figures["replay.base.moved_experts"] == figures["replay.reschedule.moved_experts"] == 0
