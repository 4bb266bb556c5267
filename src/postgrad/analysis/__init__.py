"""Analysis of a model's hidden states: the entropy of its internal policies.

Owns `postgrad analyze entropy`. May import evaluation, rollout, model, data and config.

    settings   the settings of the command
    data       the token ids to analyze: stored rollouts, stored evaluations, or new samples
    entropy    entropies at each block, per layer statistics, the boundary layer
    figures    the five figures
    run        the command, from settings to output folder
"""
