"""The token ids of conversations that a reward model scores, and which of them are too long."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from postgrad.data.overlong import drop_longer
from postgrad.data.render import Prompts
from postgrad.data.replies import tools_of
from postgrad.data.styles import styled
from postgrad.errors import ConfigError
from postgrad.problem import Problem, named


def conversation_ids(prompts: Prompts, problem: Problem, response: str) -> list[int]:
    """The problem's messages and the response as the chat template writes them, as token ids.

    Without a chat template: the prompt, the response and EOS. Padding tokens at the end are
    removed, because transformers reads the score at the last token that is not padding.
    """
    if prompts.chat_template is None:
        ids = [*prompts.encode(problem), *prompts.encode_reply(problem, response)]
    else:
        messages = styled(prompts.style, problem.messages)
        reply = {"role": "assistant", "content": response}
        text = prompts.chat_template.render([*messages, reply], tools_of(problem))
        ids = list(cast(Any, prompts.tokenizer(text, add_special_tokens=False))["input_ids"])
    tokenizer = prompts.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    while len(ids) > 1 and ids[-1] == pad:
        ids.pop()
    return ids


def split_conversation(
    prompts: Prompts, problem: Problem, response: str
) -> tuple[list[int], list[int]]:
    """The ids of `conversation_ids` as prompt and response.

    The response starts where the ids differ from the prompt's, and ends with what the chat
    template writes after it. Raises ConfigError if the prompt is truncated: the score is that of
    the whole conversation.
    """
    if prompts.num_truncated([problem]):
        raise ConfigError(
            f"{named(problem)}: data.overlong={prompts.overlong} would truncate its prompt, "
            "and a reward model scores whole conversations; raise data.max_prompt_tokens (now "
            f"{prompts.max_prompt_tokens}) or use data.overlong=drop"
        )
    ids = conversation_ids(prompts, problem, response)
    prompt = prompts.encode(problem)
    start = 0
    while start < min(len(ids) - 1, len(prompt)) and ids[start] == prompt[start]:
        start += 1
    start = max(1, start)
    return ids[:start], ids[start:]


class ScoredRows:
    """Encodes prompts as Prompts does, and drops problems whose scored tokens are too many.

    Args:
        prompts: encodes prompts.
        what: what is measured, for the error message.
        count_tokens: returns the tokens of a problem's row after its prompt.
    """

    def __init__(self, prompts: Prompts, what: str, count_tokens: Callable[[Problem], int]) -> None:
        self.prompts = prompts
        self.what = what
        self.count_tokens = count_tokens

    def encode(self, problem: Problem) -> list[int]:
        return self.prompts.encode(problem)

    def response_length(self, problem: Problem) -> int:
        return self.count_tokens(problem)

    def num_truncated(self, problems: Sequence[Problem]) -> int:
        return self.prompts.num_truncated(problems)

    def drop_overlong(self, problems: Sequence[Problem]) -> tuple[list[Problem], int]:
        return self.prompts.drop_overlong(problems)

    def drop_overlong_demonstrations(
        self, problems: Sequence[Problem], limit: int
    ) -> tuple[list[Problem], int]:
        """As Prompts.drop_overlong_demonstrations, for the tokens that `count_tokens` counts."""
        lengths = [self.response_length(problem) for problem in problems]
        key = "rollout.max_response_tokens"
        return drop_longer(problems, lengths, self.what, key, limit, self.prompts.overlong)
