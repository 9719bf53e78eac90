"""`python -m app.slime.check_command <slime's flags>`: are they flags of the installed slime?

Uses slime's and Megatron's own parsers, without a GPU and without starting anything. Ends with an
error for an unknown flag or a wrong value; says so when slime is not there to ask.
"""

from __future__ import annotations

import argparse
import sys
from difflib import get_close_matches


def check(flags: list[str]) -> str:
    """One line on the flags. Raises SystemExit for a flag that no parser knows."""
    try:
        from megatron.training.arguments import add_megatron_arguments
        from slime.utils.arguments import get_slime_extra_args_provider

        from app.slime.flags import add_routepack_arguments
    except Exception as error:  # an import chain of slime, SGLang and Megatron
        return f"not checked against slime's parser ({type(error).__name__}: {error})"
    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve")
    add_megatron_arguments(parser)
    get_slime_extra_args_provider(add_routepack_arguments)(parser)
    # slime reads these before its main parser (utils/arguments.py, _pre_parse_mode).
    known = {*parser._option_string_actions, "--train-backend", "--debug-train-only"}
    known |= {"--debug-rollout-only", "--load-debug-rollout-data"}
    for flag in flags:
        name = flag.split("=")[0]
        if not flag.startswith("--") or name in known:
            continue
        if name.startswith(("--sglang-", "--router-")):
            continue
        close = get_close_matches(name, known, 3)
        sys.exit(f"slime knows no flag {name}; close: {', '.join(close) or 'none'}")
    parser.parse_known_args(flags)
    return f"checked {sum(f.startswith('--') for f in flags)} flags with slime's own parser"


def main() -> None:
    print(check(sys.argv[1:]))


if __name__ == "__main__":
    main()
