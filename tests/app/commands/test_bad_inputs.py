"""Bad inputs over all commands: exit code 2 (or argparse's), one clear message, no traceback."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from app.cli import main

SIZES = ["--ep", "2", "--dp", "2", "--capacity", "64"]
CONFIG = "planner: {capacity: 512}\n"


def make_files(folder: Path) -> None:
    """Everything that the table names: damaged, foreign and half right."""
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "typo.yaml").write_text("modell: {num_layers: 4}\n")
    (folder / "tabs.yaml").write_text("model:\n\t- a: [1\n")
    (folder / "list.yaml").write_text("- 1\n- 2\n")
    (folder / "empty.yaml").write_text("")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01binary")
    (folder / "worlds.yaml").write_text("ranks: {world: 3, ep: 2}\n")
    (folder / "steps.yaml").write_text("train: {num_steps_per_rollout: 9}\n")
    (folder / "kl.yaml").write_text("train: {kl_loss_coef: 0.1}\n")
    (folder / "ends.yaml").write_text("online: {num_windows: 12}\n")
    (folder / "nan.yaml").write_text("train: {lr: .nan}\n")
    (folder / "cost.yaml").write_text("stages: [{name: a, alpha: fast}]\n")
    (folder / "cost-extra.yaml").write_text("stages: []\nspeed: 3\n")
    (folder / "empty.npz").write_bytes(b"")
    (folder / "text.npz").write_text("not an archive")
    np.savez(folder / "foreign.npz", weights=np.ones(3))
    np.savez(
        folder / "wrong-sum.npz",
        counts=np.ones((4, 2, 8), np.uint16),
        routed_tokens=np.full(4, 3, np.int32),
        prompt_tokens=np.zeros(4, np.int32),
    )
    counts = np.zeros((6, 2, 8), np.uint16)
    counts[..., :2] = 20
    np.savez(
        folder / "good.npz",
        counts=counts,
        routed_tokens=np.full(6, 20, np.int32),
        prompt_tokens=np.zeros(6, np.int32),
    )
    whole = (folder / "good.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "text.pt").write_text("not a torch file")
    (folder / "plain.pt").write_bytes(pickle.dumps({"samples": []}))
    with zipfile.ZipFile(folder / "cut.pt", "w") as archive:
        archive.writestr("archive/version", "3")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n")
    (folder / "nothing").mkdir()
    (folder / "text.json").write_text("{broken")
    (folder / "list.json").write_text("[1, 2]")
    (folder / "foreign.json").write_text(json.dumps({"a": 1}))
    parts = {"figures": {}, "skipped": {}, "details": {}}
    (folder / "bench.json").write_text(json.dumps({"command": "bench", **parts}))
    (folder / "old.json").write_text(json.dumps({"command": "compare", **parts}))


TABLE = [
    # the command line itself
    ([], "COMMAND"),
    (["adviser"], "invalid choice: 'adviser'"),
    (["train", "--config", "run.yaml", "--policy", "best"], "invalid choice: 'best'"),
    (["train", "--config", "run.yaml", "--policy", "full", "--windows", "-1"], "at least 1"),
    (["compare", "--config", "run.yaml", "--seed", "x"], "--seed"),
    (["doctor", "--need", "gpu"], "invalid choice: 'gpu'"),
    (["bench", "speed"], "'speed'"),
    # configurations
    (["train", "--config", "no.yaml", "--policy", "full"], "no configuration file no.yaml"),
    (["train", "--config", "typo.yaml", "--policy", "full"], "modell: no such field"),
    (["compare", "--config", "tabs.yaml"], "not readable YAML"),
    (["compare", "--config", "list.yaml"], "expected a mapping"),
    (["verify", "--config", "empty.yaml"], "expected a mapping"),
    (["verify", "--config", "binary.yaml"], "binary.yaml"),
    (["warmup", "--config", "worlds.yaml"], "ep 2 does not divide world 3"),
    (["calibrate", "--config", "nan.yaml"], "train.lr"),
    (["train", "--config", "steps.yaml", "--policy", "full"], "num_steps_per_rollout 9"),
    (["train", "--config", "kl.yaml", "--policy", "full"], "set use_kl_loss: true"),
    (["train", "--online", "--config", "ends.yaml"], "num_edge_windows 10"),
    (["train", "--online", "--config", "run.yaml", "--policy", "full"], "not allowed with"),
    (["train", "--online", "--config", "run.yaml", "--resume", "x"], "starts every run anew"),
    (["train", "--online", "--config", "run.yaml", "--windows", "1"], "compares two ends"),
    (["train", "--config", "run.yaml", "--policy", "off", "--report", "r.pdf"], "ends in .html"),
    (["compare", "--config", "run.yaml", "--report", "r.pdf"], "ends in .html"),
    (["calibrate", "--config", "run.yaml", "--output", "cost.txt"], "ends in .yaml"),
    (["calibrate", "--config", "run.yaml", "--device", "tpu"], "invalid choice: 'tpu'"),
    (["calibrate", "--config", "nothing"], "nothing"),
    # recorded windows
    (["replay", "no.npz", *SIZES], "no.npz"),
    (["replay", "synthetic:tiny", "--windows", "1", "--report", "r.pdf"], "ends in .html"),
    (["replay", "good.npz", "--ep", "2"], "missing"),
    (["replay", "empty.npz", *SIZES], "empty.npz"),
    (["replay", "text.npz", *SIZES], "text.npz"),
    (["replay", "foreign.npz", *SIZES], "foreign.npz"),
    (["replay", "cut.npz", *SIZES], "cut.npz"),
    (["replay", "wrong-sum.npz", *SIZES], "wrong-sum.npz"),
    (["replay", "picture.png", *SIZES], "picture.png"),
    (["replay", "nothing", *SIZES], "nothing"),
    (["replay", "synthetic:huge"], "synthetic:huge"),
    (["plan", "text.pt", *SIZES, "--output", "p.npz"], "text.pt"),
    (["plan", "good.npz", *SIZES, "--cost", "cost.yaml", "--output", "p.npz"], "alpha"),
    (["show", "foreign.npz"], "foreign.npz"),
    (["show", "no.npz"], "no such plan file"),
    # advice
    (["advise", "no.pt", *SIZES], "no.pt"),
    (["advise", "good.npz"], "--ep, --dp, --capacity: missing"),
    (["advise", "good.npz", *SIZES], "give --cost"),
    (["advise", "good.npz", *SIZES, "--cost", "no.yaml"], "no.yaml"),
    (["advise", "good.npz", *SIZES, "--cost", "slime:gpt9"], "slime:gpt9"),
    (["advise", "good.npz", *SIZES, "--cost", "cost-extra.yaml"], "unknown entry 'speed'"),
    (["advise", "good.npz", "--ep", "3", "--dp", "3", "--capacity", "64"], "does not divide 8"),
    (["advise", "plain.pt", *SIZES], "plain.pt"),
    (["advise", "cut.pt", *SIZES], "cut.pt"),
    (["advise", "good.npz", *SIZES, "--output", "a.pdf"], "ends in .html"),
    (["advise", "good.npz", *SIZES, "--window-seconds", "0"], "expected seconds above 0"),
    (["advise", "good.npz", *SIZES, "--moe-layers", "9-3"], "--moe-layers"),
    # reports
    (["report", "no.json"], "no such file"),
    (["report", "text.json"], "not JSON"),
    (["report", "list.json"], "expected the JSON of a routepack command"),
    (["report", "foreign.json"], "expected the JSON of a routepack command"),
    (["report", "bench.json"], "routepack bench, which has no page"),
    (["report", "old.json"], "lacks 'measurements'"),
    (["report", "good.npz"], "not JSON"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    make_files(path)
    return path


def test_the_table_is_long_enough():
    assert len(TABLE) >= 30
    assert {row[0][0] for row in TABLE if row[0]} >= {
        *("train", "compare", "verify", "warmup", "replay", "plan", "show", "bench"),
        *("advise", "calibrate", "doctor", "report"),
    }


@pytest.mark.parametrize(
    "arguments, words", TABLE, ids=[f"{k:02d}-{' '.join(a)[:40]}" for k, (a, _) in enumerate(TABLE)]
)
def test_bad_input_is_named_without_a_traceback(folder, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(folder)
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    printed = capsys.readouterr()
    assert code == 2, printed
    assert words in printed.err
    assert "Traceback" not in printed.err + printed.out
    message = [row for row in printed.err.splitlines() if row.startswith("routepack")]
    assert len(message) == 1, printed.err
