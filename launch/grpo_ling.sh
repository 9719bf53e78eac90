#!/usr/bin/env bash
# GRPO of Ling 2.0 (Ling-mini-2.0, Ring-mini-2.0, Ling-flash-2.0) on slime with RoutePack.
#
# Usage: [VARIABLE=value ...] bash launch/grpo_ling.sh [--dry-run] [--compare DUMP]
#
#   --dry-run          print every process's full command, check it with slime's own parser; no GPU
#   --compare DUMP     replay the rollout dumps DUMP/rollout_<id>.pt under every policy: paired, in
#                      minutes, with the ideal of forced balance; ends with a table
#
#   MODEL              ling-mini-2.0 (default), ring-mini-2.0 or ling-flash-2.0
#   MODEL_DIR          Hugging Face checkpoint                     (/root/$MODEL)
#   REF_LOAD           reference weights: HF folder or torch_dist  ($MODEL_DIR)
#   SAVE_DIR           checkpoints, and where a run resumes        (${MODEL_DIR}_routepack)
#   DATA               prompts, jsonl with `prompt` and `label`    (/root/dapo-math-17k/...)
#   POLICY             off, observe (default), base, reschedule, reroute, full
#   ROUTEPACK_CONFIG   YAML of app/slime/config.py                 (configs/ling.yaml)
#   NUM_NODES, GPUS_PER_NODE                                       (1, 8; ling-flash: 4, 8)
#   TP, PP, CP, EP     parallel sizes                              (1, 1, 1, 8; ling-flash: 4 1 1 32)
#   CONTEXT            longest response in tokens                  (8192)
#   MAX_TOKENS_PER_GPU cell capacity over CP                       (16384)
#   WANDB_PROJECT, WANDB_GROUP   wandb is on when a project is given; WANDB_API_KEY logs in
#   ASYNC=1            asynchronous rollouts (slime_train_async)   COLOCATE=0 for separate engines
#   DISPATCHER         auto (default), deepep or alltoall
#   OPTIMIZER_OFFLOAD  1 (default) keeps the optimizer on the host
#   SLIME_DIR, MEGATRON_DIR      as in slime's image               (/root/slime, /root/Megatron-LM)
#   MASTER_ADDR, RAY_ADDRESS     Ray's head; a running Ray is used, never stopped
#   OUTPUT             metrics and comparison                      (runs/cluster)
#   EXTRA_ARGS         further slime flags, as one string
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

: "${MODEL:=ling-mini-2.0}"
: "${MODEL_DIR:=/root/$MODEL}"
: "${ROUTEPACK_CONFIG:=$here/../configs/ling.yaml}"
case "$MODEL" in
  ling-mini-2.0 | ring-mini-2.0)
    : "${TP:=1}" "${EP:=8}"
    ;;
  ling-flash-2.0)
    : "${NUM_NODES:=4}" "${TP:=4}" "${EP:=32}"
    ;;
  *)
    echo "MODEL=$MODEL: expected ling-mini-2.0, ring-mini-2.0 or ling-flash-2.0" >&2
    exit 2
    ;;
esac
mapfile -t MODEL_ARGS < <(PYTHONPATH="$here/..:${PYTHONPATH:-}" "${PYTHON:-python3}" -m app.models.bailing_args "$MODEL")
[ "${#MODEL_ARGS[@]}" -gt 0 ] || exit 1

# shellcheck source=launch/slime_job.sh
source "$here/slime_job.sh"
main
