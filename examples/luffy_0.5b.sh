#!/usr/bin/env bash
# LUFFY on GSM8K's own solutions, Qwen2.5-0.5B-Instruct.
# Hardware: one GPU. Not measured.
set -euo pipefail

postgrad data prepare gsm8k out=gsm8k-train.parquet
postgrad train luffy_small \
  model.path=Qwen/Qwen2.5-0.5B-Instruct \
  data.train=gsm8k-train.parquet \
  rollout.max_response_tokens=512
