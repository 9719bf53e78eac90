"""Advice: topology from flags, costs at the job's sizes, net seconds, and a line that can be no."""

from __future__ import annotations

import json

import numpy as np
import pytest

from app.advise.costs import JobCosts, job_costs
from app.advise.job import JobSize
from app.advise.verdict import Worth, answer
from app.cli import main
from planner.cost import CostModel, Stage
from planner.recorded import preset, write_windows
from planner.window import Window

ARGUMENTS = ["--ep", "4", "--dp", "4", "--capacity", "4096"]


def size(**changes) -> JobSize:
    defaults = dict(tp=1, pp=1, cp=1, ep=4, dp=4, capacity=1024)
    return JobSize(**{**defaults, **changes})


@pytest.mark.parametrize(
    "changes, num_shards, groups_of_shard",
    [
        ({}, 1, 1),  # one EP group over all four slots
        ({"ep": 2}, 2, 1),  # two slots each
        ({"tp": 4, "ep": 8, "dp": 2}, 1, 1),  # Qwen3-30B
        ({"tp": 2, "ep": 4, "dp": 32}, 16, 1),  # MiniMax-M2
        ({"tp": 8, "ep": 4, "dp": 2}, 2, 2),  # a slot's tokens over two EP groups
    ],
)
def test_shards_follow_megatrons_rank_order(changes, num_shards, groups_of_shard):
    topology = size(**changes).topology(16)
    assert topology.num_shards == num_shards
    assert topology.ep_groups_per_shard == groups_of_shard


@pytest.mark.parametrize("name", ["slime:qwen3-30b", "slime:qwen3-235b", "slime:minimax-m2"])
def test_a_presets_own_sizes_give_its_own_topology(name):
    known = preset(name).topology
    assert JobSize().completed(name, known).topology(preset(name).corpus.num_experts) == known


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"ep": 3, "dp": 3}, "does not divide 16 experts"),
        ({"ep": 8}, "does not divide the 4 ranks"),
        ({"tp": 3, "ep": 4, "dp": 4}, "one must be a multiple of the other"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        size(**changes).topology(16)


def test_neighbours_keep_the_gpus():
    found = dict(size(tp=2, pp=2).neighbours())
    assert {"EP 8", "EP 2", "C 2,048", "C 512", "TP 1, DP 8", "PP 1, DP 8"} <= set(found)
    assert {s.num_gpus for s in found.values()} == {16}


def test_coefficients_are_converted_to_other_sizes():
    cost = CostModel(stages=(Stage(name="layers", alpha=8.0, beta=2.0),))
    here = JobCosts(model="m", cost=cost, size=size(tp=2))
    there = here.at(size(tp=4, capacity=4096)).stages[0]
    assert (there.alpha, there.beta) == (4.0, 4.0)


def test_a_dump_of_a_known_shape_needs_no_cost_file():
    window = next(iter(preset("slime:qwen3-30b").windows(1)))
    found = job_costs("mine.pt", None, window, size(tp=4, ep=8, dp=2, capacity=20480))
    assert found.model == "slime:qwen3-30b"
    assert found.cost == preset("slime:qwen3-30b").cost
    assert found.bytes_per_expert() == 3 * 2048 * 768 * 14


def worths(**net) -> dict[str, Worth]:
    return {
        name: Worth(saved=0.1, seconds=1.0, exposed=0.1, net=n, net_share=n / 10)
        for name, n in net.items()
    }


@pytest.mark.parametrize(
    "net, start, words",
    [
        ((0.1, 0.2, 0.9), "Yes: full", "0.90 s a window net"),
        ((0.9, 0.2, 0.5), "Yes: reschedule", "net"),
        ((0.05, 0.02, 0.1), "Hardly: full", "noise"),
        ((-0.5, -0.2, -0.3), "No: no policy pays", "loses 0.20 s"),
    ],
)
def test_the_line_says_yes_hardly_or_no(net, start, words):
    found = worths(reschedule=net[0], reroute=net[1], full=net[2])
    line = answer(found, imbalance=1.5, is_assumed=False)
    assert line.startswith(start) and words in line
    assert "\n" not in line and "assumed" not in line


def test_even_loads_and_assumed_speeds_are_said():
    line = answer(worths(reschedule=-1, reroute=-1, full=-1), imbalance=1.01, is_assumed=True)
    assert "1.01x" in line and "--window-seconds" in line


def test_the_shipped_trace_is_advised(in_tmp, traces, capsys):
    source = str(traces / "counts_703x24x32.npz")
    assert main(["advise", source, *ARGUMENTS, "--json", "a.json"]) == 0
    content = json.loads((in_tmp / "a.json").read_text())
    figures = content["figures"]
    assert figures["advise.rank_max_over_mean"] == pytest.approx(1.165, abs=0.01)
    assert figures["advise.full.saved"] > figures["advise.reroute.saved"] > 0
    assert figures["advise.full.saved"] > figures["advise.reschedule.saved"]
    for name in ("moved_mb", "exposed_seconds", "net_seconds"):
        assert f"advise.full.{name}" in figures
    assert any(name.startswith("advise.neighbour.") for name in figures)
    assert content["details"]["answer"] in capsys.readouterr().out
    assert (in_tmp / "advise.html").stat().st_size < 3 * 2**20


def test_measured_seconds_replace_the_assumption(in_tmp, traces, capsys):
    source = str(traces / "counts_703x24x32.npz")
    arguments = [*ARGUMENTS, "--trajectories", "200", "--json", "a.json"]
    assert main(["advise", source, *arguments, "--window-seconds", "100"]) == 0
    figures = json.loads((in_tmp / "a.json").read_text())["figures"]
    assert figures["advise.full.saved_seconds"] == pytest.approx(
        100 * figures["advise.full.saved"], rel=1e-6
    )
    assert "assumed speed" not in capsys.readouterr().out


def write_dump(path, *, num_samples=32, num_layers=4, experts=16, top_k=4):
    """A slime rollout dump of a model whose first layer is dense (zero-filled, as SGLang sends)."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, experts + 1)
    samples = []
    for i in range(num_samples):
        num_rows = int(rng.integers(20, 120))
        noise = rng.gumbel(size=(num_rows, num_layers, experts)) + np.log(weights)
        routed = np.argsort(-noise, axis=2)[..., :top_k].astype(np.int32)
        routed[:, 0] = 0
        samples.append(
            {
                "index": i,
                "group_index": i // 4,
                "tokens": list(range(num_rows + 1)),
                "response_length": num_rows,
                "rollout_routed_experts": routed,
            }
        )
    torch.save({"rollout_id": 0, "samples": samples}, path)


def test_a_slime_dump_is_advised_step_by_step(in_tmp, capsys):
    write_dump("rollout_0.pt")
    (in_tmp / "cost.yaml").write_text(
        "stages: [{name: all, alpha: 2.0, beta: 1.0}]\n"
        "move: {bytes_per_expert: 1000, seconds_per_byte: 1.0e-9, seconds_per_cost: 0.5}\n"
    )
    sizes = ["--ep", "4", "--dp", "4", "--capacity", "128", "--cost", "cost.yaml"]
    layers = ["--num-experts", "16", "--moe-layers", "1-3", "--steps", "2"]
    source = "rollout_{rollout_id}.pt"
    assert main(["advise", source, *sizes, *layers, "--json", "a.json"]) == 0
    content = json.loads((in_tmp / "a.json").read_text())
    assert "2 windows" in content["details"]["job"]
    assert content["details"]["rank_load"]["layer_numbers"] == [1, 2, 3]
    assert content["figures"]["advise.rank_max_over_mean"] > 1.3
    assert content["details"]["answer"].startswith("Yes: full")
    assert content["figures"]["advise.full.net_seconds"] > 0
    assert main(["advise", source, *sizes]) == 2
    assert "give --num-experts, or --cost" in capsys.readouterr().err


def test_balanced_rollouts_get_a_no(in_tmp, capsys):
    num, layers, experts, top_k = 32, 2, 8, 2
    demand = np.full((num, layers, experts), 8, np.uint16)
    window = Window(
        window_id=0,
        length=np.full(num, 33),
        routed_rows=np.full(num, 32),
        demand=demand,
        top_k=top_k,
    )
    write_windows("even.npz", [window])
    (in_tmp / "cost.yaml").write_text("stages: [{name: all, alpha: 4.0, beta: 1.0}]\n")
    sizes = ["--ep", "4", "--dp", "4", "--capacity", "66", "--cost", "cost.yaml"]
    assert main(["advise", "even.npz", *sizes, "--json", "a.json"]) == 0
    content = json.loads((in_tmp / "a.json").read_text())
    assert content["details"]["answer"].startswith("No:")
    assert "1.00x" in content["details"]["answer"]
    assert content["figures"]["advise.answer_yes"] == 0
    assert "advise.full.net_seconds" in content["skipped"]
    assert "next:" not in capsys.readouterr().out
