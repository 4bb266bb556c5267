#!/usr/bin/env bash
# verl's GRPO run on GSM8K, Qwen2-7B-Instruct.
# Hardware: 8 GPUs. Never run on 8 GPUs here.
set -euo pipefail

postgrad data prepare gsm8k out=gsm8k-train.parquet
postgrad data prepare gsm8k split=test out=gsm8k-test.parquet
postgrad train verl_grpo \
  model.path=Qwen/Qwen2-7B-Instruct \
  data.train=gsm8k-train.parquet \
  data.validation=gsm8k-test.parquet \
  reward.verifier=gsm8k_strict \
  model.activation_checkpointing=true \
  cluster=ray \
  cluster.workers=8
