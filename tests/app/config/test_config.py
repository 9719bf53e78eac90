"""Configuration: every wrong value is refused by name with what to change."""

from __future__ import annotations

import pytest
import yaml
from paths import ROOT

from app.config import ConfigError, RunConfig, load_config
from app.reference.configuration import reference


def written(folder, content) -> str:
    path = folder / "run.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("local_*.yaml")), ids=lambda p: p.stem
)
def test_shipped_configurations_load(path):
    config = load_config(path)
    assert config.name == path.stem
    assert config.topology.num_dp_slots == config.ranks.world
    assert config.topology.num_shards == config.ranks.world // config.ranks.ep


@pytest.mark.parametrize(
    "content, words",
    [
        ({"ranks": {"world": 3, "ep": 2}}, ["ranks", "ep 2", "world 3"]),
        ({"model": {"num_experts": 15, "num_groups": 1}}, ["num_experts 15", "ranks.ep 2"]),
        ({"model": {"top_k": 8, "group_top_k": 2}}, ["top_k 8", "top_k = 2 * group_top_k"]),
        ({"model": {"hidden_sise": 8}}, ["model.hidden_sise", "no such field"]),
        ({"planner": {"rows": "few"}}, ["planner.rows", "'few'", "'makespan' or 'paper'"]),
        ({"planner": {"capacity": 0}}, ["planner.capacity", "0", "greater than or equal to 2"]),
        ({"train": {"lr": "fast"}}, ["train.lr", "'fast'", "number"]),
        ({"rollout": {"num_groups": 3}}, ["num_groups 3", "ranks.world 2"]),
        ({"tasks": {"length_max": 5000}}, ["tasks.length_max", "5000", "999"]),
        ("just text", ["expected a mapping"]),
        ("a: [1, 2", ["not readable YAML"]),
    ],
)
def test_wrong_values_are_named(tmp_path, content, words):
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path, content))
    for word in words:
        assert word in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*configs/local_tiny"):
        load_config(tmp_path / "nowhere.yaml")


def test_the_reference_documents_every_field_and_is_up_to_date():
    text = reference()
    assert (ROOT / "docs" / "configuration.md").read_text() == text
    assert "(undocumented)" not in text


def test_cost_coefficients_follow_the_model():
    narrow, wide = RunConfig(), RunConfig(model={"moe_ffn_hidden_size": 256})
    assert wide.cost.beta[0] == pytest.approx(narrow.cost.beta[0] / 2)
    assert wide.cost.alpha[0] < narrow.cost.alpha[0]
