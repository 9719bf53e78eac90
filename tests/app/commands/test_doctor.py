"""Doctor: versions are compared rightly, every failed line has a remedy, and it is quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT

from app.cli import main
from app.commands.doctor import AREAS
from app.doctor import slime
from app.doctor.check import satisfies
from app.doctor.local import local_requirements
from app.doctor.sglang import check_sglang


@pytest.mark.parametrize(
    "found, wanted, expected",
    [
        ("2.13.0+cpu", "== 2.13.0", True),
        ("2.13.1", "== 2.13.0", False),
        ("1.26.4", ">= 1.26", True),
        ("0.5.9.post1", ">= 0.5.15", False),
        ("0.5.15.post1", ">= 0.5.15", True),
        ("10.0", ">= 9.1", True),
        ("0.1", "any", True),
    ],
)
def test_versions_are_compared_by_number(found, wanted, expected):
    assert satisfies(found, wanted) is expected


def test_wanted_versions_are_those_of_pyproject():
    wanted = dict(local_requirements())
    assert wanted["megatron-core"].startswith("==")
    assert wanted["numpy"].startswith(">=")
    assert "ruff" not in wanted


@pytest.mark.parametrize("area", AREAS)
def test_every_failed_line_has_a_remedy(area):
    checks = AREAS[area][1]()
    assert checks
    for check in checks:
        assert check.found and check.wanted
        assert check.passed or check.remedy


def test_a_package_that_is_not_slime_is_told_from_slime(tmp_path, monkeypatch):
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    line = next(check for check in slime.check_slime() if check.name == "slime")
    assert not line.passed and line.found.startswith("another")
    assert "PyPI" in line.remedy


def test_a_patched_megatron_is_recognised(tmp_path):
    folder = tmp_path / "core"
    (folder / "distributed").mkdir(parents=True)
    buffers = folder / "distributed" / "param_and_grad_buffer.py"
    buffers.write_text("class _ParamAndGradBuffer: pass\n")
    assert not slime._has_mark(folder)
    buffers.write_text("def f(disable_param_buffers_cpu_backup: bool = False): pass\n")
    assert slime._has_mark(folder)


def test_a_missing_environment_is_not_ready(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_VENV", str(tmp_path / "none"))
    first = check_sglang()[0]
    assert not first.passed and first.found == "missing"
    assert "launch/sglang_venv.sh" in first.remedy


def test_nothing_heavy_is_imported(in_tmp):
    """What keeps it quick, on any machine."""
    code = (
        "import sys; from app.cli import main; main(['doctor']); "
        "print({'torch', 'megatron', 'ray', 'sglang', 'transformers', 'numba'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "set()", done.stdout + done.stderr


def test_the_exit_code_is_for_scripts(in_tmp, monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_VENV", str(in_tmp / "none"))
    assert main(["doctor", "--need", "sglang", "--json", "d.json"]) == 1
    assert "not ready: sglang" in capsys.readouterr().out
    content = json.loads((in_tmp / "d.json").read_text())
    assert content["figures"]["doctor.sglang.ready"] == 0
    assert content["figures"]["doctor.sglang.failed"] >= 1
