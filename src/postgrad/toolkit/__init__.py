"""Functions of the CS336 alignment assignment, with its names, arguments and padded shapes.

They are for scripts and notebooks; the rest of the package does not use them. Each one calls
the code that training uses: postgrad.algorithms for arithmetic, postgrad.verifiers for
parsing, postgrad.data for tokens. Tensors are padded, (rows, positions).
May import algorithms, model, verifiers and data.

    sequences     prompt + output as tensors, entropy, log-probs, masked sums and means
    steps         group-normalized rewards, policy-gradient losses, SFT and GRPO micro-batch steps
    rewards       the r1-zero reward and the question-only reward
    generations   sampled responses with rewards, entropies and lengths
    supplement    packed SFT data, MMLU and GSM8K parsing, the DPO loss of one pair
"""

from postgrad.algorithms.masked import masked_mean, masked_normalize
from postgrad.toolkit.generations import log_generations
from postgrad.toolkit.rewards import question_only_reward_fn, r1_zero_reward_fn
from postgrad.toolkit.sequences import (
    compute_entropy,
    get_response_log_probs,
    selective_log_softmax,
    tokenize_prompt_and_output,
)
from postgrad.toolkit.steps import (
    compute_group_normalized_rewards,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    grpo_microbatch_train_step,
    sft_microbatch_train_step,
)
from postgrad.toolkit.supplement import (
    PackedSftDataset,
    compute_per_instance_dpo_loss,
    get_packed_sft_dataset,
    iterate_batches,
    parse_gsm8k_response,
    parse_mmlu_response,
)

__all__ = [
    "PackedSftDataset",
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_per_instance_dpo_loss",
    "compute_policy_gradient_loss",
    "get_packed_sft_dataset",
    "get_response_log_probs",
    "grpo_microbatch_train_step",
    "iterate_batches",
    "log_generations",
    "masked_mean",
    "masked_normalize",
    "parse_gsm8k_response",
    "parse_mmlu_response",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
    "selective_log_softmax",
    "sft_microbatch_train_step",
    "tokenize_prompt_and_output",
]
