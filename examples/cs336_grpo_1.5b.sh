#!/usr/bin/env bash
# GRPO of CS336's handout: Qwen2.5-Math-1.5B on MATH.
# Hardware: one GPU. Not measured.
set -euo pipefail

postgrad data prepare competition_math out=math-train.parquet
postgrad data prepare competition_math split=eval out=math-eval.parquet
postgrad train cs336_grpo \
  model.path=Qwen/Qwen2.5-Math-1.5B \
  data.train=math-train.parquet \
  data.validation=math-eval.parquet
