"""Finds the text of each assistant turn in a conversation that the chat template rendered at once.

The conversation is rendered as a whole, and only this text is tokenized. A turn is found in it

1. by prefixes: the text up to the turn is what the template renders for the messages before it,
   with the assistant's turn opened; or, if the template renders a turn differently once later
   messages follow (Qwen3 removes the thinking of earlier turns),
2. by a placeholder: the whole conversation is rendered again with a placeholder as the content of
   the turn, which shows where the turn starts.

A turn ends with the special token that the template writes after it. A token that the template
writes only at the end of a conversation (Phi-3's `<|endoftext|>`) belongs to no turn.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from postgrad.data.encode.styles import THINK, without_opening
from postgrad.data.encode.template import ChatTemplate
from postgrad.data.rows.messages import reasoning_field
from postgrad.problem import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "postgradplaceholder"
# What a template raises for messages that it does not support, such as a null content.
RENDER_ERRORS = (TemplateError, TypeError, ValueError, KeyError)


class TurnNotFound(Exception):
    """An assistant turn could not be located in the rendered conversation."""


@dataclass(frozen=True)
class Turn:
    """The characters [start, end) of one assistant message in the rendered conversation.

    Attributes:
        message: index of the message.
        start: first character that the model writes, after the header of the turn.
        end: end of the turn (exclusive), after its end-of-turn token.
        is_ended: the turn ends with a special token.
        is_rewritten: the text up to the end of this turn is not what the template renders when
            the model generates the turn.
    """

    message: int
    start: int
    end: int
    is_ended: bool
    is_rewritten: bool


class TurnFinder:
    """Renders whole conversations and finds their assistant turns.

    Args:
        template: the chat template.
        special_tokens: texts of the tokenizer's special tokens.
    """

    def __init__(self, template: ChatTemplate, special_tokens: Sequence[str]) -> None:
        self.template = template
        self.special_tokens = [token for token in special_tokens if token]
        self._header: str | None = None
        self._closing: str | None = None

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        """Return the text of a whole conversation.

        Some templates drop the thinking even of the last assistant message (DeepSeek-R1). Its text
        is then the generation prompt followed by the content as it is.
        """
        text = self.template.render(messages, tools)
        last = messages[-1]
        content = last["content"]
        if last["role"] != "assistant" or "tool_calls" in last or not content:
            return text
        if content.strip() in text or _squeeze(content) in _squeeze(text):
            return text
        prompt = self.template.render(messages[:-1], tools, add_generation_prompt=True)
        end = self._end_token(self._without_closing(text))
        return prompt + without_opening(prompt, content) + end

    def reply_text(
        self, prompt: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[str, bool]:
        """Return (what the model writes after a prompt, whether it has an end-of-turn token).

        That is the last message as the template renders it. If the rendered conversation does not
        start with the prompt, it is the message's content.

        Args:
            prompt: the text of all messages but the last, with the assistant's turn opened.
            messages: the messages, with the reply as the last one.
            tools: schemas that the prompt shows.

        Raises:
            TurnNotFound: the content alone would leave out the message's thinking.
        """
        rendered = self._without_closing(self.render(messages, tools))
        end = self._end_token(rendered)
        text = str(messages[-1]["content"])
        if rendered.startswith(prompt):
            text = rendered[len(prompt) :].removesuffix(end)
        elif field := reasoning_field(messages[-1:]):
            raise TurnNotFound(f"{field} of the response")
        elif prompt.rstrip().endswith(THINK.strip()):
            end = ""  # as in a style that opens the thought: EOS ends the response
        text = without_opening(prompt, text)
        return text.removesuffix(end) + end, bool(end)

    def turns(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[str, list[Turn]]:
        """Return (the rendered conversation, its assistant turns in order).

        Raises:
            TurnNotFound: the template writes a turn in a way that cannot be located.
        """
        if self.template.has_generation_markers:
            text = self.template.render(messages, tools)
            return text, self._marked_turns(text, messages, tools)
        text = self.render(messages, tools)
        turns: list[Turn] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            turn = self._find_by_prefix(text, messages, tools, i)
            if turn is None:
                turn = self._find_by_placeholder(text, messages, tools, i)
            previous_end = turns[-1].end if turns else 0
            if not previous_end <= turn.start < turn.end <= len(text):
                raise TurnNotFound(f"message {i + 1}")
            turns.append(turn)
        return text, turns

    def _marked_turns(
        self, text: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[Turn]:
        """Return the turns by the template's {% generation %} markers, which say where one ends."""
        spans = self.template.generation_spans(messages, tools)
        indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(indices):
            raise TurnNotFound(f"one {{% generation %}} block per assistant message ({len(spans)})")
        turns: list[Turn] = []
        for i, (start, end) in zip(indices, spans, strict=True):
            through = self.template.render(messages[: i + 1], tools).rstrip()
            turns.append(Turn(i, start, end, True, not text.startswith(through)))
        return turns

    def _find_by_prefix(
        self, text: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]], i: int
    ) -> Turn | None:
        try:
            before = self.template.render(messages[:i], tools, add_generation_prompt=True)
            through = self._without_closing(self.render(messages[: i + 1], tools))
        except RENDER_ERRORS:
            return None
        if not (text.startswith(before) and text.startswith(through)):
            return None
        if len(through) <= len(before):
            return None
        return Turn(i, len(before), len(through), bool(self._end_token(through)), False)

    def _find_by_placeholder(
        self, text: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]], i: int
    ) -> Turn:
        prefix, suffix = self._around_placeholder(text, messages, tools, i)
        start = self._start_of_turn(text, prefix)
        if start is None:
            raise TurnNotFound(f"message {i + 1}")
        end_token = self._end_token_of_turn(messages[: i + 1], tools)
        if end_token:
            end = text.find(end_token, start)
            if end >= 0:
                return Turn(i, start, end + len(end_token), True, True)
        if "tool_calls" not in messages[i] and text.endswith(suffix):
            return Turn(i, start, len(text) - len(suffix), False, True)
        raise TurnNotFound(f"message {i + 1}")

    def _around_placeholder(
        self, text: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]], i: int
    ) -> tuple[str, str]:
        """Return the text before and after a placeholder in message i of the whole conversation."""
        placeholder = PLACEHOLDER
        while placeholder in text:
            placeholder += "x"
        for changed in _with_placeholder(messages[i], placeholder):
            try:
                rendered = self.render([*messages[:i], changed, *messages[i + 1 :]], tools)
            except RENDER_ERRORS:  # a template may refuse the placeholder; the next one is tried
                continue
            if rendered.count(placeholder) == 1:
                prefix, _, suffix = rendered.partition(placeholder)
                return prefix, suffix
        raise TurnNotFound(f"message {i + 1}")

    def _start_of_turn(self, text: str, prefix: str) -> int | None:
        """Where the turn starts in the text, given the text before the placeholder.

        The prefix ends with the turn's header, and perhaps with text that the template writes
        before the content, such as an empty thinking block.
        """
        header = self._generation_header()
        header_at = prefix.rfind(header) if header else -1
        if header_at >= 0 and text.startswith(prefix[: header_at + len(header)]):
            return header_at + len(header)
        if text.startswith(prefix):
            return len(prefix)
        if header_at >= 0 and text.startswith(prefix[:header_at]):
            # The header of a generation prompt may hold more, such as an empty thinking block.
            return header_at + _common_length(text[header_at:], header)
        return None

    def _generation_header(self) -> str:
        """Return the text that opens an assistant turn: `<|im_start|>assistant\\n` in ChatML."""
        if self._header is None:
            closed, opened = self._question_closed_and_opened()
            closed = closed.removesuffix(self._closing_token())
            self._header = opened[len(closed) :] if opened.startswith(closed) else ""
        return self._header

    def _end_token_of_turn(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> str:
        """Return the special token after the last message if the conversation ends there.

        "" if none.
        """
        try:
            return self._end_token(self._without_closing(self.render(messages, tools)))
        except RENDER_ERRORS:
            return ""

    def _without_closing(self, text: str) -> str:
        """Return a rendered conversation up to its last turn's end, without white space there."""
        text = text.rstrip()
        return text.removesuffix(self._closing_token()).rstrip()

    def _closing_token(self) -> str:
        """Return the special token that ends a conversation instead of opening a turn.

        "" if none.
        """
        if self._closing is None:
            closed, opened = self._question_closed_and_opened()
            token = self._end_token(closed.rstrip())
            rest = closed.rstrip().removesuffix(token)
            is_extra = not opened.startswith(closed.rstrip()) and opened.startswith(rest)
            self._closing = token if is_extra else ""
        return self._closing

    def _question_closed_and_opened(self) -> tuple[str, str]:
        """Return a question as a whole conversation, and with the assistant's turn opened."""
        user = [{"role": "user", "content": "?"}]
        try:
            closed = self.template.render(user)
            return closed, self.template.render(user, add_generation_prompt=True)
        except RENDER_ERRORS:
            return "", ""

    def _end_token(self, text: str) -> str:
        """Return the special token at the end of a text.

        The longest, if several match; "" if none.
        """
        matches = [token for token in self.special_tokens if text.endswith(token)]
        return max(matches, key=len, default="")


def special_texts(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return the texts of all special tokens of a tokenizer, sorted."""
    special = {str(token) for token in tokenizer.all_special_tokens}
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            special.add(str(token.content))
    return sorted(special)


def _with_placeholder(message: Message, placeholder: str) -> list[Message]:
    """Copy of a message with a placeholder in its content, or in the name of its first call."""
    variants = [{**message, "content": placeholder}]
    if "tool_calls" in message:
        first, *others = message["tool_calls"]
        call = {**first, "name": placeholder}
        if "function" in first:
            call = {**first, "function": {**first["function"], "name": placeholder}}
        variants.append({**message, "tool_calls": [call, *others]})
    return variants


def _common_length(first: str, second: str) -> int:
    """Length of the common prefix of two texts."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def _squeeze(text: str) -> str:
    """Return the text without white space: templates trim contents and thinking blocks."""
    return re.sub(r"\s+", "", text)
