"""`planner/policies.py` is the only list of the policies (definitions.md)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from imports import sources, tree

from planner.policies import COMPARED, DECIDING, POLICIES, TRAINED, policy_of


def policy_lists(module: ast.AST) -> list[int]:
    """Lines of collections that name policies: three of them, or two and nothing else."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            words = node.elts
        elif isinstance(node, ast.Dict):
            words = [key for key in node.keys if key is not None]
        else:
            continue
        texts = [word.value for word in words if isinstance(word, ast.Constant)]
        named = sum(text in POLICIES for text in texts)
        if named >= 3 or (named >= 2 and named == len(words)):
            found.append(node.lineno)
    return found


def test_no_other_list_of_policies():
    found = {
        str(path): lines
        for path in sources()
        if path.name != "policies.py" and (lines := policy_lists(tree(path)))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "is_list"),
    [
        ('P = ("off", "full")', True),
        ('P = ["observe", "base", "reroute", "ideal"]', True),
        ('COLOURS = {"off": 1, "base": 2}', True),
        ('verify: Literal["off", "sample", "full"]', False),
        ('x = ("base", "global_ffd", "routepack")', False),
        ('print("off", "full")', False),
    ],
)
def test_the_reader_tells_lists_of_policies_from_others(text, is_list):
    assert bool(policy_lists(ast.parse(text))) == is_list


def test_the_table_says_what_definitions_md_says():
    assert list(POLICIES) == ["off", "observe", "base", "reschedule", "reroute", "full"]
    assert [p.name for p in POLICIES.values() if p.places] == ["reroute", "full"]
    assert [p.name for p in POLICIES.values() if p.searches_rows] == ["reschedule", "full"]
    assert [p.name for p in POLICIES.values() if not p.executes] == ["off", "observe"]
    assert COMPARED == ("off", "base", "reroute", "full")
    assert TRAINED == ("off", "base", "reschedule", "reroute", "full")
    assert DECIDING == ("reschedule", "reroute", "full")


def test_reroute_keeps_the_rows_that_rows_from_names():
    assert policy_of("reroute").runs_slime_rows("slime")
    assert not policy_of("reroute").runs_slime_rows("dp_local_ffd")
    assert not policy_of("base").runs_slime_rows("slime")
    assert policy_of("observe").runs_slime_rows("dp_local_ffd")


def test_every_way_down_ends_at_slimes_schedule_without_moves():
    for policy in POLICIES.values():
        seen = [policy.name]
        while (below := policy_of(seen[-1]).steps_down_to) != seen[-1]:
            assert below not in seen
            seen.append(below)
        assert not policy_of(seen[-1]).executes
    assert policy_of("full").without_moves == "reschedule"
    assert policy_of("reroute").without_moves == "observe"
    assert policy_of("base").without_moves == "base"


def test_an_unknown_policy_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"got 'fast'.*'reroute'"):
        policy_of("fast")
