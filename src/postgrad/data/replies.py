"""Responses that the data give, as token ids after their prompt."""

from typing import Any, Protocol

from postgrad.data.prompt_checks import check_no_reasoning, check_rendered
from postgrad.data.styles import Style, styled, without_opening
from postgrad.data.turns import RENDER_ERRORS, TurnFinder, TurnNotFound
from postgrad.errors import ConfigError
from postgrad.problem import Message, Problem, named

# Texts that a response is tokenized after, if a token would cover the prompt's end and its start.
NEUTRAL = ("\n", "a", "1", "=")


def tools_of(problem: Problem) -> tuple[dict[str, Any], ...]:
    """The JSON schemas of a problem's row, which its prompt shows."""
    return problem.conversation.tools if problem.conversation else problem.tools


class PromptTexts(Protocol):
    """The part of render.Prompts that responses need."""

    style: Style
    turn_finder: TurnFinder | None

    def text(self, problem: Problem) -> str: ...

    def tokenize(self, text: str, special: bool) -> list[int]: ...

    def eos_token_id(self) -> int: ...


class Replies:
    """Encodes responses; see Prompts.encode_reply."""

    def __init__(self, prompts: PromptTexts) -> None:
        self.prompts = prompts
        # (uid, text of a response) -> (messages, ids of the response)
        self._cache: dict[tuple[str, str], tuple[tuple[Message, ...], list[int]]] = {}

    def encode(self, problem: Problem, text: str) -> list[int]:
        """The token ids of a response to a problem."""
        key = (problem.uid, text)
        messages, ids = self._cache.get(key, (None, []))
        # Rows of two data sets may have the same uid and different prompts.
        if messages != problem.messages:
            ids = self._encode(problem, text)
            self._cache[key] = (problem.messages, ids)
        return list(ids)

    def _encode(self, problem: Problem, text: str) -> list[int]:
        prompts = self.prompts
        prompt = prompts.text(problem)
        reply = _reply_message(problem, text)
        is_ended = False
        if prompts.turn_finder is None or prompts.style.opening:
            check_no_reasoning(problem, [reply])
            written = without_opening(prompt, text)
        else:
            written, is_ended = self._render(prompts.turn_finder, problem, prompt, reply)
        ids = self._encode_after(prompt, written)
        if is_ended:
            return ids
        eos = prompts.eos_token_id()
        return ids if ids[-1:] == [eos] else [*ids, eos]

    def _render(
        self, finder: TurnFinder, problem: Problem, prompt: str, reply: Message
    ) -> tuple[str, bool]:
        """(what the template writes after the prompt, whether its end-of-turn token is in it)."""
        template = finder.template
        messages = template.prompt_messages(styled(self.prompts.style, problem.messages))
        check_rendered(template, problem, [reply], ())
        try:
            return finder.reply_text(
                prompt, [*messages, reply], template.tools or tools_of(problem)
            )
        except RENDER_ERRORS as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{named(problem)}: the chat template refuses its response ({reason}); "
                "change the messages or use data.template=plain"
            ) from error
        except TurnNotFound as error:
            raise ConfigError(
                f"{named(problem)}: {error} is not found in what the chat template renders; "
                "write it in the content, as <think>...</think>"
            ) from error

    def _encode_after(self, before: str, text: str) -> list[int]:
        """The ids of a text that follows another one, whose ids stay what they are alone.

        Tokenizers of SentencePiece start each text with a space. So both texts are tokenized at
        once. Where a token would cover the end of one and the start of the other, a neutral text
        takes the place of the first.
        """
        tokenize = self.prompts.tokenize
        for context in (before, *NEUTRAL):
            start = tokenize(context, special=False)
            ids = tokenize(context + text, special=False)
            if ids[: len(start)] == start:
                return ids[len(start) :]
        return tokenize(text, special=False)


def _reply_message(problem: Problem, text: str) -> Message:
    """The assistant message with this text: that of the conversation, if it is its last one."""
    if problem.conversation is not None and problem.conversation.messages:
        last = problem.conversation.messages[-1]
        if last["content"] == text:
            return last
    return {"role": "assistant", "content": text}
