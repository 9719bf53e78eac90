#!/usr/bin/env bash
# All tests, lint and types. Sets up .venv on the first run; further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh
ruff format --check .
ruff check .
mypy
pytest "$@"
