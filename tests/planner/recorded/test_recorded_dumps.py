"""slime's rollout dumps, SGLang's expert distribution and Megatron's routing traces."""

import json
import os
import pickle

import numpy as np
import pytest

from planner.recorded import read

torch = pytest.importorskip("torch")


def routing(num_rows, *, num_layers=3, num_experts=8, top_k=2, dense=(0,), seed=0):
    rng = np.random.default_rng(seed)
    routed = np.argsort(rng.random((num_rows, num_layers, num_experts)), -1)[..., :top_k]
    routed[:, list(dense)] = 0
    return routed.astype(np.int32)


def sample(i, num_tokens, **changes):
    return {
        "group_index": i // 2,
        "index": i,
        "tokens": list(range(num_tokens)),
        "prompt": "2 + 2",
        "response_length": num_tokens - 1,
        "reward": 1.0,
        "status": "completed",
        "metadata": {"a": [1, None, "x"]},
        "rollout_routed_experts": torch.from_numpy(routing(num_tokens - 1, seed=i)),
        **changes,
    }


def dump(path, samples, rollout_id=3):
    torch.save({"rollout_id": rollout_id, "samples": samples}, path)
    return path


MODEL = {"num_experts": 8, "moe_layers": (1, 2)}


def test_a_slime_dump_becomes_a_window(tmp_path):
    path = dump(tmp_path / "d.pt", [sample(i, 5 + i) for i in range(4)])
    (window,) = read(path, **MODEL)
    assert window.window_id == 3 and window.top_k == 2 and window.layer_numbers == (1, 2)
    assert window.length.tolist() == [5, 6, 7, 8] and window.routed_rows.tolist() == [4, 5, 6, 7]
    assert window.group.tolist() == [0, 0, 1, 1]
    expected = np.bincount(routing(4)[:, 1].ravel(), minlength=8)
    assert np.array_equal(window.demand[0, 0], expected)


@pytest.mark.parametrize("kind", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "list", "numpy"])
def test_every_integer_type_and_container_reads_the_same(tmp_path, kind):
    expected = read(dump(tmp_path / "d.pt", [sample(0, 6)]), **MODEL)[0].demand
    routed = routing(5)
    if kind == "list":
        value = routed.tolist()
    elif kind == "numpy":
        value = routed
    else:
        value = torch.from_numpy(routed.astype(kind))
    path = dump(tmp_path / "e.pt", [sample(0, 6, rollout_routed_experts=value)])
    assert np.array_equal(read(path, **MODEL)[0].demand, expected)


def test_one_rollout_of_several_steps_and_a_template_of_rollouts(tmp_path):
    for rollout_id in (10, 9):
        dump(tmp_path / f"r_{rollout_id}.pt", [sample(i, 5) for i in range(4)], rollout_id)
    dump(tmp_path / "r_eval_9.pt", [sample(0, 5)], 9)
    windows = read(tmp_path / "r_{rollout_id}.pt", num_steps=2, **MODEL)
    assert [w.window_id for w in windows] == [18, 19, 20, 21]
    assert [w.num_trajectories for w in windows] == [2, 2, 2, 2]
    assert len(read(tmp_path / "r_{rollout_id}.pt", num_windows=1, **MODEL)) == 1
    with pytest.raises(ValueError, match="do not split into num_steps=3"):
        read(tmp_path / "r_10.pt", num_steps=3, **MODEL)
    with pytest.raises(ValueError, match="no file matches"):
        read(tmp_path / "q_{rollout_id}.pt", **MODEL)


def test_case_11_missing_captures_are_an_error_or_estimated(tmp_path):
    samples = [sample(0, 9), sample(1, 5, rollout_routed_experts=None)]
    path = dump(tmp_path / "d.pt", samples)
    with pytest.raises(ValueError, match=r"d\.pt: sample 1 has no .*1 of 2.*--use-rollout-rout"):
        read(path, **MODEL)
    (window,) = read(path, missing="estimate", **MODEL)
    assert window.estimated.tolist() == [False, True]
    assert (window.demand.sum(2) == [[16, 16], [8, 8]]).all()
    none = [sample(i, 5, rollout_routed_experts=None) for i in range(2)]
    dump(path, none)
    with pytest.raises(ValueError, match="pass moe_layers and top_k"):
        read(path, missing="estimate", num_experts=8)
    (window,) = read(path, missing="estimate", top_k=2, **MODEL)
    assert window.estimated.all() and (window.demand == 1).all()


@pytest.mark.parametrize(
    "change, options, message",
    [
        ({}, {"num_experts": None}, "pass num_experts"),
        ({}, {"moe_layers": None}, "layer 0: expert id 0 appears twice"),
        ({}, {"moe_layers": (1, 3)}, "moe_layers names layer 3"),
        ({}, {"num_experts": 4}, r"sample 0: layer 1: expert id \d is outside"),
        ({}, {"num_experts": 512}, None),
        ({}, {"top_k": 3}, "top_k says 3"),
        ({}, {"missing": "skip"}, "missing"),
        ({"tokens": []}, {}, "sample 0 has no tokens"),
        ({"tokens": [1, 2, 3]}, {}, "sample 0 has 5 routed rows for 3 tokens"),
        ({"group_index": "a"}, {}, "sample 0: group_index"),
        ({"rollout_routed_experts": [[1], [1, 2]]}, {}, "sample 0: rollout_routed_experts"),
        ({"rollout_routed_experts": torch.zeros(5, 3, 2)}, {}, "float32"),
        (
            {"rollout_routed_experts": torch.zeros(5, 3, 2, dtype=torch.uint8)},
            {"num_experts": 512},
            "cannot hold the ids of 512",
        ),
    ],
)
def test_a_wrong_slime_dump_is_named(tmp_path, change, options, message):
    path = dump(tmp_path / "d.pt", [sample(0, 6, **change)])
    options = {**MODEL, **options}
    if message is None:
        assert read(path, **options)[0].num_experts == 512
        return
    with pytest.raises(ValueError, match=message) as error:
        read(path, **options)
    assert message == "missing" or str(path) in str(error.value)


@pytest.mark.parametrize("other", [routing(4, num_layers=2), routing(4)[:, :, 0]])
def test_samples_of_different_models_are_named(tmp_path, other):
    samples = [sample(0, 6), sample(1, 5, rollout_routed_experts=torch.from_numpy(other))]
    with pytest.raises(ValueError, match=r"samples \[0, 1\] have routing of shapes"):
        read(dump(tmp_path / "d.pt", samples), **MODEL)


class Bomb:
    def __reduce__(self):
        return (eval, ("__import__('os').environ.__setitem__('ROUTEPACK_BOMB', '1')",))


def test_a_dump_never_runs_code(tmp_path, monkeypatch):
    monkeypatch.delenv("ROUTEPACK_BOMB", raising=False)
    path = dump(tmp_path / "d.pt", [sample(0, 6, metadata=Bomb())])
    plain = tmp_path / "e.pkl"
    plain.write_bytes(pickle.dumps({"samples": Bomb()}))
    for each in (path, plain):
        with pytest.raises(ValueError, match="not a torch file with"):
            read(each, **MODEL)
    assert "ROUTEPACK_BOMB" not in os.environ


@pytest.mark.parametrize("cut", [0, 10, 200, -30])
def test_a_truncated_torch_file_is_one_clear_error(tmp_path, cut):
    path = dump(tmp_path / "d.pt", [sample(0, 6)])
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"d\.pt: not a torch file"):
        read(path, **MODEL)


def test_foreign_torch_files_are_named(tmp_path):
    torch.save([1, 2], tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt: holds a list"):
        read(tmp_path / "a.pt")
    torch.save({"model": 1}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"b\.pt: holds \['model'\]"):
        read(tmp_path / "b.pt")
    torch.save({"samples": 1}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"c\.pt: not a slime dump"):
        read(tmp_path / "c.pt", **MODEL)


def test_an_expert_distribution_is_one_pseudo_trajectory(tmp_path):
    count = torch.arange(24, dtype=torch.int32).reshape(2, 3, 4)
    torch.save({"rank": 0, "logical_count": count}, tmp_path / "x.pt")
    (window,) = read(tmp_path / "x.pt", top_k=2, moe_layers=(1, 2))
    assert window.estimated.all() and window.num_trajectories == 1
    assert window.demand[0].tolist() == count.sum(0)[1:].tolist()
    with pytest.raises(ValueError, match="pass top_k"):
        read(tmp_path / "x.pt")
    with pytest.raises(ValueError, match="do not fit 3 layers"):
        read(tmp_path / "x.pt", top_k=2, moe_layers=(3,))
    count[:, 0] = 0
    torch.save({"rank": 0, "logical_count": count}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="layer 0 was never routed"):
        read(tmp_path / "x.pt", top_k=2)
    torch.save({"records": [], "last_physical_to_logical_map": 0}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="recorder-mode stat"):
        read(tmp_path / "x.pt", top_k=2)


def trace_line(step, layer, rank, top_indices, **changes):
    record = {
        "step": step,
        "stage": "pre_dispatch",
        "block": "decoder",
        "layer": layer,
        "rank": rank,
        "num_tokens": len(top_indices),
        "topk": len(top_indices[0]),
        "top_indices": np.asarray(top_indices).tolist(),
        **changes,
    }
    return json.dumps(record)


def write_trace(folder, *, num_ranks=2, steps=(4, 5), layers=(1, 2), twice=False):
    """Two micro-batches of 3 and 5 tokens a rank; returns ids [rank, step, layer, micro-batch]."""
    ids = {}
    for rank in range(num_ranks):
        lines = []
        for step in steps:
            for k, num_tokens in enumerate((3, 5)):
                for layer in layers:
                    seed = [rank, step, layer, k]
                    routed = routing(num_tokens, num_layers=1, dense=(), seed=seed)[:, 0]
                    ids[rank, step, layer, k] = routed
                    lines.append(trace_line(step, layer, rank, routed))
                    if twice:
                        lines.append(trace_line(step, layer, rank, routed))
            lines.append(trace_line(step, 0, rank, routed, block="mtp", mtp_idx=0))
        (folder / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return ids


@pytest.mark.parametrize("twice", [False, True], ids=["plain", "recompute"])
def test_a_megatron_trace_merges_ranks_and_ignores_recompute(tmp_path, twice):
    ids = write_trace(tmp_path, twice=twice)
    windows = read(tmp_path, num_experts=8)
    assert [w.window_id for w in windows] == [4, 5]
    window = windows[1]
    assert window.layer_numbers == (1, 2) and window.length.tolist() == [3, 5, 3, 5]
    expected = np.bincount(ids[1, 5, 2, 0].ravel(), minlength=8)
    assert np.array_equal(window.demand[2, 1], expected)


def test_token_shards_of_a_slot_and_pipeline_stages_are_joined(tmp_path):
    ids = write_trace(tmp_path, num_ranks=4, steps=(0,))
    (window,) = read(tmp_path, num_experts=8, ranks_per_slot=2)
    assert window.length.tolist() == [6, 10, 6, 10]
    (window,) = read(tmp_path, num_experts=8, pp=2, ranks_per_slot=2)
    assert window.length.tolist() == [6, 10] and window.num_layers == 4
    both = np.concatenate([ids[2, 0, 1, 0], ids[3, 0, 1, 0]])
    assert np.array_equal(window.demand[0, 2], np.bincount(both.ravel(), minlength=8))


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 1: damaged"),
        ("[1]", "line 1: damaged"),
        (json.dumps({"step": 0, "layer": 1}), "line 1: damaged"),
        (trace_line(0, 1, 0, [[0, 1]], num_tokens=2), "line 1: damaged"),
        (trace_line(0, 1, 0, [[0, 1]], num_tokens="x"), "line 1: damaged"),
        (trace_line(0, 1, 0, [[0, 9]]), "expert id 9 is outside"),
        (trace_line(0, 1, 0, [[3, 3]]), "appears twice"),
        ("", "no step was recorded"),
    ],
)
def test_a_damaged_trace_is_named(tmp_path, line, message):
    (tmp_path / "router_trace_rank0.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, num_experts=8)
    assert str(tmp_path) in str(error.value)


def test_ranks_that_disagree_name_the_step(tmp_path):
    write_trace(tmp_path)
    with pytest.raises(ValueError, match="pass num_experts"):
        read(tmp_path)
    with pytest.raises(ValueError, match="2 ranks do not split into pp=4"):
        read(tmp_path, num_experts=8, pp=4)
    lines = (tmp_path / "router_trace_rank1.jsonl").read_text().splitlines()
    (tmp_path / "router_trace_rank1.jsonl").write_text("\n".join(lines[1:]))
    with pytest.raises(ValueError, match="step 4, stage 0: ranks differ"):
        read(tmp_path, num_experts=8)
    (tmp_path / "router_trace_rank1.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"rank1\.jsonl: cannot be read"):
        read(tmp_path, num_experts=8)
