#!/usr/bin/env bash
# verl's PPO run on GSM8K, deepseek-llm-7b-chat.
# Hardware: 8 GPUs. Never run on 8 GPUs here.
set -euo pipefail

postgrad data prepare gsm8k out=gsm8k-train.parquet
postgrad train verl_ppo \
  model.path=deepseek-ai/deepseek-llm-7b-chat \
  data.train=gsm8k-train.parquet \
  model.activation_checkpointing=true \
  cluster=ray \
  cluster.workers=8
