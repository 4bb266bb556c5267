#!/usr/bin/env bash
# GRPO on one-digit addition with a model made in code: the smallest run, for a test of the installation.
# Hardware: a CPU.
set -euo pipefail

postgrad train grpo \
  model.path=tiny \
  data.train=arithmetic:1 \
  data.template=plain \
  rollout.max_response_tokens=4 \
  training.steps=2 \
  training.problems_per_step=4 \
  name=example-tiny
