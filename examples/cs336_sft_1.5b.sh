#!/usr/bin/env bash
# SFT of the CS336 toolkit: Qwen2.5-Math-1.5B on OMR12k's rows below 4,096 tokens.
# Hardware: one GPU. Not measured.
set -euo pipefail

postgrad data prepare omr12k max_tokens=4096 tokenizer=Qwen/Qwen2.5-Math-1.5B out=omr12k.parquet
postgrad data prepare math500 out=math500.parquet
postgrad train cs336_sft_4096 \
  model.path=Qwen/Qwen2.5-Math-1.5B \
  data.train=omr12k.parquet \
  data.validation=math500.parquet \
  rollout.max_response_tokens=3072
