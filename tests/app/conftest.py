"""Recorded windows small enough for tests, as files that the commands read."""

from __future__ import annotations

import pytest
from replay_cases import CORPUS

from app.cli import main
from planner.recorded import write_windows
from planner.recorded.synthetic import synthetic_windows
from planner.window import Window


@pytest.fixture(scope="session")
def windows() -> list[Window]:
    """Three consecutive windows of 48 trajectories, 3 MoE layers, 16 experts, top-2."""
    return list(synthetic_windows(CORPUS, 3, seed=5))


@pytest.fixture
def source(tmp_path, windows) -> str:
    """The windows as a recorded file."""
    path = tmp_path / "windows.npz"
    write_windows(path, windows)
    return str(path)


@pytest.fixture
def costs(tmp_path) -> str:
    """Costs of a model with one quadratic stage."""
    path = tmp_path / "costs.yaml"
    path.write_text(
        "stages:\n  - {name: linear, alpha: 3.0}\n  - {name: pairs, alpha: 1.0, beta: 0.5}\n"
    )
    return str(path)


@pytest.fixture
def run(capsys):
    """Run one command: (exit code, standard output, error stream without progress bars)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        said = [line for line in err.splitlines() if "\u2501" not in line and line.strip()]
        return code, out, "\n".join(said)

    return call
