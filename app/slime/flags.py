"""The three flags that RoutePack adds to slime's own, and what slime must be run with for them."""

from __future__ import annotations

import argparse
from typing import Any

from planner.policies import POLICIES, help_text, policy_of

HOOK_PATH = "rollout_hooks.slime_capture.capture"
"""Counts demand as each rollout completes; slime runs it behind the user's own hooks."""


class UnsupportedJob(ValueError):
    """A combination of slime's flags that RoutePack cannot run; the message names the flag."""


def add_routepack_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """slime's `parse_args(add_custom_arguments)` seam (slime/utils/arguments.py)."""
    group = parser.add_argument_group("routepack")
    group.add_argument(
        "--routepack-policy",
        choices=POLICIES,
        default="off",
        help=help_text(),
    )
    group.add_argument(
        "--routepack-config", default=None, help="YAML of app/slime/config.py; default: defaults."
    )
    group.add_argument(
        "--routepack-output", default=None, help="Folder of metrics-<policy>.jsonl (log.folder)."
    )
    return parser


def prepare_arguments(args: Any) -> None:
    """Check slime's flags for the chosen policy and add the capture hook behind the user's own.

    Raises UnsupportedJob naming the flag to change.
    """
    needs = policy_of(args.routepack_policy).needs
    if args.debug_rollout_only or "capture" not in needs:
        args.routepack_policy = "off"
        return
    for wrong, message in (
        (
            not args.num_experts,
            "--num-experts is not set: RoutePack balances experts; use --routepack-policy off for "
            "a dense model",
        ),
        (
            not args.use_dynamic_batch_size,
            "--use-dynamic-batch-size is off: rows are cells of --max-tokens-per-gpu tokens; set "
            "both",
        ),
        (
            getattr(args, "balance_by_flops", False),
            "--balance-by-flops may exceed --max-tokens-per-gpu, the cell capacity: use "
            "--balance-data instead",
        ),
    ):
        if wrong:
            raise UnsupportedJob(message)
    if "movable_experts" in needs:
        _check_moves(args)
    hooks = list(getattr(args, "rollout_sample_hook_path", None) or [])
    if HOOK_PATH not in hooks:
        args.rollout_sample_hook_path = [*hooks, HOOK_PATH]


def _check_moves(args: Any) -> None:
    if args.expert_model_parallel_size < 2:
        raise UnsupportedJob(
            "--expert-model-parallel-size 1: there is no other rank to move an expert to; use "
            "--routepack-policy reschedule"
        )
    if (getattr(args, "expert_tensor_parallel_size", None) or 1) != 1:
        raise UnsupportedJob(
            f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size}: RoutePack moves "
            "whole experts; set it to 1, or use --routepack-policy reschedule"
        )
    if not args.moe_grouped_gemm:
        raise UnsupportedJob(
            "--moe-grouped-gemm is off: RoutePack moves the experts of TEGroupedMLP; set it"
        )
    layers = getattr(args, "megatron_deepgemm_moe_forward_layers", None)
    aligned = all(
        getattr(args, name, False) for name in ("deterministic_mode", "moe_enable_deepep")
    )
    if aligned and layers:
        raise UnsupportedJob(
            "--deterministic-mode with --megatron-deepgemm-moe-forward-layers and "
            "--moe-enable-deepep dispatches by logical ids past the router's map: remove one, or "
            "use --routepack-policy reschedule"
        )
    if getattr(args, "moe_router_fusion", False):
        raise UnsupportedJob(
            "--moe-router-fusion hides the router's output from replay and layout; remove it"
        )
