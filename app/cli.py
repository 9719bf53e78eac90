"""The `routepack` command: one subcommand per thing a user wants to see."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from app.cli_planner import add_planner_commands
from app.cli_tools import add_tool_commands

POLICIES = ("off", "observe", "base", "reschedule", "reroute", "full")


def main(argv: list[str] | None = None) -> int:
    """Run one command; wrong input ends with a clear line and exit code 2, a failed run with 1."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning,ignore::DeprecationWarning")
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except (ValueError, OSError) as error:
        print(f"routepack {arguments.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"routepack {arguments.command}: {error}; install the local extra: "
            "pip install 'routepack[local]'",
            file=sys.stderr,
        )
        return 2
    except RuntimeError as error:
        print(f"routepack {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"routepack {arguments.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="routepack",
        description="Replay-guided expert placement and trajectory scheduling for MoE RL.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_compare(commands)
    _add_verify(commands)
    add_planner_commands(commands)
    add_tool_commands(commands)
    _add_warmup(commands)
    return parser


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", required=True, metavar="FILE", help="YAML of the run")
    command.add_argument("--seed", type=int, help="replaces the configuration's seed")
    command.add_argument("--json", metavar="FILE", help="write the figures here")


def _configuration(arguments):
    from app.config import load_config

    config = load_config(arguments.config)
    return config if arguments.seed is None else replace(config, seed=arguments.seed)


def _output(arguments) -> Path:
    return Path(arguments.output or Path("runs") / arguments.command)


def _add_train(commands) -> None:
    command = commands.add_parser("train", help="train on this machine under one policy")
    _add_run_options(command)
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--policy", choices=POLICIES)
    what.add_argument(
        "--online", action="store_true", help="let several policies learn, and compare the rewards"
    )
    command.add_argument(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=["off", "base", "reroute", "full"],
        help="of --online (default off base reroute full)",
    )
    command.add_argument("--windows", type=_positive, metavar="N", help="windows to train")
    command.add_argument("--seeds", type=_positive, metavar="N", help="of --online")
    command.add_argument("--output", metavar="DIR", help="default runs/train or runs/online")
    command.add_argument("--resume", metavar="DIR", help="checkpoint folder to go on from")
    command.add_argument("--report", metavar="HTML", help="write the page here")

    def run(arguments):
        config = _configuration(arguments)
        if arguments.online:
            from app.commands.train_online import train_online

            if arguments.resume:
                raise ValueError(
                    "--resume: an online comparison starts every run anew; leave it out"
                )
            train_online(
                config,
                tuple(arguments.policies),
                Path(arguments.output or Path("runs") / "online"),
                arguments.json,
                num_windows=arguments.windows,
                num_seeds=arguments.seeds,
                report=arguments.report,
            )
            return
        from app.commands.train import train

        train(
            config,
            arguments.policy,
            _output(arguments),
            arguments.json,
            arguments.windows,
            resume=arguments.resume,
            report=arguments.report,
        )

    command.set_defaults(run=run)


def _add_compare(commands) -> None:
    command = commands.add_parser("compare", help="compare policies on the same windows")
    _add_run_options(command)
    command.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=["off", "base", "reroute", "full"]
    )
    command.add_argument("--quick", action="store_true", help="4 windows, 2 repeats")
    command.add_argument("--output", metavar="DIR", help="default runs/compare")
    command.add_argument("--report", metavar="HTML", help="write the page here")

    def run(arguments):
        from app.commands.compare import compare

        policies = tuple(arguments.policies)
        compare(
            _configuration(arguments),
            policies,
            _output(arguments),
            arguments.json,
            arguments.quick,
            arguments.report,
        )

    command.set_defaults(run=run)


def _add_verify(commands) -> None:
    command = commands.add_parser(
        "verify", help="prove that all policies train the same model, with negative controls"
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="FILE", help="YAML of the run to prove")
    what.add_argument(
        "--matrix", action="store_true", help="prove moves on every layout of training state"
    )
    command.add_argument("--seed", type=int, help="replaces the configuration's seed")
    command.add_argument("--json", metavar="FILE", help="write the figures here")

    def run(arguments):
        if arguments.matrix:
            from app.commands.verify_matrix import verify_matrix

            return 0 if verify_matrix(arguments.json) else 1
        from app.commands.verify import verify

        return 0 if verify(_configuration(arguments), arguments.json) else 1

    command.set_defaults(run=run)


def _add_warmup(commands) -> None:
    command = commands.add_parser("warmup", help="train the starting weights of a configuration")
    _add_run_options(command)

    def run(arguments):
        from app.local.warmup import warm_up, warmup_path
        from app.results.figures import write_figures

        config = _configuration(arguments)
        figures = warm_up(config)
        write_figures(arguments.json, "warmup", figures)
        print(
            f"{warmup_path(config)}: {figures['warmup.steps']:.0f} steps in "
            f"{figures['warmup.seconds']:.0f} s, loss {figures['warmup.first_loss']:.3f} -> "
            f"{figures['warmup.last_loss']:.3f}, {figures['warmup.mb']:.1f} MB"
        )

    command.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text) if text.lstrip("-").isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
