"""The `routepack` command: finds the subcommand, and turns wrong input into one clear line."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence

COMMANDS = {
    "train": "train on this machine under one policy",
    "compare": "compare policies on the same windows",
    "verify": "prove that all policies train the same model, with negative controls",
    "replay": "the paper's offline studies on recorded windows",
    "plan": "plan one window and write the plan to a file",
    "show": "print a plan file and draw its rows",
    "bench": "measure the planner against its bars",
    "advise": "from your own rollouts: what would RoutePack save, in one line",
    "calibrate": "measure the model's own modules and fit the planner's cost model",
    "doctor": "what this machine and environment can run, and what is missing",
    "report": "one HTML page from the JSON of compare, train, replay or advise",
    "warmup": "train the starting weights of a configuration",
}
"""Each is a file of `app/commands` with `add_arguments` and `run`; only the one asked for loads."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; wrong input ends with a clear line and exit code 2, a failed run with 1."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning,ignore::DeprecationWarning")
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    words = sys.argv[1:] if argv is None else list(argv)
    name = next((word for word in words if not word.startswith("-")), "")
    try:
        arguments = _parser(name).parse_args(words)
        return arguments.run(arguments) or 0
    except (ValueError, OSError) as error:
        print(f"routepack {name}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"routepack {name}: {error}; install the local extra: pip install 'routepack[local]'",
            file=sys.stderr,
        )
        return 2
    except RuntimeError as error:
        print(f"routepack {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"routepack {name}: interrupted", file=sys.stderr)
        return 130


def _parser(chosen: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="routepack",
        description="Replay-guided expert placement and trajectory scheduling for MoE RL.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_line in COMMANDS.items():
        command = commands.add_parser(name, help=help_line)
        if name == chosen:
            module = importlib.import_module(f"app.commands.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
