"""Trainable models: loading and saving, the policy with its views, critic, optimizer, sharding.

This folder owns the weights of a run. `policy` and `critic` train in this process, `parallel/` on
several ranks with FSDP2. `load/` reads and writes model folders, `passes/` computes forward and
backward passes, `kernels/` their parts on GPUs, `optimizers/` takes the steps. A method passes its
loss as an `Objective`; nothing here knows a loss by name.

May import `postgrad.types`, `postgrad.errors`, `postgrad.files`, `postgrad.config` and
`postgrad.algorithms`.
"""
