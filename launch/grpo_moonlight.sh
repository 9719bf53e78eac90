#!/usr/bin/env bash
# GRPO of Moonlight-16B-A3B on slime with RoutePack; the model arguments are slime's own.
#
# Usage: [VARIABLE=value ...] bash launch/grpo_moonlight.sh [--dry-run] [--compare DUMP]
#
#   The options and variables of launch/grpo_ling.sh, with these defaults:
#   MODEL_DIR=/root/Moonlight-16B-A3B  REF_LOAD=/root/Moonlight-16B-A3B_torch_dist
#   TP=4 PP=1 CP=1 EP=8  MAX_TOKENS_PER_GPU=8192  RM_TYPE=math
#   MODEL_ARGS come from $SLIME_DIR/scripts/models/moonlight.sh.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

: "${MODEL_DIR:=/root/Moonlight-16B-A3B}"
: "${REF_LOAD:=${MODEL_DIR}_torch_dist}"
: "${MAX_TOKENS_PER_GPU:=8192}"
: "${RM_TYPE:=math}"
: "${SLIME_DIR:=/root/slime}"
model_script="$SLIME_DIR/scripts/models/moonlight.sh"
if [ -f "$model_script" ]; then
  set +u # slime's file counts with unset variables
  # shellcheck disable=SC1090
  source "$model_script"
  set -u
elif [[ " $* " == *" --dry-run "* ]]; then
  echo "no $model_script: the model arguments are shown by name only" >&2
  MODEL_ARGS=("<MODEL_ARGS of $model_script>")
else
  echo "no $model_script: set SLIME_DIR to slime's repository" >&2
  exit 2
fi

# shellcheck source=launch/slime_job.sh
source "$here/slime_job.sh"
main
