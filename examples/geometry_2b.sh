#!/usr/bin/env bash
# GRPO on geometry problems with a picture each (Geometry3K), Qwen3-VL-2B-Instruct.
# Hardware: one GPU. Not measured.
set -euo pipefail

postgrad train grpo \
  model.path=Qwen/Qwen3-VL-2B-Instruct \
  data.train=hub:hiyouga/geometry3k:train \
  data.validation=hub:hiyouga/geometry3k:test \
  data.prompt_style=boxed \
  data.max_prompt_tokens=1024 \
  data.overlong=drop \
  reward.verifier=math \
  rollout.max_response_tokens=1024 \
  training.problems_per_step=32 \
  training.validate_every=20
