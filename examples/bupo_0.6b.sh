#!/usr/bin/env bash
# BuPO on DeepMath, Qwen3-0.6B, non-thinking; num_blocks is 6 of 28 as an example.
# Hardware: one GPU. Not measured.
set -euo pipefail

postgrad data prepare deepmath out=deepmath.parquet
postgrad train bupo_small \
  model.path=Qwen/Qwen3-0.6B \
  method.num_blocks=6 \
  data.train=deepmath.parquet \
  data.template_options.enable_thinking=false \
  data.overlong=drop \
  rollout.max_response_tokens=1024
