#!/usr/bin/env bash
# ExGRPO's run_exgrpo.sh: Qwen2.5-Math-7B with a 16k context, OpenR1-Math 46k.
# Hardware: 8 GPUs. Never run on 8 GPUs here.
set -euo pipefail

postgrad data prepare openr1-math tokenizer=Elliott/Qwen2.5-Math-7B-16k-think out=openr1-math.parquet
postgrad train exgrpo \
  model.path=Elliott/Qwen2.5-Math-7B-16k-think \
  data.train=openr1-math.parquet \
  model.activation_checkpointing=true \
  cluster=ray \
  cluster.workers=8
