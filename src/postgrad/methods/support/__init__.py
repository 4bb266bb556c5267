"""Code that several methods share. Nothing here is a method by itself.

    checks                settings that are refused before a run writes anything
    grpo_settings         settings of GRPO's family, and their checks
    policy_objective      the loss of GRPO and of the methods that extend it
    declarations          losses and advantages by name or path
    advantage_columns     the columns that advantages read
    correction            importance weights for an engine with its own weights
    responses             the rows that responses become, and their scores
    dynamic_sampling      DAPO's replacement of groups without signal
    mixed_policy          groups with tokens of others: the base of LUFFY and ExGRPO
    replay_pool           ExGRPO's stored responses
    thinking              responses with a thought before the output: the base of Classmate-CoT
    pairs                 responses of the data: the base of DPO, KTO and reward models
    judging               language models as judge and monitor

May import what methods may import.
"""
