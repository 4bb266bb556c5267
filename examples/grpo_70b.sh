#!/usr/bin/env bash
# GRPO with verl's settings, Qwen2.5-72B-Instruct.
# Hardware: 32 GPUs on a Ray cluster (ADDRESS=host:port). Never run at this size here.
set -euo pipefail

postgrad train verl_grpo \
  model.path=Qwen/Qwen2.5-72B-Instruct \
  data.train=gsm8k-train.parquet \
  model.activation_checkpointing=true \
  cluster=ray \
  cluster.workers=32 \
  cluster.offload=true \
  cluster.address="$ADDRESS"
