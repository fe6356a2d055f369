#!/usr/bin/env bash
# Writes requirements.lock: the newest versions that pyproject.toml allows, as a clean environment resolves them.
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
# shellcheck disable=SC2086  # PIP_ARGS is a list of words
"$scratch/venv/bin/pip" install --quiet --no-compile ${PIP_ARGS:-} ".[dev,tensorboard]"
{
  sed -n '/^#/p' requirements.lock
  # a local build tag such as +cpu belongs to the machine, not to the pin
  "$scratch/venv/bin/pip" freeze --exclude lehr | sed 's/+[a-z0-9.]*$//'
} > "$scratch/lock"
mv "$scratch/lock" requirements.lock
git --no-pager diff --stat -- requirements.lock || true
