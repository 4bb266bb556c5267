#!/usr/bin/env bash
# Classmate-CoT's main sycophancy run: Qwen3-0.6B, with a judge on a server (JUDGE=http://host:8000/v1#model).
# Hardware: one GPU and the judge's server. Not measured.
set -euo pipefail

postgrad data prepare helpful_instructions out=helpful-train.parquet
postgrad train classmate_gdpo \
  model.path=Qwen/Qwen3-0.6B \
  data.train=helpful-train.parquet \
  reward.judge.model="$JUDGE"
