"""What the slime adaptors report and read: times, layout file, configuration, cost, heat map."""

from __future__ import annotations

import numpy as np
import pytest

from app.slime.clock import Marks, table_10
from app.slime.config import SlimeConfigError, load_slime_config
from app.slime.planner_actor import saved_placement
from app.slime.rank_report import heatmap
from planner.placement import Placement


def test_table_10_counts_only_what_nothing_hid():
    marks = Marks(
        sealed_at=0.0,
        aux_seconds=0.5,
        placed_at=0.01,
        schedule_started_at=0.01,
        schedule_ended_at=1.01,
        state_started_at=0.02,
        state_ended_at=0.81,
        commit_seconds=0.3,
        rows_at=1.02,
    )
    times = table_10(marks)
    assert times["time/plan"] == pytest.approx(1.0)
    assert times["overlap"] == pytest.approx(0.79)
    assert times["exposed_ms"] == pytest.approx(1e3 * (0.01 + 0.3 + 0.21))


def test_a_saved_layout_comes_back_and_a_damaged_one_is_ignored(tmp_path):
    placement = Placement(expert_of_slot=np.array([[1, 0, 2, 3]]), num_ep_ranks=2, version=5)
    checkpoint = pytest.importorskip("train_hooks.checkpoint")
    checkpoint.save_layout(tmp_path, placement)
    found = saved_placement(str(tmp_path))
    assert found.version == 5 and (found.expert_of_slot == placement.expert_of_slot).all()
    assert saved_placement(str(tmp_path / "elsewhere")) is saved_placement(None) is None
    (tmp_path / checkpoint.LAYOUT_FILE).write_text("{damaged")
    assert saved_placement(str(tmp_path)) is None


def test_configuration_names_field_value_and_remedy(tmp_path):
    path = tmp_path / "routepack.yaml"
    path.write_text("planner: {rows: fast, num_coers: 2}\n")
    with pytest.raises(SlimeConfigError) as caught:
        load_slime_config(path)
    assert "planner.rows: got 'fast'" in str(caught.value)
    assert "planner.num_coers: no such field" in str(caught.value)
    assert load_slime_config(None, output="x").log.folder == "x"


def test_the_heatmap_is_white_where_load_is_uniform():
    picture = heatmap(np.array([[10, 10]]), np.array([[20, 0]]))
    assert (picture[:, :16] == 255).all() and picture[:, 24:32].max() == 0


# --- train side ------------------------------------------------------------------------------
