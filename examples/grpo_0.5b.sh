#!/usr/bin/env bash
# GRPO on GSM8K, Qwen2.5-0.5B-Instruct.
# Hardware: one GPU. Not measured.
set -euo pipefail

postgrad data prepare gsm8k out=gsm8k-train.parquet
postgrad data prepare gsm8k split=test out=gsm8k-test.parquet
postgrad train grpo \
  model.path=Qwen/Qwen2.5-0.5B-Instruct \
  data.train=gsm8k-train.parquet \
  data.validation=gsm8k-test.parquet \
  rollout.max_response_tokens=512 \
  training.problems_per_step=64 \
  training.validate_every=20
