"""The token ids of a conversation that a reward model scores."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from postgrad.data.overlong import drop_longer
from postgrad.data.render import Prompts
from postgrad.data.styles import styled
from postgrad.problem import Problem


def conversation_ids(prompts: Prompts, problem: Problem, response: str) -> list[int]:
    """The problem's messages and the response as the chat template writes them, as token ids.

    Without a chat template: the prompt, the response and EOS. Padding tokens at the end are
    removed, because transformers reads the score at the last token that is not padding.
    """
    if prompts.chat_template is None:
        ids = [*prompts.encode(problem), *prompts.encode_response(response)]
    else:
        messages = styled(prompts.style, problem.messages)
        reply = {"role": "assistant", "content": response}
        text = prompts.chat_template.render([*messages, reply])
        ids = list(cast(Any, prompts.tokenizer(text, add_special_tokens=False))["input_ids"])
    tokenizer = prompts.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    while len(ids) > 1 and ids[-1] == pad:
        ids.pop()
    return ids


def stepwise_ids(
    prompts: Prompts, problem: Problem, steps: Sequence[str], separator: str
) -> tuple[list[int], list[int]]:
    """The prompt and the steps as token ids, and for each step the number of ids up to its end.

    Each step and the separator after it are tokenized alone, so a step's ids do not depend on its
    neighbors.
    """
    ids = list(prompts.encode(problem))
    ends: list[int] = []
    for step in steps:
        ids += prompts.encode_response(step, with_end=False)
        ids += prompts.encode_response(separator, with_end=False)
        ends.append(len(ids))
    return ids, ends


class StepRows:
    """Encodes prompts as Prompts does, and drops problems whose steps are too long.

    Args:
        prompts: encodes prompts and steps.
        steps_of: returns the steps of a problem.
        separator: the text after each step.
    """

    def __init__(
        self, prompts: Prompts, steps_of: Callable[[Problem], Sequence[str]], separator: str
    ) -> None:
        self.prompts = prompts
        self.steps_of = steps_of
        self.separator = separator

    def encode(self, problem: Problem) -> list[int]:
        return self.prompts.encode(problem)

    def num_truncated(self, problems: Sequence[Problem]) -> int:
        return self.prompts.num_truncated(problems)

    def drop_overlong(self, problems: Sequence[Problem]) -> tuple[list[Problem], int]:
        return self.prompts.drop_overlong(problems)

    def drop_overlong_demonstrations(
        self, problems: Sequence[Problem], limit: int
    ) -> tuple[list[Problem], int]:
        """As Prompts.drop_overlong_demonstrations, for the steps and their separators."""
        lengths = [self._response_length(problem) for problem in problems]
        key = "rollout.max_response_tokens"
        return drop_longer(problems, lengths, "steps", key, limit, self.prompts.overlong)

    def _response_length(self, problem: Problem) -> int:
        ids, _ = stepwise_ids(self.prompts, problem, self.steps_of(problem), self.separator)
        return len(ids) - len(self.encode(problem))
