"""Checkpoints are in logical order: any layout saves, any layout and EP size loads, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny import tiny_config
from train_hooks_ranks import checkpoints

from app.commands.train import train
from app.config import CommitConfig
from app.local.ranks import run_ranks
from planner.placement import Placement
from train_hooks.checkpoint import LAYOUT_FILE, load_layout, save_layout
from train_hooks.layout import LayoutError


@pytest.mark.ranks
def test_case_10_save_under_a_moved_layout_loads_bit_for_bit_also_at_another_ep(tmp_path):
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(
        checkpoints.save_under_a_moved_layout, tiny_config(), folder, "fully_reshardable"
    )
    same = run_ranks(checkpoints.load_elsewhere, tiny_config(2, 2), folder)
    other = run_ranks(checkpoints.load_elsewhere, tiny_config(4, 4), folder)
    for loaded in (same, other):
        assert loaded["next_window"] == 5
        assert loaded["state"].keys() == saved["state"].keys()
        different = [
            k for k in saved["state"] if not torch.equal(saved["state"][k], loaded["state"][k])
        ]
        assert different == []
    assert same["layout_restored"] and (same["placement"] == saved["placement"]).all()
    assert not other["layout_restored"]


@pytest.mark.ranks
def test_every_format_and_an_asynchronous_save_round_trip(tmp_path):
    result = run_ranks(checkpoints.every_format_round_trips, tiny_config(), str(tmp_path))
    assert result["after_saves"] == 0
    assert result["unequal"] == dict.fromkeys((*checkpoints.FORMATS, "async"), 0)
    assert all(result["placed"].values())
    assert result["home_while_writing"] and not result["there_before_the_move"]
    assert result["there_after_the_move"], "the move must wait for the files"
    assert result["trained_on"] > 0


@pytest.mark.ranks
def test_plain_megatron_reads_ours_and_writes_what_we_read(tmp_path):
    result = run_ranks(
        checkpoints.plain_megatron_reads_and_writes_the_same, tiny_config(), str(tmp_path)
    )
    assert result["unlike_before"] > result["tensors"] // 2
    assert result["ours_in_plain"] == result["plain_in_ours"] == 0


@pytest.mark.ranks
def test_a_resumed_run_goes_on_as_an_undisturbed_one(in_tmp):
    """Saved asynchronously under plain commits; resumed under split, checked, chunked ones."""
    config = tiny_config()
    config = replace(
        config,
        train=replace(config.train, num_windows=4, save_every=2, checkpoint_async=True),
    )
    other = replace(config, commit=CommitConfig(split=True, verify="full", staging_mb=1 / 64))

    def losses(name):
        lines = (in_tmp / name / "metrics-reroute.jsonl").read_text().splitlines()
        return {m["rollout/step"]: (m["loss"], m["reward"]) for m in map(json.loads, lines)}

    train(config, "reroute", in_tmp / "whole")
    train(other, "reroute", in_tmp / "rest", resume=str(in_tmp / "whole" / "checkpoint-reroute-2"))
    whole, rest = losses("whole"), losses("rest")
    assert sorted(rest) == [2, 3]
    assert rest == {window: whole[window] for window in rest}


def test_the_layout_file_round_trips_and_a_damaged_one_is_named(tmp_path):
    placement = Placement.identity(2, 8, 4)
    assert load_layout(tmp_path) is None
    save_layout(tmp_path, placement)
    loaded = load_layout(tmp_path)
    assert (loaded.expert_of_slot == placement.expert_of_slot).all()
    assert loaded.num_ep_ranks == 4
    (tmp_path / LAYOUT_FILE).write_text('{"num_ep_ranks": 4}')
    with pytest.raises(LayoutError, match=r"damaged.*delete it"):
        load_layout(tmp_path)
