#!/usr/bin/env bash
# All tests, lint and types. Sets up .venv on the first run; further arguments go to pytest.
#
#   bash tests/run.sh           everything: real gloo ranks and servers too (about ten minutes)
#   bash tests/run.sh --fast    no ranks, servers or browser (about a minute)
#
# Two workers share the work by files, so that tests which share ranks stay together; `-n 0` runs it
# in one process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh
options=(-n 2 --dist loadfile --durations 20)
if [ "${1:-}" = --fast ]; then
  shift
  options+=(-m "not ranks and not sglang and not slime and not slow")
fi
ruff format --check .
ruff check .
mypy
pytest "${options[@]}" "$@"
