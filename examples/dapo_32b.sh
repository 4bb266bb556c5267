#!/usr/bin/env bash
# verl's DAPO run, Qwen2.5-32B, on a file of DAPO-Math-17k in verl's schema.
# Hardware: 128 GPUs on a Ray cluster (ADDRESS=host:port). Never run at this size here.
set -euo pipefail

postgrad train verl_dapo \
  model.path=Qwen/Qwen2.5-32B \
  data.train=dapo-math-17k.parquet \
  model.activation_checkpointing=true \
  cluster=ray \
  cluster.workers=128 \
  cluster.offload=true \
  cluster.address="$ADDRESS"
