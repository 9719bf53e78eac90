"""The walls between rooms, read from the imports (design.md, The house)."""

from __future__ import annotations

import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from imports import arrows, imported, module_name, modules, sources

ENTRY = {"planner.policy", "planner.scheduling", "planner.warm_up"}
"""The planner's entry points: a room of their own above the others."""
DRIVERS = {"app.cli", "app.slime_train", "app.slime_train_async"}
MOST_LINES = 350


def room(module: str) -> str:
    """The room a module of ours lives in."""
    if module in ENTRY:
        return "planner (entry)"
    parts = module.split(".")
    if parts[0] in ("planner", "app") and (len(parts) > 2 or _is_package(module)):
        return ".".join(parts[:2])
    return module if module in DRIVERS else parts[0]


def _is_package(module: str) -> bool:
    return module.count(".") == 1 and any(name.startswith(module + ".") for name in modules())


def is_under(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


@pytest.mark.parametrize(
    ("inside", "forbidden"),
    [
        ("planner", ("torch", "ray", "slime", "megatron", "sglang", "app", "rollout_hooks")),
        ("planner", ("train_hooks",)),
        ("rollout_hooks", ("train_hooks", "app", "megatron")),
        ("train_hooks", ("rollout_hooks", "app", "ray", "sglang")),
        ("planner.placing", ("planner.policy", "planner.scheduling", "planner.search")),
        ("planner.packing", ("planner.policy", "planner.scheduling")),
        ("planner.packing", ("planner.placing", "planner.search")),
        ("planner.search", ("planner.policy", "planner.scheduling", "planner.placing")),
    ],
)
def test_a_room_does_not_import_what_lies_above_it(inside, forbidden):
    found = [
        f"{module} imports {name}"
        for module, name in arrows()
        if is_under(module, inside) and is_under(name, *forbidden)
    ]
    # torch files are read by torch, lazily, where it is installed (planner/recorded/torch_file.py)
    assert [line for line in found if line != "planner.recorded.torch_file imports torch"] == []


def test_the_hooks_import_torch_and_slime_in_the_slime_adaptors_only():
    found = {
        module
        for module, name in arrows()
        if module.startswith("rollout_hooks") and is_under(name, "torch", "slime")
    }
    found |= {
        module
        for module, name in arrows()
        if module.startswith("train_hooks") and is_under(name, "slime")
    }
    assert all(module.split(".")[-1].startswith("slime") for module in found), found


def test_results_imports_no_other_room_of_app():
    found = [
        (module, name)
        for module, name in arrows()
        if room(module) == "app.results" and is_under(name, "app") and room(name) != "app.results"
    ]
    assert found == []


def test_commands_are_imported_by_the_command_line_only():
    found = [
        (module, name)
        for module, name in arrows()
        if is_under(name, "app.commands") and room(module) not in ("app.commands", "app.cli")
    ]
    assert found == []


def test_no_circle_between_rooms():
    graph: dict[str, set[str]] = {}
    for module, name in arrows():
        if name in modules() and room(module) != room(name):
            graph.setdefault(room(module), set()).add(room(name))
    graph.setdefault("app.cli", set()).add("app.commands")  # by name, in COMMANDS
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle between rooms: {' <- '.join(error.args[1])}")


def test_every_command_has_a_file_with_arguments_and_work():
    from importlib import import_module

    from app.cli import COMMANDS

    for name in COMMANDS:
        module = import_module(f"app.commands.{name}")
        assert callable(module.add_arguments) and callable(module.run)


def test_no_file_is_long():
    lines = {module_name(path): len(path.read_text().splitlines()) for path in sources()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_the_reader_sees_lazy_imports(tmp_path):
    """Control: an import inside a function, and one by name, are both seen."""
    path = tmp_path / "lazy.py"
    path.write_text("def f():\n    from planner.policy import make_plan\n    import torch\n")
    assert imported(path) == {"planner.policy", "torch"}
    path = tmp_path / "named.py"
    path.write_text('run_fresh("app.bench.start_worker")\n')
    assert imported(path) == {"app.bench.start_worker"}
