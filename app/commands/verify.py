"""`routepack verify`: is the model still exactly right under every policy?"""

from __future__ import annotations

import argparse

from app.commands.arguments import add_json, run_config
from app.config import RunConfig
from app.results.figures import write_figures
from app.results.progress import print_table

LIMITS = {
    "verify.foreign_counts_different": 0.0,
    "verify.moved_state_tensors_different": 0.0,
    "verify.later_state_max_abs_diff": 1e-6,
    "verify.later_loss_max_abs_diff": 1e-6,
    "verify.moved_state_tensors_different_top2": 0.0,
    "verify.later_state_tensors_different_top2": 0.0,
    "verify.later_loss_max_abs_diff_top2": 0.0,
}
MEANING = {
    "verify.grad_max_rel_diff": "gradients: off, base, reroute, full on one window",
    "verify.loss_max_rel_diff": "losses of the same",
    "verify.foreign_counts_different": "expert counts under replay of random ids",
    "verify.moved_state_tensors_different": "state by expert right after a random move",
    "verify.later_state_max_abs_diff": "state three steps after the move",
    "verify.later_loss_max_abs_diff": "losses of these steps",
    "verify.moved_state_tensors_different_top2": "top-2: state right after a random move",
    "verify.later_state_tensors_different_top2": "top-2: state tensors, three steps later",
    "verify.later_loss_max_abs_diff_top2": "top-2: losses of these steps",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="FILE", help="YAML of the run to prove")
    what.add_argument(
        "--matrix", action="store_true", help="prove moves on every layout of training state"
    )
    command.add_argument("--seed", type=int, help="replaces the configuration's seed")
    add_json(command)


def run(arguments: argparse.Namespace) -> int | None:
    if arguments.matrix:
        from app.commands.verify_matrix import verify_matrix

        return 0 if verify_matrix(arguments.json) else 1

    return 0 if verify(run_config(arguments), arguments.json) else 1


def verify(config: RunConfig, json_path: str | None = None) -> bool:
    """Run the checks, print one line each, write the figures; return whether all passed."""
    from app.local.policy_equivalence import TOLERANCE, verify_rank
    from app.local.ranks import run_ranks
    from app.local.warmup import ensure_warm

    agreeing = ("verify.grad_max_rel_diff", "verify.loss_max_rel_diff")
    limits = dict.fromkeys(agreeing, TOLERANCE) | LIMITS
    result = run_ranks(verify_rank, config, str(ensure_warm(config)))
    passed = {name: result.figures[name] <= limit for name, limit in limits.items()}
    rows = [
        [
            MEANING[name],
            f"{result.figures[name]:.2g}",
            f"{limits[name]:g}",
            "ok" if ok else "FAILED",
        ]
        for name, ok in passed.items()
    ]
    rows += [
        [
            f"control: {name}",
            "noticed" if caught else "missed",
            "noticed",
            "ok" if caught else "FAILED",
        ]
        for name, caught in result.controls.items()
    ]
    title = f"{config.name}: {config.ranks.world} ranks, EP {config.ranks.ep}, fp32, clip 0"
    print_table(title, ("check", "difference", "allowed", ""), rows)
    tensors = result.figures["verify.moved_state_tensors"]
    print(f"state compared by logical expert: {tensors:.0f} tensors, bit for bit")
    if result.tiny_gradients:
        print(f"gradients with norm below 1e-8, not compared: {', '.join(result.tiny_gradients)}")
    write_figures(
        json_path,
        "verify",
        result.figures,
        details={"controls": result.controls, "tiny_gradients": result.tiny_gradients},
    )
    return all(passed.values()) and all(result.controls.values())
