"""Wrong sources, sizes, costs and plans: exit code 2 and one line that says what to change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from replay_cases import JOB, QUICK, rewrite


def test_missing_source(run):
    code, _, err = run("replay", "nowhere.npz", *JOB)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "nowhere.npz" in err


def test_unknown_preset(run):
    code, _, err = run("replay", "synthetic:huge")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "synthetic:tiny" in err


def test_damaged_source(run, source, costs):
    data = Path(source).read_bytes()
    Path(source).write_bytes(data[: len(data) // 2])
    code, _, err = run("replay", source, *JOB, "--cost", costs)
    assert (code, len(err.splitlines())) == (2, 1)
    assert source in err


def test_source_with_missing_arrays(run, source, costs):
    rewrite(source, demand=None)
    code, _, err = run("replay", source, *JOB, "--cost", costs)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "demand" in err


def test_foreign_source(run, tmp_path):
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    code, _, err = run("replay", tmp_path / "other.npz", *JOB)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "weights" in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--dp", "4", "--ep", "4"], ["--capacity"]),
        (["--dp", "4", "--capacity", "1600"], ["--ep"]),
        (["--dp", "4", "--ep", "5", "--capacity", "1600"], ["5", "16"]),
        (["--dp", "4", "--ep", "4", "--edp", "3", "--capacity", "1600"], ["edp 3"]),
        ([*JOB, "--trajectories", "49"], ["49"]),
        ([*JOB, "--windows", "0"], ["'0'"]),
        ([*JOB, "--budget", "-1"], ["'-1'"]),
        ([*JOB, "--budget", "nan"], ["'nan'"]),
        ([*JOB, "--budget", "1", "--proposals", "5"], ["not allowed with"]),
        ([*JOB, "--studies", "figure9"], ["figure9"]),
    ],
)
def test_wrong_sizes(run, source, costs, arguments, words):
    code, _, err = run("replay", source, *arguments, "--cost", costs)
    assert code == 2
    for word in words:
        assert word in err
    assert "Traceback" not in err


def test_a_window_too_small_for_its_job_names_the_sizes(run, source, costs):
    arguments = ["--dp", "64", "--ep", "4", "--capacity", "1600"]
    code, _, err = run("replay", source, *arguments, "--cost", costs)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "dp=64" in err


def test_a_source_of_unknown_shape_asks_for_costs(run, source):
    code, _, err = run("replay", source, *JOB)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "--cost" in err


@pytest.mark.parametrize(
    "text, word",
    [
        ("", "stages"),
        ("stages: 3", "stages"),
        ("stages: [{name: a}]", "alpha"),
        ("stages: [{name: a, alpha: fast}]", "alpha"),
        ("stages: [{name: a, alpha: -1}]", "alpha"),
        ("stages: [{name: a, alpha: .nan}]", "alpha"),
        ("stages: []\nspeed: 3", "speed"),
        ("stages: []\nmove: {bytes: 3}", "bytes"),
        ("stages: [", "YAML"),
    ],
)
def test_wrong_costs(run, source, tmp_path, text, word):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    code, _, err = run("replay", source, *JOB, "--cost", path)
    assert (code, len(err.splitlines())) == (2, 1)
    assert word in err


def test_missing_costs_file(run, source, tmp_path):
    code, _, err = run("replay", source, *JOB, "--cost", tmp_path / "none.yaml")
    assert code == 2
    assert "none.yaml" in err


def test_a_window_beyond_the_source(run, source, costs, tmp_path):
    arguments = [*JOB, *QUICK, "--cost", costs, "--window", "3", "--output", tmp_path / "p.npz"]
    code, _, err = run("plan", source, *arguments)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "windows 0 to 2" in err
    assert not (tmp_path / "p.npz").exists()


@pytest.mark.parametrize("content", [b"", b"not a plan", None])
def test_show_refuses_what_is_not_a_plan(run, tmp_path, content):
    path = tmp_path / "p.npz"
    if content is not None:
        path.write_bytes(content)
    code, _, err = run("show", path)
    assert (code, len(err.splitlines())) == (2, 1)
    assert str(path) in err


def test_show_refuses_a_source(run, source):
    code, _, err = run("show", source)
    assert (code, len(err.splitlines())) == (2, 1)


def test_bench_names_what_exists(run):
    code, _, err = run("bench", "speed")
    assert code == 2
    assert "scale" in err
