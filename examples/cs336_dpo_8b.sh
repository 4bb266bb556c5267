#!/usr/bin/env bash
# DPO of CS336's supplement on HH-RLHF, from an instruction-tuned Llama-3.1-8B (MODEL=folder).
# Hardware: 8 GPUs. Never run on 8 GPUs here.
set -euo pipefail

postgrad data prepare hh_rlhf out=hh-train.parquet
postgrad data prepare hh_rlhf split=test out=hh-test.parquet
postgrad train cs336_dpo \
  model.path="$MODEL" \
  data.train=hh-train.parquet \
  data.validation=hh-test.parquet \
  data.overlong=drop \
  cluster=ray \
  cluster.workers=8
