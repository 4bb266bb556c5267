#!/usr/bin/env bash
# BuPO's BuPO_qwen3.sh: Qwen3-4B, non-thinking, DeepMath.
# Hardware: 8 GPUs. Never run on 8 GPUs here.
set -euo pipefail

postgrad data prepare deepmath out=deepmath.parquet
postgrad data prepare math500 out=math500.parquet
postgrad train bupo \
  model.path=Qwen/Qwen3-4B \
  data.train=deepmath.parquet \
  data.validation=math500.parquet \
  data.template_options.enable_thinking=false \
  model.activation_checkpointing=true \
  cluster=ray \
  cluster.workers=8
