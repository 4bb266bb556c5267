#!/usr/bin/env bash
# PPO with a critic on GSM8K, Qwen2.5-0.5B-Instruct.
# Hardware: one GPU. Not measured.
set -euo pipefail

postgrad data prepare gsm8k out=gsm8k-train.parquet
postgrad train ppo \
  model.path=Qwen/Qwen2.5-0.5B-Instruct \
  data.train=gsm8k-train.parquet \
  rollout.max_response_tokens=512 \
  training.problems_per_step=64
