"""Conversations as training rows: token ids and a mask over the assistant's turns.

Used by SFT. The whole conversation is rendered and tokenized once. The row's prompt is the part
before the first trained turn, its response is the rest, and the mask selects the trained turns.
A plain text has no turns: every token that has one before it is trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from postgrad.data.overlong import drop_longer
from postgrad.data.prompt_checks import check_prompt_end, check_rendered
from postgrad.data.render import Prompts
from postgrad.data.rows.messages import is_trained
from postgrad.data.styles import OWN, styled
from postgrad.data.turns import RENDER_ERRORS, TurnNotFound
from postgrad.errors import ConfigError
from postgrad.problem import Conversation, Message, Problem, named

TRAIN_ON = ("all", "last")


@dataclass(frozen=True)
class ConversationRow:
    """A conversation as token ids.

    Attributes:
        prompt: ids before the first trained turn, truncated if data.overlong says so.
        response: ids from the first trained token to the last one.
        loss_mask: whether the loss reads each id of the response.
        num_prompt: number of prompt ids before truncation.
        is_rewritten: the template renders a trained turn, or the text before it, differently
            from what the model sees when it generates the turn.
    """

    prompt: list[int]
    response: list[int]
    loss_mask: list[bool]
    num_prompt: int
    is_rewritten: bool = False


def conversation_of(problem: Problem) -> Conversation | None:
    """The conversation to imitate: the row's own, or its prompt and first demonstration.

    It ends with its last trained message: those after it have the weight 0. None if all have it.
    """
    if problem.conversation is not None:
        return _without_untrained_end(problem.conversation)
    if not problem.demonstrations:
        return None
    reply = {"role": "assistant", "content": problem.demonstrations[0]}
    messages = (*problem.messages, reply)
    return Conversation(messages, problem.tools, num_prompt=len(problem.messages))


class ConversationRows:
    """Encodes the conversations of problems as training rows.

    Args:
        prompts: the tokenizer with its template, style and limits.
        train_on: `all` trains on every assistant turn, `last` on the last one. Turns of weight 0
            are never trained on.
    """

    def __init__(self, prompts: Prompts, train_on: str = "all") -> None:
        self.prompts = prompts
        self.train_on = train_on
        self._finder = prompts.turn_finder
        self._cache: dict[str, tuple[Conversation, ConversationRow]] = {}

    def row(self, problem: Problem) -> ConversationRow:
        """The training row of a problem.

        Raises:
            ConfigError: the problem has no response, or its conversation cannot be rendered.
        """
        conversation = conversation_of(problem)
        if conversation is None:
            raise ConfigError(f"{named(problem)} has no response to train on")
        cached = self._cache.get(problem.uid)
        # Rows of two data sets may have the same uid and different texts.
        if cached is None or cached[0] != conversation:
            cached = (conversation, self._encode(problem, conversation))
            self._cache[problem.uid] = cached
        return cached[1]

    def _encode(self, problem: Problem, conversation: Conversation) -> ConversationRow:
        if conversation.text:
            return self._encode_text(problem, conversation.text)
        if self._finder is None or self.prompts.style.opening:
            return self._encode_single_turn(problem, conversation)
        messages = conversation.messages
        num_prompt = conversation.num_prompt
        if self.prompts.style is not OWN:
            try:
                messages = (*styled(self.prompts.style, messages[:-1]), messages[-1])
            except ConfigError as error:
                raise ConfigError(f"{named(problem)}: {error}") from error
            num_prompt = len(messages) - 1
        assert self.prompts.chat_template is not None
        check_rendered(self.prompts.chat_template, problem, messages, conversation.tools)
        check_prompt_end(problem, messages[:num_prompt])
        try:
            return self._encode_turns(problem, messages, conversation.tools, num_prompt)
        except RENDER_ERRORS as error:
            roles = ", ".join(message["role"] for message in messages)
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{named(problem)}: the chat template refuses a conversation with roles "
                f"{roles} ({reason}); change the messages or use data.template=plain"
            ) from error
        except TurnNotFound as error:
            raise ConfigError(
                f"{named(problem)}: {error} is not found in what the chat template of "
                f"{self.prompts.tokenizer.name_or_path!r} renders; mark the assistant's text with "
                "{% generation %} in the template, or use data.template=plain"
            ) from error

    def _encode_turns(
        self,
        problem: Problem,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        num_prompt: int,
    ) -> ConversationRow:
        template = self.prompts.chat_template
        assert template is not None
        if template.has_generation_markers:
            ids, spans, is_rewritten = self._marked_spans(messages, tools, num_prompt)
        else:
            ids, spans, is_rewritten = self._located_spans(messages, tools, num_prompt)
        if not spans:
            raise TurnNotFound("an assistant turn")
        first = spans[0][0]
        end = spans[-1][1]
        if first == 0:
            raise ConfigError(
                f"{named(problem)}: its first token is trained on, so it has no prompt; "
                "start the conversation with a user message"
            )
        mask = [False] * end
        for start, stop in spans:
            mask[start:stop] = [True] * (stop - start)
        prompt = list(ids[:first])
        context = messages[: self._first_trained(messages, num_prompt)]
        truncated = self.prompts.truncate_prompt(problem.uid, context, prompt)
        return ConversationRow(truncated, ids[first:end], mask[first:], len(prompt), is_rewritten)

    def _first_trained(self, messages: Sequence[Message], num_prompt: int) -> int:
        """Index of the first message that is trained on."""
        return self._select(_assistant_indices(messages), messages, num_prompt)[0]

    def _select(
        self, items: Sequence[Any], messages: Sequence[Message], num_prompt: int
    ) -> list[Any]:
        """Of one item per assistant message, those of the messages that are trained on."""
        indices = _assistant_indices(messages)
        selected: list[Any] = []
        for index, item in zip(indices, items, strict=True):
            if index >= num_prompt and is_trained(messages[index]):
                selected.append(item)
        return selected if self.train_on == "all" else selected[-1:]

    def _located_spans(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], num_prompt: int
    ) -> tuple[list[int], list[tuple[int, int]], bool]:
        """(token ids, token spans of the trained turns, whether one was rewritten)."""
        assert self._finder is not None
        text = self._finder.render(messages, tools)
        turns = self._select(self._finder.find(text, messages, tools), messages, num_prompt)
        ids, offsets = self._tokenize(text)
        spans = [_token_span(offsets, turn.start, turn.end) for turn in turns]
        last = turns[-1]
        if last.message == len(messages) - 1 and not last.is_ended:
            # The template writes no end-of-turn token: EOS teaches the model to stop.
            start, end = spans[-1]
            ids = [*ids[:end], self.prompts.eos_token_id()]
            spans[-1] = (start, end + 1)
        return ids, spans, any(turn.is_rewritten for turn in turns)

    def _marked_spans(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], num_prompt: int
    ) -> tuple[list[int], list[tuple[int, int]], bool]:
        """As _located_spans, by the template's own {% generation %} markers."""
        template = self.prompts.chat_template
        assert template is not None
        ids, mask = template.generation_mask(messages, tools)
        spans = _runs(mask)
        indices = _assistant_indices(messages)
        if len(spans) != len(indices):
            raise TurnNotFound(f"one {{% generation %}} block per assistant message ({len(spans)})")
        selected = self._select(spans, messages, num_prompt)
        text = template.render(messages, tools)
        is_rewritten = False
        for index in self._select(indices, messages, num_prompt):
            through = template.render(messages[: index + 1], tools)
            is_rewritten = is_rewritten or not text.startswith(through.rstrip())
        return ids, selected, is_rewritten

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(token ids, characters [start, end) of each) of a rendered conversation."""
        tokenizer = self.prompts.tokenizer
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer {tokenizer.name_or_path!r} does not say which characters a token "
                "covers; use a fast tokenizer, or data.template=plain"
            )
        encoded = cast(Any, tokenizer(text, add_special_tokens=False, return_offsets_mapping=True))
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    def _encode_single_turn(self, problem: Problem, conversation: Conversation) -> ConversationRow:
        """The row without a chat template: the prompt, then the last message and EOS."""
        *before, last = conversation.messages
        indices = _assistant_indices(conversation.messages)
        if len(self._select(indices, conversation.messages, conversation.num_prompt)) > 1:
            raise ConfigError(
                f"{named(problem)} has several assistant turns, and its prompt uses no chat "
                "template, so only the last one can be trained on; "
                "set method.train_on=last, or use a model with a chat template"
            )
        if conversation.tools or any("tool_calls" in m for m in conversation.messages):
            raise ConfigError(
                f"{named(problem)} has tools or tool calls, which need a chat template; "
                "use a model that has one, or remove these rows"
            )
        end = self.prompts.decode_raw([self.prompts.eos_token_id()])
        if end in last["content"].removesuffix(end):
            raise ConfigError(
                f"{named(problem)}: its response goes on after the end-of-sequence token "
                f"{end}, where a response ends; remove the token, or give several turns as "
                "messages to a model with a chat template"
            )
        single = replace(
            problem,
            messages=tuple(before),
            demonstrations=(last["content"],),
            conversation=conversation,
        )
        prompt = self.prompts.encode(single)
        (response,) = self.prompts.encode_demonstrations(single)
        num_prompt = self.prompts.num_prompt_tokens(single)
        return ConversationRow(prompt, response, [True] * len(response), num_prompt)

    def _encode_text(self, problem: Problem, text: str) -> ConversationRow:
        """A plain text and EOS, without a chat template. The first token has nothing before it."""
        if self.prompts.style is not OWN:
            raise ConfigError(
                f"{named(problem)} is a plain text, which has no prompt for "
                "data.prompt_style; remove the setting"
            )
        if self.train_on != "all":
            raise ConfigError(
                f"{named(problem)} is a plain text, which has no turns for "
                f"method.train_on={self.train_on}; remove the setting"
            )
        ids = self.prompts.encode_plain(text)
        eos = self.prompts.eos_token_id()
        if ids[-1:] != [eos]:
            ids.append(eos)
        if len(ids) < 2:
            raise ConfigError(f"{named(problem)}: its text has no tokens; remove the row")
        return ConversationRow(ids[:1], ids[1:], [True] * (len(ids) - 1), 1)

    def encode(self, problem: Problem) -> list[int]:
        """The ids of the row's prompt; of a problem without a response, the ids of its prompt."""
        if conversation_of(problem) is None:
            return self.prompts.encode(problem)
        return self.row(problem).prompt

    def num_truncated(self, problems: Sequence[Problem]) -> int:
        """How many of the problems have a truncated prompt."""
        count = 0
        for problem in problems:
            if conversation_of(problem) is None:
                count += self.prompts.num_truncated([problem])
            else:
                row = self.row(problem)
                count += len(row.prompt) < row.num_prompt
        return count

    def num_rewritten(self, problems: Sequence[Problem]) -> int:
        """How many conversations have a trained turn that the template renders differently.

        The template renders it differently in the whole conversation than for generation, for
        example without its thinking.
        """
        with_response = [problem for problem in problems if conversation_of(problem)]
        return sum(self.row(problem).is_rewritten for problem in with_response)

    def num_texts(self, problems: Sequence[Problem]) -> int:
        """How many of the problems are plain texts."""
        return sum(bool(one.conversation and one.conversation.text) for one in problems)

    def drop_overlong(self, problems: Sequence[Problem]) -> tuple[list[Problem], int]:
        """As Prompts.drop_overlong, for the prompts of the rows."""
        limit = self.prompts.max_prompt_tokens
        lengths = [len(self.encode(problem)) for problem in problems]
        key = "data.max_prompt_tokens"
        return drop_longer(problems, lengths, "prompts", key, limit, self.prompts.overlong)

    def drop_overlong_demonstrations(
        self, problems: Sequence[Problem], limit: int
    ) -> tuple[list[Problem], int]:
        """As Prompts.drop_overlong_demonstrations, for the responses of the rows.

        A response runs from the first trained turn to the last, with all messages between them.
        """
        lengths = [self.response_length(problem) for problem in problems]
        key = "rollout.max_response_tokens"
        return drop_longer(problems, lengths, "demonstrations", key, limit, self.prompts.overlong)

    def response_length(self, problem: Problem) -> int:
        """Tokens from the first trained turn to the last; 0 if the problem has no response."""
        return len(self.row(problem).response) if conversation_of(problem) else 0


def _without_untrained_end(conversation: Conversation) -> Conversation | None:
    """The conversation up to its last trained message; None if it has none."""
    if conversation.text:
        return conversation
    messages = conversation.messages
    for end in range(len(messages), conversation.num_prompt, -1):
        if is_trained(messages[end - 1]):
            is_whole = end == len(messages)
            return conversation if is_whole else replace(conversation, messages=messages[:end])
    return None


def _assistant_indices(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _token_span(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """The tokens that overlap the characters [start, end)."""
    tokens = [i for i, (a, b) in enumerate(offsets) if a < end and b > start and a < b]
    if not tokens:
        raise TurnNotFound(f"the text of characters {start} to {end}")
    return tokens[0], tokens[-1] + 1


def _runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """[start, end) of each run of True."""
    runs: list[tuple[int, int]] = []
    start = None
    for i, flag in enumerate([*mask, False]):
        if flag and start is None:
            start = i
        elif not flag and start is not None:
            runs.append((start, i))
            start = None
    return runs
