"""The mathematics of training: pure functions over flat tensors.

Owns formulas only. Anything with state, settings or models belongs to methods/. May import torch,
postgrad.types and postgrad.errors, and nothing else of the package. Every function is tested with
hand-computed numbers, and every formula with a mutation that makes those tests fail.

Columns are flat and never padded. `rows` (tokens,) is the row of each token, `num_rows` the number
of rows, `mask` (tokens,) the tokens that the loss may use, `groups` (rows,) the group of each row:
rows with the same problem.

    advantages            one number per row: grpo and its family; the table ADVANTAGES
    token_advantages      one number per token: gae, reinforce_pp, remax, optimal token baselines
    classmate_advantages  two rewards on two sets of tokens
    classmate_rewards     from the classmates' scores to one reward per row
    losses                one number per token: ppo_clip and its family; the table LOSSES
    aggregation           from token losses to one number, with global denominators
    covariance            the tokens that clip_cov and kl_cov select
    kl, value, preference, supervised, distillation, correction, shaping, prefixes, replay, entropy,
    passk
    groups, masked        helpers of the others
"""
