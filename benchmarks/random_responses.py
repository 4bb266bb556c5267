"""GRPO on responses of random tokens, so that speed.py can train on long rows without sampling."""

import random
from collections.abc import Sequence

from postgrad.methods.grpo import Grpo
from postgrad.methods.step import Group, Step
from postgrad.rollout.engine import Completion
from postgrad.types import Batch

LARGEST_ID = 500  # every tokenizer of speed.py has these


class RandomResponses(Grpo):
    """GRPO whose responses have the full length; their log-probs are the policy's.

    Those of the first step are short: it only makes the optimizer's state.
    """

    def sample(self, groups: Sequence[Group], step: Step) -> Batch:
        """Return random tokens, scored by the policy in the engine's place."""
        rng = random.Random(step.number)
        num_tokens = 8 if step.number == 1 else self.config.rollout.max_response_tokens

        def respond() -> Completion:
            tokens = [rng.randint(2, LARGEST_ID) for _ in range(num_tokens)]
            return Completion(tokens, [0.0] * num_tokens, finish="length")

        batch = self.assemble(groups, [[respond() for _ in group.indices] for group in groups])
        batch.tokens["behavior_logprobs"] = self.ports.policy.logprobs(batch)["logprobs"]
        return batch
