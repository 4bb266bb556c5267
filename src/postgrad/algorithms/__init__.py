"""The mathematics: advantages, losses, aggregation, KL, corrections, as pure functions over flat columns.

Imports torch and nothing of ours but types and errors. Every function has hand-computed numbers in its tests, and every formula a
mutation that makes them fail.

Columns are flat: `rows` (tokens,) says which row each token belongs to, `num_rows` how many rows there are, `mask` (tokens,) which
tokens the loss may see, `groups` (rows,) which rows answer the same problem. Nothing is padded.

    advantages            one number a row: grpo and its family; the table ADVANTAGES and its one rule for odd groups
    token_advantages      one number a token: gae, reinforce_pp, remax, optimal token baselines; outcome_rewards
    classmate_advantages  two rewards on two sets of tokens
    losses                one number a token: ppo_clip and its family; the table LOSSES
    aggregation           from token losses to one number, with global denominators
    kl, value, preference, correction, shaping, entropy, passk
    groups, masked        what the others are made of
"""
