# Source this: makes .venv in the repository when it is missing or pyproject.toml changed, activates it.
# Needs Python 3.10 or newer (3.11 tested). PYTHON=... picks the interpreter.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
stamp="$root/.venv/routepack-$(sha256sum "$root/pyproject.toml" | cut -c1-16)"
if [ ! -f "$stamp" ]; then
  echo "setting up $root/.venv (about a minute)" >&2
  "${PYTHON:-python3}" -m venv "$root/.venv" || exit 1
  "$root/.venv/bin/pip" install --quiet --disable-pip-version-check -e "$root[local,test]" \
    2> >(grep -v '^WARNING: Location' >&2) || exit 1
  rm -f "$root"/.venv/routepack-*
  touch "$stamp"
fi
export PATH="$root/.venv/bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
