# shellcheck shell=bash
# Sourced by launch/grpo_*.sh after they set MODEL_ARGS and their defaults: builds slime's command with
# RoutePack in it, then prints it (--dry-run), replays a dump under every policy (--compare), or runs it
# as a Ray job. Never ends a process that it did not start: a running Ray is used as it is.

# --- defaults that a model script may have set already ------------------------------------------
: "${SLIME_DIR:=/root/slime}"
: "${MEGATRON_DIR:=/root/Megatron-LM}"
: "${POLICY:=observe}"
: "${ASYNC:=0}"
: "${NUM_NODES:=1}"
: "${GPUS_PER_NODE:=8}"
: "${COLOCATE:=1}"
: "${ROLLOUT_GPUS:=$((NUM_NODES * GPUS_PER_NODE))}"
: "${GPUS_PER_ENGINE:=8}"
: "${TP:=4}"
: "${PP:=1}"
: "${CP:=1}"
: "${EP:=8}"
: "${MAX_TOKENS_PER_GPU:=16384}"
: "${CONTEXT:=8192}"
: "${DATA:=/root/dapo-math-17k/dapo-math-17k.jsonl}"
: "${NUM_ROLLOUT:=3000}"
: "${ROLLOUT_BATCH_SIZE:=32}"
: "${SAMPLES_PER_PROMPT:=8}"
: "${GLOBAL_BATCH_SIZE:=$((ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT))}"
: "${RM_TYPE:=deepscaler}"
: "${SAVE_INTERVAL:=20}"
: "${SAVE_DIR:=${MODEL_DIR}_routepack}"
: "${REF_LOAD:=$MODEL_DIR}"
: "${DISPATCHER:=auto}"
: "${ROUTEPACK_CONFIG:=}"
: "${WANDB_PROJECT:=}"
: "${WANDB_GROUP:=$(basename "$MODEL_DIR")-$POLICY}"
: "${MASTER_ADDR:=127.0.0.1}"
: "${RAY_ADDRESS:=http://127.0.0.1:8265}"
: "${OUTPUT:=runs/cluster}"
: "${EXTRA_ARGS:=}"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

usage() {
  sed -n '/^# Usage/,/^[^#]/p' "$0" | sed -n 's/^# \{0,1\}//p'
  exit "${1:-0}"
}

dry_run=0
dump=""
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry_run=1 ;;
    --compare)
      dump="${2:?--compare needs the folder of rollout_<id>.pt files}"
      shift
      ;;
    -h | --help) usage ;;
    *)
      echo "unknown option $1: pass slime flags in EXTRA_ARGS='...'" >&2
      usage 2 >&2
      ;;
  esac
  shift
done

case "$POLICY" in
  off | observe | base | reschedule | reroute | full) ;;
  *)
    echo "POLICY=$POLICY: expected off, observe, base, reschedule, reroute or full" >&2
    exit 2
    ;;
esac

case "$DISPATCHER" in
  auto | deepep | alltoall) ;;
  *)
    echo "DISPATCHER=$DISPATCHER: expected auto, deepep or alltoall" >&2
    exit 2
    ;;
esac

# --- the dispatcher flags that the installed Megatron takes --------------------------------------
dispatcher_args() {
  local config="$MEGATRON_DIR/megatron/core/transformer/transformer_config.py"
  local wanted="$DISPATCHER"
  if [ "$wanted" = auto ]; then
    if [ "$dry_run" = 0 ] && python3 -c 'import deep_ep' 2>/dev/null; then wanted=deepep; else wanted=alltoall; fi
  fi
  if [ "$wanted" = deepep ]; then
    if [ "$dry_run" = 0 ] && ! python3 -c 'import deep_ep' 2>/dev/null; then
      echo "DISPATCHER=deepep, but deep_ep is not importable: using alltoall" >&2
    elif grep -qs moe_flex_dispatcher_backend "$config"; then
      printf '%s\n' --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep
      return
    elif grep -qs moe_enable_deepep "$config"; then
      printf '%s\n' --moe-token-dispatcher-type flex --moe-enable-deepep
      return
    else
      echo "DISPATCHER=deepep, but $config knows no DeepEP: using alltoall" >&2
    fi
  fi
  printf '%s\n' --moe-token-dispatcher-type alltoall
}

# --- one command ---------------------------------------------------------------------------------
# slime_command POLICY OUTPUT [more flags]: fills the array `command`.
slime_command() {
  local policy="$1" output="$2"
  shift 2
  local module=app.slime_train dispatcher
  [ "$ASYNC" = 1 ] && module=app.slime_train_async
  mapfile -t dispatcher < <(dispatcher_args)
  command=(
    python3 -m "$module"
    --routepack-policy "$policy" --routepack-output "$output"
    --actor-num-nodes "$NUM_NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE"
    --num-gpus-per-node "$GPUS_PER_NODE"
    "${MODEL_ARGS[@]}" "${dispatcher[@]}"
    --hf-checkpoint "$MODEL_DIR" --ref-load "$REF_LOAD" --load "$SAVE_DIR"
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP" --expert-model-parallel-size "$EP"
    --expert-tensor-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-dynamic-batch-size --max-tokens-per-gpu "$MAX_TOKENS_PER_GPU"
    --num-rollout "$NUM_ROLLOUT" --rollout-batch-size "$ROLLOUT_BATCH_SIZE"
    --n-samples-per-prompt "$SAMPLES_PER_PROMPT" --global-batch-size "$GLOBAL_BATCH_SIZE"
    --rollout-max-response-len "$CONTEXT" --rollout-temperature 1
    --use-rollout-routing-replay
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
    --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.98
    --attention-dropout 0.0 --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
  )
  [ "$TP" -gt 1 ] && command+=(--sequence-parallel)
  [ "$COLOCATE" = 1 ] && [ "$ASYNC" = 0 ] && command+=(--colocate)
  [ "${OPTIMIZER_OFFLOAD:-1}" = 1 ] && command+=(
    --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
  [ -n "$ROUTEPACK_CONFIG" ] && command+=(--routepack-config "$ROUTEPACK_CONFIG")
  [ -n "$WANDB_PROJECT" ] && command+=(
    --use-wandb --wandb-project "$WANDB_PROJECT" --wandb-group "$WANDB_GROUP")
  command+=("$@")
  # EXTRA_ARGS is a word list by design, last so that it wins.
  # shellcheck disable=SC2206
  command+=($EXTRA_ARGS)
}

training_command() {
  local more=(
    --prompt-data "$DATA" --input-key prompt --label-key label --apply-chat-template
    --rollout-shuffle --rm-type "$RM_TYPE" --save "$SAVE_DIR" --save-interval "$SAVE_INTERVAL"
    --rollout-num-gpus-per-engine "$GPUS_PER_ENGINE" --sglang-mem-fraction-static 0.7
  )
  if [ "$ASYNC" = 1 ] || [ "$COLOCATE" = 0 ]; then more+=(--rollout-num-gpus "$ROLLOUT_GPUS"); fi
  slime_command "$POLICY" "$OUTPUT" "${more[@]}"
}

# --- run or print --------------------------------------------------------------------------------
runtime_env() {
  local path="$root:$SLIME_DIR:$MEGATRON_DIR"
  printf '{"env_vars": {"PYTHONPATH": "%s", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "%s"}}' \
    "$path" "${NCCL_NVLS_ENABLE:-0}"
}

ray_start=(ray start --head --node-ip-address "$MASTER_ADDR" --num-gpus "$GPUS_PER_NODE"
  --disable-usage-stats --dashboard-host=0.0.0.0 --dashboard-port=8265)

submit() {
  local job=(ray job submit --address="$RAY_ADDRESS" --runtime-env-json="$(runtime_env)" -- "${command[@]}")
  if [ "$dry_run" = 1 ]; then
    printf '%q ' "${job[@]}"
    printf '\n'
    PYTHONPATH="$root:$SLIME_DIR:$MEGATRON_DIR:${PYTHONPATH:-}" \
      "${PYTHON:-python3}" -m app.slime.check_command "${command[@]:3}"
    return
  fi
  "${job[@]}"
}

start_ray() {
  if [ "$dry_run" = 1 ]; then
    printf '%q ' "${ray_start[@]}"
    printf '\n'
    if [ "$NUM_NODES" -gt 1 ]; then
      echo "ray start --address=$MASTER_ADDR:6379 --num-gpus $GPUS_PER_NODE  # on each other node"
    fi
  elif ! ray job list --address="$RAY_ADDRESS" >/dev/null 2>&1; then
    "${ray_start[@]}"
    echo "started Ray; it stays up after the job. 'ray stop' ends every Ray process on this machine."
    if [ "$NUM_NODES" -gt 1 ]; then
      echo "on each of the other nodes: ray start --address=$MASTER_ADDR:6379 --num-gpus $GPUS_PER_NODE"
    fi
  fi
}

compare() {
  local num name policy
  num=$(find "$dump" -maxdepth 1 -name 'rollout_*.pt' 2>/dev/null | wc -l)
  if [ "$num" = 0 ]; then
    echo "--compare $dump: no rollout_<id>.pt there; record some with" >&2
    echo "  EXTRA_ARGS='--save-debug-rollout-data $dump/rollout_{rollout_id}.pt' NUM_ROLLOUT=10 $0" >&2
    [ "$dry_run" = 1 ] || exit 2
    num=10
  fi
  NUM_ROLLOUT="$num"
  for name in observe base reschedule reroute full ideal; do
    policy="$name"
    # The ideal: slime's rows with routing forced to balance, which replay would override.
    local more=(--debug-train-only --load-debug-rollout-data "$dump/rollout_{rollout_id}.pt")
    if [ "$name" = ideal ]; then
      policy=observe
      more+=(--moe-router-force-load-balancing)
    fi
    slime_command "$policy" "$OUTPUT/$name" "${more[@]}"
    if [ "$name" = ideal ]; then
      local kept=() flag
      for flag in "${command[@]}"; do
        [ "$flag" = --use-rollout-routing-replay ] || kept+=("$flag")
      done
      command=("${kept[@]}")
    fi
    submit
  done
  if [ "$dry_run" = 0 ]; then
    PYTHONPATH="$root:${PYTHONPATH:-}" python3 -m app.slime.compare_runs "$OUTPUT" --json "$OUTPUT/compare.json"
  fi
}

main() {
  start_ray
  if [ -n "$dump" ]; then
    compare
  else
    training_command
    submit
  fi
}
