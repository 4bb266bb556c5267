"""Encodes problems as token ids and decodes token ids as text.

This file and chat_template.py are the only ones that know chat templates and special tokens.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from postgrad.config.schema import TRUNCATION_SIDES, DataConfig
from postgrad.data.chat_template import ChatTemplate
from postgrad.data.overlong import drop_longer
from postgrad.data.prompt_checks import (
    check_names,
    check_no_chat_settings,
    check_no_reasoning,
    check_prompt_end,
    check_rendered,
    check_text_style,
)
from postgrad.data.replies import Replies, tools_of
from postgrad.data.styles import find_style, styled
from postgrad.data.truncate import min_limit, truncate
from postgrad.data.turns import TurnFinder, special_texts
from postgrad.errors import ConfigError, RunError
from postgrad.files import atomic_write_text
from postgrad.problem import Message, Problem, named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_prompts(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    tools: Sequence[dict[str, Any]] = (),
    may_be_empty: bool = False,
) -> "Prompts":
    """The Prompts of a configuration. Training and evaluation both use it: same prompts in both."""
    return Prompts(
        tokenizer,
        template=data.template,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong,
        style=data.prompt_style,
        options=data.template_options,
        tools=tools,
        may_be_empty=may_be_empty,
    )


class Prompts:
    """Turns problems into prompt token ids.

    Args:
        tokenizer: a transformers tokenizer.
        template: `chat` renders with the tokenizer's chat template and opens the assistant's turn;
            `plain` joins the contents with blank lines; `auto` is `chat` if the tokenizer has a
            chat template, else `plain`.
        max_prompt_tokens: longest prompt.
        overlong: what happens to longer prompts. `drop_overlong` refuses (`error`) or drops them
            (`drop`); `encode` truncates them on the `left`, in the `middle` or on the `right`.
        style: a name of styles.STYLES, or a .txt file with {question} in it. A style that writes
            the whole prompt uses no chat template.
        options: values that the chat template reads by name, e.g. {"enable_thinking": False}.
        tools: JSON schemas of the tools that the model may call. A template that does not read
            `tools` gets them in the system message.
        may_be_empty: a problem without text has no tokens instead of an error, because an
            environment adds the text of its reset.
        checks_messages: whether messages that the template would lose, and prompts that end in an
            assistant message, are errors. Clients of a server may send both.

    Raises:
        ConfigError: unknown template, overlong, style or option; `chat` without a chat template.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template: str = "auto",
        max_prompt_tokens: int = 512,
        overlong: str = "error",
        style: str = "own",
        options: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
        may_be_empty: bool = False,
        checks_messages: bool = True,
    ) -> None:
        check_names(tokenizer, template, overlong)
        self.tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong = overlong
        self.style = find_style(style)
        self.is_plain_by_default = False  # nobody chose plain text
        if self.style.text:
            check_text_style(tokenizer, style, self.style.form, template)
            template = "plain"
        elif template == "auto":
            template = "chat" if tokenizer.chat_template else "plain"
            self.is_plain_by_default = template == "plain"
        self.template = template
        self.tools = list(tools)
        self.may_be_empty = may_be_empty
        self.checks_messages = checks_messages
        self.chat_template: ChatTemplate | None = None
        self.turn_finder: TurnFinder | None = None
        if template == "chat":
            self.chat_template = ChatTemplate(
                tokenizer, options or {}, self.tools, self.style.opening
            )
            self.turn_finder = TurnFinder(self.chat_template, special_texts(tokenizer))
        else:
            check_no_chat_settings(tokenizer, options or {}, self.tools)
        # uid -> (messages, token ids, number of ids before truncation)
        self._cache: dict[str, tuple[tuple[Message, ...], list[int], int]] = {}
        self._replies = Replies(self)
        # roles of the messages -> number of tokens after the last message's content
        self._num_end_tokens: dict[tuple[str, ...], int] = {}
        self._special_ids = frozenset(tokenizer.all_special_ids)

    def text(self, problem: Problem) -> str:
        """The prompt as text, as `encode` tokenizes it.

        A plain prompt is shown without the special tokens that the tokenizer adds.
        """
        if problem.conversation is not None and problem.conversation.text:
            raise ConfigError(
                f"{named(problem)} is a plain text, which only sft trains on, as a whole; "
                "FILE:text=prompt reads the column as prompts"
            )
        try:
            messages = styled(self.style, problem.messages)
        except ConfigError as error:
            raise ConfigError(f"{named(problem)}: {error}") from error
        if self.chat_template is None:
            if tools_of(problem) or any("tool_calls" in message for message in messages):
                raise ConfigError(
                    f"{named(problem)} has tools or tool calls, which need a chat template; "
                    "use a model that has one"
                )
            if self.checks_messages:
                check_no_reasoning(problem, messages)
            return "\n\n".join(message["content"] for message in messages) + self.style.opening
        tools = tools_of(problem)
        if self.checks_messages:
            check_rendered(self.chat_template, problem, messages, () if self.tools else tools)
            check_prompt_end(problem, messages)
        try:
            return self.chat_template.render_prompt(messages, tools)
        except TemplateError as error:
            reason = " ".join(str(error).split())[:200]
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"{named(problem)}: the chat template refuses messages with roles {roles} "
                f"({reason}); change the messages or use data.template=plain"
            ) from error

    def encode(self, problem: Problem) -> list[int]:
        """The prompt's token ids, truncated if `overlong` says so.

        They hold exactly the special tokens that the model expects before its response.
        """
        return list(self._encode_cached(problem)[0])

    def _encode_cached(self, problem: Problem) -> tuple[list[int], int]:
        """(the prompt's ids, their number before truncation)."""
        messages, ids, num_full = self._cache.get(problem.uid, (None, [], 0))
        # Rows of two data sets may have the same uid and different texts.
        if messages != problem.messages:
            full_ids = self._encode_full(problem)
            if not full_ids and self.may_be_empty:
                return [], 0
            if not full_ids:
                advice = "remove it, or check the chat template"
                if self.chat_template is None:
                    advice = "remove it, or use a model with a chat template, which adds some"
                raise ConfigError(f"{named(problem)}: its prompt has no tokens; {advice}")
            ids = self.truncate_prompt(problem.uid, problem.messages, full_ids)
            num_full = len(full_ids)
            self._cache[problem.uid] = (problem.messages, ids, num_full)
        return ids, num_full

    def _encode_full(self, problem: Problem) -> list[int]:
        text = self.text(problem)
        if self.chat_template is None:
            return self.encode_plain(text)
        # The template writes all special tokens itself, so the tokenizer must not add a second BOS.
        return self.tokenize(text, special=False)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text without a chat template: with the tokenizer's BOS, without its EOS."""
        ids = self.tokenize(text, special=True)
        bos = self.tokenizer.bos_token_id
        eos = self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]  # the text has its own BOS
        if eos is not None and ids[-1:] == [eos]:
            text_ids = self.tokenize(text, special=False)
            if text_ids[-1:] != [eos]:
                ids = ids[
                    :-1
                ]  # this tokenizer ends each text with EOS, but here a response follows
        return ids

    def tokenize(self, text: str, special: bool) -> list[int]:
        """The token ids of a text; `special` adds the tokenizer's BOS and EOS."""
        return list(cast(Any, self.tokenizer(text, add_special_tokens=special))["input_ids"])

    def num_prompt_tokens(self, problem: Problem) -> int:
        """The number of prompt tokens before truncation."""
        return self._encode_cached(problem)[1]

    def truncate_prompt(self, uid: str, messages: Sequence[Message], ids: list[int]) -> list[int]:
        """Truncates to max_prompt_tokens if `overlong` is left, middle or right.

        Keeps a BOS token, and the tokens that the template writes after the last message.

        Args:
            uid: the problem's uid, for error messages.
            messages: the messages of the prompt.
            ids: the token ids of the prompt.
        """
        limit = self.max_prompt_tokens
        side = self.overlong
        if side not in TRUNCATION_SIDES or len(ids) <= limit:
            return ids
        problem = (
            f"the prompt of problem {uid} has {len(ids)} tokens, data.max_prompt_tokens={limit}"
        )
        if self.tools:
            raise ConfigError(
                f"{problem}, and data.overlong={side} would remove part of the schemas of "
                "rollout.tools; raise the limit or use data.overlong=drop"
            )
        bos = self.tokenizer.bos_token_id
        # In some models the BOS token also starts every turn: then it is not kept.
        num_start = int(ids[0] == bos and bos not in ids[1:])
        num_end = self._count_end_tokens(messages)
        least = min_limit(side, num_start, num_end)
        if limit < least:
            raise ConfigError(
                f"{problem}: too few to truncate it ({side}) and keep its last {num_end} tokens; "
                f"set data.max_prompt_tokens={least} or more"
            )
        return truncate(ids, limit, side, num_start, num_end)

    def _count_end_tokens(self, messages: Sequence[Message]) -> int:
        """Number of tokens after the content of the last message.

        Two prompts that differ in this content only share exactly these tokens at their ends.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._num_end_tokens:
            *before, last = messages
            variants: list[list[int]] = []
            for content in ("0", "1"):
                changed = (*before, {**last, "content": content})
                variants.append(self._encode_full(Problem("", changed, "")))
            count = 0
            for one, other in zip(reversed(variants[0]), reversed(variants[1]), strict=False):
                if one != other:
                    break
                count += 1
            else:
                count = 0
            self._num_end_tokens[roles] = count
        return self._num_end_tokens[roles]

    def encode_after_turn(self, messages: Sequence[Message], end: int) -> list[int]:
        """The token ids between a turn of the model and its next turn.

        They hold the messages and open the next turn. Sampled tokens are not encoded again.
        Special tokens are removed from the messages, so that none can open a turn itself. A plain
        prompt is continued by the text of the messages.

        Args:
            messages: answers of tools (role tool), or what an environment says (role user).
            end: the last token that was sampled.
        """
        messages = [
            {**message, "content": self.without_special_tokens(message["content"])}
            for message in messages
        ]
        if self.chat_template is None:
            text = "".join(message["content"] for message in messages)
            return self.tokenize(text, special=False)
        text = self.chat_template.render_after_turn(messages)
        return self.tokenize(text.removeprefix(self.decode_raw([end])), special=False)

    def without_special_tokens(self, text: str) -> str:
        """The text without special tokens that are written out in it."""
        special_tokens = [str(token) for token in self.tokenizer.all_special_tokens if token]
        pattern = "|".join(map(re.escape, special_tokens))
        return re.sub(pattern, "", text) if pattern else text

    def encode_response(self, text: str, with_end: bool = True) -> list[int]:
        """A response's token ids without special tokens; `with_end` adds one EOS at the end."""
        ids = self.tokenize(text, special=False)
        if not with_end:
            return ids
        eos = self.eos_token_id()
        return ids if ids[-1:] == [eos] else [*ids, eos]

    def eos_token_id(self) -> int:
        """The id of the end-of-sequence token; raises ConfigError if the tokenizer has none."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name_or_path!r} has no end-of-sequence token; "
                "set its eos_token"
            )
        return cast(int, eos)

    def encode_reply(self, problem: Problem, text: str) -> list[int]:
        """The token ids of a response that the data give, as the model writes it after the prompt.

        With a chat template they are what the template renders after the prompt, up to the token
        that ends the turn; EOS, if it writes none. If the prompt ends in `<think>`, a response that
        starts with it loses that start.
        """
        return self._replies.encode(problem, text)

    def encode_demonstrations(self, problem: Problem) -> list[list[int]]:
        """The problem's demonstrations as responses to its prompt, each up to its first EOS."""
        eos = self.tokenizer.eos_token_id
        responses: list[list[int]] = []
        for demonstration in problem.demonstrations:
            ids = self.encode_reply(problem, demonstration)
            responses.append(ids[: ids.index(eos) + 1] if eos in ids else ids)
        return responses

    def encode_prefilled(
        self, problem: Problem, opening: str, text: str, closing: str
    ) -> list[int]:
        """The prompt with the assistant's turn prefilled with opening, text and closing.

        Each part is encoded by itself and without special tokens. If the template already wrote
        the opening, it is not added again.
        """
        ids = self.encode(problem)
        tail = self.decode_raw(ids[-4 * len(opening) - 8 :]).rstrip()
        is_open = bool(opening) and tail.endswith(opening.strip())
        for part in [text, closing] if is_open else [opening, text, closing]:
            if part:
                ids += self.tokenize(part, special=False)
        return ids

    def decode_raw(self, ids: Sequence[int]) -> str:
        """The text of token ids, with special tokens."""
        return self._decode(ids, skip_special_tokens=False)

    def decode_turn(self, ids: Sequence[int]) -> str:
        """The text of a turn with special tokens, without the special token that ended it."""
        is_ended = bool(ids) and ids[-1] in self._special_ids
        return self.decode_raw(ids[:-1] if is_ended else ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens and with all spaces as they are."""
        return self._decode(ids, skip_special_tokens=True)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def save(self, file: Path) -> None:
        """Writes tokenizer.json, unless the file exists or the tokenizer is not a fast one.

        Raises:
            RunError: the file cannot be written.
        """
        if file.exists() or not self.tokenizer.is_fast:
            return
        try:
            atomic_write_text(file, cast(Any, self.tokenizer).backend_tokenizer.to_str())
        except OSError as error:
            raise RunError(f"{file} could not be written: {error.strerror}") from error

    def drop_overlong(self, problems: Sequence[Problem]) -> tuple[list[Problem], int]:
        """Encodes all prompts and compares their lengths with `max_prompt_tokens`.

        Returns:
            (problems that fit, number dropped). Truncated prompts fit. Problems are dropped only
            if `overlong` is `drop`.

        Raises:
            ConfigError: a prompt is too long and `overlong` is `error`; all are too long and it is
                `drop`; or a prompt cannot be truncated.
        """
        lengths = [len(self.encode(problem)) for problem in problems]
        limit = self.max_prompt_tokens
        key = "data.max_prompt_tokens"
        return drop_longer(problems, lengths, "prompts", key, limit, self.overlong)

    def num_truncated(self, problems: Sequence[Problem]) -> int:
        """How many of the problems have a truncated prompt."""
        count = 0
        for problem in problems:
            ids, num_full = self._encode_cached(problem)
            count += len(ids) < num_full
        return count

    def drop_overlong_demonstrations(
        self, problems: Sequence[Problem], limit: int
    ) -> tuple[list[Problem], int]:
        """As drop_overlong, for the response that a method learns from.

        That is a problem's first demonstration, or the longer response of its pair. Responses are
        never truncated, because their end would be missing. Problems without a response fit.
        """
        lengths = [self.response_length(problem) for problem in problems]
        what = "demonstrations" if any(p.demonstrations for p in problems) else "pairs"
        key = "rollout.max_response_tokens"
        return drop_longer(problems, lengths, what, key, limit, self.overlong)

    def response_length(self, problem: Problem) -> int:
        """Tokens of the response that a method learns from; 0 if the problem has none."""
        texts = list(problem.demonstrations[:1])
        if not texts:
            pair = ("chosen", "rejected")
            texts = [str(problem.extra[name]) for name in pair if name in problem.extra]
        return max((len(self.encode_reply(problem, text)) for text in texts), default=0)
