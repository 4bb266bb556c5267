#!/usr/bin/env bash
# The speed tables of docs/results.md on one GPU: Postgrad and others, one after the other.
#   bash benchmarks/gpu/speed.sh OUT SECONDS SMOLLM2 TRAIN_JSONL
# SMOLLM2 is a folder of SmolLM2-135M-Instruct, TRAIN_JSONL the training problems of GSM8K.
# OUT/speed.jsonl gets a line per result. What has one is not repeated: the same command continues
# after SECONDS, also from a copy of the results in benchmarks/gpu/speed.jsonl. A peer that is not
# installed or fails leaves a line with the reason. The 8B steps hold 98 GB of page-locked host
# memory beside the model folders in OUT/models. UNSLOTH may name a folder with Unsloth's packages,
# which need older ones of others.
# Then: python benchmarks/gpu/speed_table.py OUT/speed.jsonl --write
set -u
out=$1 end=$((SECONDS + $2)) smollm2=$3 gsm8k=$4
here=$(cd "$(dirname "$0")" && pwd)
file=$out/speed.jsonl
mkdir -p "$out/models"

# LONGEST_S COMMAND...: for the time that is left at most; fails if there is none
limited() {
  local limit=$1 left=$((end - SECONDS))
  shift
  if [ "$left" -lt 20 ]; then return 1; fi
  timeout -k 10 $((limit < left ? limit : left)) "$@"
}

# NAME SYSTEM LONGEST_S ARGUMENTS...: of peers.py; NAME and SYSTEM are those of its result
peer() {
  local name=$1 system=$2 limit=$3 left=$((end - SECONDS))
  shift 3
  if [ "$left" -lt 20 ]; then return; fi
  local path=${PYTHONPATH:-}
  if [ "$1" = unsloth ] && [ -n "${UNSLOTH:-}" ]; then path=$UNSLOTH:$path; fi
  PYTHONPATH=$path limited "$limit" python3 "$here/peers.py" "$@" --folder "$out/models" \
    --out "$file" > "$out/peer.log" 2>&1
  local code=$? reason
  cat "$out/peer.log"
  reason=$(grep -v '^\s*$' "$out/peer.log" | tail -1 | cut -c1-300)
  # Ended by SECONDS, not by its own limit: that is no result of the peer.
  if [ "$left" -lt "$limit" ] && { [ $code = 124 ] || [ $code = 137 ]; }; then return; fi
  if [ $code = 124 ]; then reason="no step within $limit s"; fi
  if [ $code != 0 ]; then python3 "$here/rows.py" "$name" "$system" "$reason" "$file"; fi
}

# SYSTEM: the numbers of clients that have no result of serve.py, separated by commas
clients_left() {
  local number numbers=""
  for number in 1 16 128; do
    grep -qs "\"serve $number clients x 128 tokens\", \"system\": \"$1\"" "$file" ||
      numbers+="${numbers:+,}$number"
  done
  echo "$numbers"
}

# LONGEST_S ROWS...: of fit_check.py
fit() {
  local limit=$1
  shift
  limited "$limit" python3 "$here/fit_check.py" --rows "$@" --limit-s "$limit" --out "$file" \
    --folder "$out/models"
}

fit 150 rollout-4b step-4b
peer "rollout 4b 32 x 8 x 1024" vllm 150 vllm --shape 4b --rows 256 --tokens 1024
peer "step 4b 32 x 8 x 1024" "trl with vllm" 240 trl --shape 4b --problems 32 --tokens 1024
fit 150 rollout-1.7b step-1.7b
peer "rollout 1.7b 128 x 8 x 512" vllm 120 vllm --shape 1.7b --rows 1024 --tokens 512
peer "step 1.7b 64 x 16 x 512" "trl with vllm" 200 trl --shape 1.7b --problems 64 --samples 16 \
  --tokens 512
rm -rf "$out"/models/qwen3-{1.7b,4b}  # the memory of the host is needed for the 8B steps
fit 280 step-8b step-8b-short
# Its weights, gradients and state of Adam take 66 GB beside vLLM's memory.
peer "step 8b 16 x 8 x 512" "trl with vllm" 240 trl --shape 8b --problems 16 --tokens 512 \
  --memory 0.4
fit 130 row-8b-4bit-110k
fit 200 row-0.6b-16k row-0.6b-65k row-4b-lora-16k row-4b-lora-65k
fit 200 step-4b-long
fit 120 step-4b-lora
clients=$(clients_left postgrad)
if [ -n "$clients" ]; then
  limited 90 python3 "$here/../serve.py" "$smollm2" --clients "$clients" --seconds 8 --tokens 128 \
    --out "$file"
fi
clients=$(clients_left vllm)
if [ -n "$clients" ] && [ $((end - SECONDS)) -gt 120 ] \
  && python3 -c 'import vllm' 2> /dev/null; then
  python3 -m vllm.entrypoints.openai.api_server --model "$smollm2" --port 8001 \
    --generation-config vllm --gpu-memory-utilization 0.5 > "$out/server.log" 2>&1 &
  server=$!
  for _ in $(seq 110); do
    if curl -sf http://127.0.0.1:8001/health > /dev/null; then break; fi
    sleep 1
  done
  limited 60 python3 "$here/../serve.py" "$smollm2" --clients "$clients" --seconds 8 --tokens 128 \
    --url http://127.0.0.1:8001/v1 --system vllm --out "$file"
  # It may wait 600 s for an engine that does not start.
  kill $server; sleep 3; pkill -9 -P $server; kill -9 $server
fi
# Postgrad's figures first, then the peers' that take longest.
compare() {
  limited "$1" python3 "$here/compare.py" "${@:2}" --model "$smollm2" --gsm8k "$gsm8k" --out "$file"
}
compare 200 rollout --shapes smollm2 --peers vllm
compare 150 step update learn --peers
peer "step 4b 32 x 8 x 1024" "unsloth with vllm" 290 unsloth --shape 4b --problems 32 --tokens 1024
fit 200 row-8b-4bit-160k
for case in 8b-4bit 4b-lora; do  # torch gets this much of a GPU of 24 GB
  limited 120 python3 "$here/long_rows.py" longest --case $case --start 16384 --memory-gib 21.5 \
    --out "$file" --folder "$out/models" --limit-s 80
done
compare 150 rollout --shapes qwen1.5b --peers
compare 150 step update --peers trl hf
limited 150 python3 "$here/low_memory.py" --model "$smollm2" --data "$gsm8k" --steps 60 --jobs 4 \
  --out "$file"
fit 200 step-0.6b-small row-0.6b-16k-kept row-0.6b-65k-kept row-4b-lora-16k-kept \
  update-4b update-4b-short
compare 300 rollout learn --peers trl vllm
echo "$((end - SECONDS)) s left; results in $file"
