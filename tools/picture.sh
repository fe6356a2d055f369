#!/usr/bin/env bash
# Draws the top of a run's report as docs/img/report.png, with a headless Chromium.
#   tools/picture.sh RUN [HEIGHT]
set -euo pipefail
run=$1
height=${2:-1150}
cd "$(dirname "$0")/.."
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
  { echo "error: no Chromium found. Install one: sudo apt-get install -y chromium" >&2; exit 2; }
mkdir -p docs/img
"$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=1 \
  --window-size="1040,$height" --screenshot="$PWD/docs/img/report.png" "file://$(realpath "$run")/report.html" 2>/dev/null
echo "wrote docs/img/report.png"
