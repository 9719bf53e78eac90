#!/usr/bin/env bash
# The main job on one machine, no GPU: real GRPO training of a small MoE under off, base, reroute and
# full on the same windows, ending with the table. Sets everything up on the first run.
#
#   bash launch/local.sh            ten windows (about 4 minutes once set up)
#   bash launch/local.sh --quick    four windows
#
# CONFIG=configs/local_tiny_ep2_edp2.yaml picks another run; further arguments go to `routepack compare`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh
output="${OUTPUT:-runs/local}"
routepack compare --config "${CONFIG:-configs/local_tiny.yaml}" --output "$output" \
  --json "$output/compare.json" "$@"
routepack report "$output/compare.json" --output "$output/report.html"
