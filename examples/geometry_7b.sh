#!/usr/bin/env bash
# verl's GRPO run on Geometry3K, Qwen2.5-VL-7B-Instruct, on the files of verl's geo3k.py (GEO3K=folder).
# Hardware: 8 GPUs. Not measured.
set -euo pipefail

postgrad train verl_grpo \
  model.path=Qwen/Qwen2.5-VL-7B-Instruct \
  model.vision=trained \
  data.train="$GEO3K/train.parquet" \
  data.validation="$GEO3K/test.parquet" \
  data.max_prompt_tokens=1024 \
  method.kl_coef=0.01 \
  reward.verifier=math \
  rollout.max_response_tokens=2048 \
  training.problems_per_step=512 \
  training.steps=60 \
  model.activation_checkpointing=true \
  cluster=ray \
  cluster.workers=8
