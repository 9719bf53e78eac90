#!/usr/bin/env bash
# Makes .venv-sglang in the repository (about 2.6 GB, two to three minutes) when it is missing or
# requirements/sglang-cpu.txt changed: stock SGLang on the CPU, apart from .venv, which trains.
#
#   bash launch/sglang_venv.sh             PYTHON=... picks the interpreter (3.11 tested)
#
# SGLANG_VENV=DIR puts it elsewhere: then set ROUTEPACK_SGLANG_PYTHON=DIR/bin/python.
#
# A folder made halfway is never used: the stamp comes last.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${SGLANG_VENV:-$root/.venv-sglang}"
requirements="$root/requirements/sglang-cpu.txt"
stamp="$venv/routepack-$(sha256sum "$requirements" | cut -c1-16)"
if [ -f "$stamp" ]; then exit 0; fi
exec 9>"$venv.lock"  # two test workers may ask at once: the second waits, and finds it made
flock 9
if [ -f "$stamp" ]; then exit 0; fi
echo "setting up $venv (two to three minutes)" >&2
"${PYTHON:-python3}" -m venv --clear "$venv"
echo '*' > "$venv/.gitignore"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$requirements" \
  2> >(grep -v '^WARNING: Location' >&2)
touch "$stamp"
