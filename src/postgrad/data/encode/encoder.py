"""The one encoder: a problem becomes the token ids of its prompt, reply or whole conversation.

A conversation is rendered and tokenized once; a mask selects the turns that are trained on. This
file, template.py and turns.py are the only ones that know chat templates and special tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from postgrad.config.schema import TRUNCATION_SIDES, DataConfig
from postgrad.data.encode.checks import (
    check_names,
    check_no_chat_settings,
    check_prompt_end,
    check_shown,
    check_text_style,
    rendering,
)
from postgrad.data.encode.limits import indices_within, min_limit, truncate
from postgrad.data.encode.styles import OWN, find_style, styled, without_opening
from postgrad.data.encode.template import ChatTemplate
from postgrad.data.encode.text import TextEncoder
from postgrad.data.encode.turns import Turn, TurnFinder, TurnNotFound, special_texts
from postgrad.data.rows.messages import conversation_of, is_trained
from postgrad.errors import (
    ConfigError,
    Conflict,
    Missing,
    NoEffect,
    TooLarge,
    Unsupported,
    WrongValue,
)
from postgrad.pictures import Picture, PictureError, image_parts, with_pictures
from postgrad.problem import Conversation, Message, Problem, problem_label

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from postgrad.picture_processor import PictureProcessor

Encoded = TypeVar("Encoded")


@dataclass(frozen=True)
class EncodedRow:
    """A problem as token ids: its prompt, and what the data give as its response.

    Attributes:
        prompt: ids before the response, truncated if data.overlong says so.
        num_prompt: number of prompt ids before truncation.
        response: ids of the response; of a conversation, from the first trained turn to the last.
        loss_mask: whether the loss reads each id of the response.
        is_rewritten: the template renders a trained turn, or the text before it, differently
            from what the model sees when it generates the turn.
        images: the pictures of prompt and response, in order; their tokens are among the ids.
    """

    prompt: list[int]
    num_prompt: int
    response: list[int]
    loss_mask: list[bool]
    is_rewritten: bool = False
    images: tuple[Picture, ...] = ()


def make_encoder(
    tokenizer: "PreTrainedTokenizerBase",
    data: DataConfig,
    tools: Sequence[dict[str, Any]] = (),
    may_be_empty: bool = False,
) -> "Encoder":
    """Return the encoder of a configuration, for training and evaluation: same prompts in both."""
    return Encoder(
        tokenizer,
        template=data.template,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong,
        style=data.prompt_style,
        options=data.template_options,
        tools=tools,
        may_be_empty=may_be_empty,
    )


class Encoder(TextEncoder):
    """Turns problems into token ids, and token ids into text.

    Args:
        tokenizer: a transformers tokenizer.
        template: `chat` renders with the tokenizer's chat template and opens the assistant's turn;
            `plain` joins the contents with blank lines; `auto` is `chat` if the tokenizer has a
            chat template, else `plain`.
        max_prompt_tokens: longest prompt.
        overlong: what happens to longer prompts. `fit` refuses (`error`) or drops them (`drop`);
            `prompt` truncates them on the `left`, in the `middle` or on the `right`.
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
        super().__init__(tokenizer)
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
        if template == "chat":
            opening = self.style.opening
            self.chat_template = ChatTemplate(tokenizer, options or {}, self.tools, opening)
            self._turn_finder = TurnFinder(self.chat_template, special_texts(tokenizer))
        else:
            check_no_chat_settings(tokenizer, options or {}, self.tools)
        self._cache: dict[tuple[str, ...], tuple[object, Any]] = {}  # see _cached
        # roles of the messages -> number of tokens after the last message's content
        self._num_end_tokens: dict[tuple[str, ...], int] = {}

    def _cached(
        self, key: tuple[str, ...], content: object, encode: Callable[[], Encoded]
    ) -> Encoded:
        """Return what `encode` returned for a key that starts with what is encoded and a uid.

        Rows of two data sets may have the same uid and different `content`.
        """
        cached = self._cache.get(key)
        if cached is None or cached[0] != content:
            cached = self._cache[key] = (content, encode())
        return cached[1]

    # ---- prompts

    def text(self, problem: Problem) -> str:
        """Return the prompt as text, as `prompt` tokenizes it.

        A plain prompt is shown without the special tokens that the tokenizer adds.
        """
        if problem.conversation is not None and problem.conversation.text:
            raise Unsupported(
                f"{problem_label(problem)} is a plain text, which only sft trains on, as a whole; "
                "FILE:text=prompt reads the column as prompts",
                at="text",
            )
        messages = self._styled(problem, problem.messages)
        tools = tools_of(problem)
        if self.chat_template is None:
            # A client may send back the thinking of earlier answers, which is left out here.
            if self.checks_messages or tools or any("tool_calls" in one for one in messages):
                check_shown(None, problem, messages, tools)
            return "\n\n".join(message["content"] for message in messages) + self.style.opening
        if self.checks_messages:
            check_shown(self.chat_template, problem, messages, () if self.tools else tools)
            check_prompt_end(problem, messages)
        with rendering(problem, messages):
            return self.chat_template.render_prompt(messages, tools)

    def _styled(self, problem: Problem, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages in the prompt style, with the pictures in their parts."""
        try:
            messages = styled(self.style, messages)
        except ConfigError as error:
            raise error.reworded(f"{problem_label(problem)}: {error}") from error
        return self._with_pictures(problem, messages)

    def _with_pictures(self, problem: Problem, messages: Sequence[Message]) -> tuple[Message, ...]:
        if problem.images and self.chat_template is None:
            raise Unsupported(
                f"{problem_label(problem)} has pictures, which only a chat template places; "
                "use a model of text and images and data.template=chat, or remove these rows"
            )
        return tuple(with_pictures(messages, problem.images) if problem.images else messages)

    def prompt(self, problem: Problem) -> list[int]:
        """Return the prompt's token ids, truncated if `overlong` says so.

        They hold exactly the special tokens that the model expects before its response.
        """
        return list(self.prompt_row(problem).prompt)

    def prompt_row(self, problem: Problem) -> EncodedRow:
        """Return the row of a problem's prompt, without a response."""
        return self._cached(
            ("prompt", problem.uid),
            (problem.messages, problem.images),
            lambda: self._encode_prompt(problem),
        )

    def _encode_prompt(self, problem: Problem) -> EncodedRow:
        ids = self._encode_full(problem)
        if not ids and not self.may_be_empty:
            advice = "remove it, or check the chat template"
            if self.chat_template is None:
                advice = "remove it, or use a model with a chat template, which adds some"
            raise Missing(
                f"{problem_label(problem)}: its prompt has no tokens; {advice}", at="prompt"
            )
        truncated = self._truncate(problem.uid, problem.messages, ids)
        return EncodedRow(truncated, len(ids), [], [], images=problem.prompt_images)

    def _encode_full(self, problem: Problem) -> list[int]:
        text = self.text(problem)
        if self.chat_template is None:
            return self.encode_plain(text)
        # The template writes all special tokens itself, so the tokenizer must not add a second BOS.
        return self.tokenize(text, special=False)

    @property
    def image_token_id(self) -> int:
        """The token that stands for a part of a picture. Raises ConfigError for a model of text."""
        return self.picture_processor.image_token_id

    @property
    def picture_processor(self) -> "PictureProcessor":
        """What makes tokens of pictures. Raises ConfigError for a model of text."""
        if self.chat_template is None:
            raise Unsupported(
                "pictures need a model of text and images with a chat template", at="images"
            )
        return self.chat_template.processor

    def check_places(
        self, ids: Sequence[int], pictures: Sequence[Picture], may_follow: bool = False
    ) -> None:
        """Raise PictureError unless every image token of a row stands for a part of a picture.

        After those of the pictures others `may_follow`, which show nothing.
        """
        if not self.picture_processor.places_fit(ids, pictures, may_follow):
            raise PictureError(
                "its image tokens are not those of its pictures; one in a text cannot be told from "
                "a picture's"
            )

    def count_picture_tokens(self, picture: Picture) -> int:
        """Return how many tokens of a prompt stand for a picture. Raises ConfigError."""
        return len(self.tokenize(self.picture_processor.tokens_of(picture), special=False))

    def _truncate(self, uid: str, messages: Sequence[Message], ids: list[int]) -> list[int]:
        """Return at most max_prompt_tokens ids if `overlong` is left, middle or right.

        A BOS token stays, and the tokens that the template writes after the last message.

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
        if image_parts(messages):
            raise Conflict(
                f"{problem}, and data.overlong={side} would cut through its pictures; raise the "
                "limit, use smaller pictures or data.overlong=drop"
            )
        if self.tools:
            raise Conflict(
                f"{problem}, and data.overlong={side} would remove part of the schemas of "
                "rollout.tools; raise the limit or use data.overlong=drop",
                at="data.overlong",
            )
        bos = self.tokenizer.bos_token_id
        # In some models the BOS token also starts every turn: then it is not kept.
        num_start = int(ids[0] == bos and bos not in ids[1:])
        num_end = self._count_end_tokens(messages)
        least = min_limit(side, num_start, num_end)
        if limit < least:
            raise TooLarge(
                f"{problem}: too few to truncate it ({side}) and keep its last {num_end} tokens; "
                f"set data.max_prompt_tokens={least} or more",
                at="data.max_prompt_tokens",
            )
        return truncate(ids, limit, side, num_start, num_end)

    def _count_end_tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens after the content of the last message.

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

    # ---- responses that the data give

    def reply(self, problem: Problem, text: str) -> list[int]:
        """Return the token ids of a response, as the model writes it after the prompt.

        With a chat template they are what the template renders after the prompt, up to the token
        that ends the turn; EOS, if it writes none. If the prompt ends in `<think>`, a response that
        starts with it loses that start.
        """
        key = ("reply", problem.uid, text)
        content = (problem.messages, problem.images)
        return list(self._cached(key, content, lambda: self._encode_reply(problem, text)))

    def _encode_reply(self, problem: Problem, text: str) -> list[int]:
        prompt = self.text(problem)
        message = _reply_message(problem, text)
        is_ended = False
        if self.chat_template is None or self.style.opening:
            check_shown(None, problem, [message], ())
            written = without_opening(prompt, text)
        else:
            template = self.chat_template
            before = template.prompt_messages(self._styled(problem, problem.messages))
            check_shown(template, problem, [message], ())
            messages = [*before, message]
            tools = template.tools or tools_of(problem)
            with rendering(problem, messages):
                written, is_ended = self._turn_finder.reply_text(prompt, messages, tools)
        ids = self.encode_continuation(prompt, written)
        return ids if is_ended else self.with_eos(ids)

    def demonstrations(self, problem: Problem) -> list[list[int]]:
        """Return the demonstrations as responses to the prompt, each up to its first EOS."""
        eos = self.tokenizer.eos_token_id
        responses: list[list[int]] = []
        for demonstration in problem.demonstrations:
            ids = self.reply(problem, demonstration)
            responses.append(ids[: ids.index(eos) + 1] if eos in ids else ids)
        return responses

    def reply_row(self, problem: Problem) -> EncodedRow:
        """Return the prompt with the response that a method learns from.

        That is the first demonstration, or the longer response of a pair. Without any of them
        the row has no response.
        """
        texts = list(problem.demonstrations[:1])
        if not texts:
            pair = ("chosen", "rejected")
            texts = [str(problem.extra[name]) for name in pair if name in problem.extra]
        replies = [self.reply(problem, text) for text in texts]
        response = max(replies, key=len, default=[])
        return replace(
            self.prompt_row(problem), response=response, loss_mask=[True] * len(response)
        )

    # ---- whole conversations

    def conversation(self, problem: Problem, train_on: str = "all") -> EncodedRow:
        """Return the conversation of a problem as a row whose mask selects the trained turns.

        The row's prompt is the part before the first trained turn. A plain text has no turns:
        every token that has one before it is trained on.

        Args:
            problem: it has a conversation, or a demonstration.
            train_on: `all` trains on every assistant turn, `last` on the last one. Turns of weight
                0 are never trained on.

        Raises:
            ConfigError: the problem has no response, or its conversation cannot be rendered.
        """
        conversation = conversation_of(problem)
        if conversation is None:
            raise Missing(f"{problem_label(problem)} has no response to train on", at="response")
        key = ("conversation", problem.uid, train_on)
        return self._cached(
            key,
            (conversation, problem.images),
            lambda: self._encode_conversation(problem, conversation, train_on),
        )

    def _encode_conversation(
        self, problem: Problem, conversation: Conversation, train_on: str
    ) -> EncodedRow:
        if conversation.text:
            return self._encode_text(problem, conversation.text, train_on)
        if self.chat_template is None or self.style.opening:
            return self._encode_single_turn(problem, conversation, train_on)
        messages = conversation.messages
        num_prompt = conversation.num_prompt
        if self.style is not OWN:
            messages = (*self._styled(problem, messages[:-1]), messages[-1])
            num_prompt = len(messages) - 1
        else:
            messages = self._with_pictures(problem, messages)
        check_shown(self.chat_template, problem, messages, conversation.tools)
        check_prompt_end(problem, messages[:num_prompt])
        with rendering(problem, messages):
            text, turns = self._turn_finder.turns(messages, conversation.tools)
            trained = [turn for turn in turns if _is_trained_turn(turn, messages, num_prompt)]
            trained = trained if train_on == "all" else trained[-1:]
            ids, mask = self._ids_and_mask(text, trained)
        if trained[-1].message == len(messages) - 1 and not trained[-1].is_ended:
            # The template writes no end-of-turn token: EOS teaches the model to stop.
            ids.append(self.eos_token_id())
            mask.append(True)
        first = mask.index(True)
        if first == 0:
            raise Missing(
                f"{problem_label(problem)}: its first token is trained on, so it has no prompt; "
                "start the conversation with a user message",
                at="prompt",
            )
        prompt = self._truncate(problem.uid, messages[: trained[0].message], ids[:first])
        is_rewritten = any(turn.is_rewritten for turn in trained)
        num_images = len(image_parts(messages[: trained[-1].message]))
        return EncodedRow(
            prompt, first, ids[first:], mask[first:], is_rewritten, problem.images[:num_images]
        )

    def _ids_and_mask(self, text: str, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
        """Return the ids of a text up to the last turn's end, and which of them are in a turn."""
        if not self.tokenizer.is_fast:
            raise Unsupported(
                f"the tokenizer {self.tokenizer.name_or_path!r} does not say which characters a "
                "token covers; use a fast tokenizer, or data.template=plain",
                at="tokenizer",
            )
        encoded = cast(
            Any, self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        )
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        mask: list[bool] = []
        for turn in turns:
            tokens = [i for i, (a, b) in enumerate(offsets) if a < turn.end and b > turn.start]
            tokens = [i for i in tokens if offsets[i][0] < offsets[i][1]]
            if not tokens:
                raise TurnNotFound(f"the text of characters {turn.start} to {turn.end}")
            mask += [False] * (tokens[0] - len(mask))
            mask += [True] * (tokens[-1] + 1 - len(mask))
        return list(encoded["input_ids"])[: len(mask)], mask

    def _encode_single_turn(
        self, problem: Problem, conversation: Conversation, train_on: str
    ) -> EncodedRow:
        """Return the row without a chat template: the prompt, then the last message and EOS."""
        *before, last = conversation.messages
        trained = [m for m in conversation.messages[conversation.num_prompt :] if is_trained(m)]
        if train_on == "all" and len(trained) > 1:
            raise Unsupported(
                f"{problem_label(problem)} has several assistant turns, and its prompt uses no "
                "chat template, so only the last one can be trained on; "
                "set method.train_on=last, or use a model with a chat template",
                at="method.train_on",
            )
        check_shown(None, problem, conversation.messages, conversation.tools)
        end = self.decode_raw([self.eos_token_id()])
        if end in last["content"].removesuffix(end):
            raise WrongValue(
                f"{problem_label(problem)}: its response goes on after the end-of-sequence token "
                f"{end}, where a response ends; remove the token, or give several turns as "
                "messages to a model with a chat template",
                at="response",
            )
        single = replace(
            problem,
            messages=tuple(before),
            demonstrations=(last["content"],),
            conversation=conversation,
        )
        (response,) = self.demonstrations(single)
        mask = [True] * len(response)
        return replace(self.prompt_row(single), response=response, loss_mask=mask)

    def _encode_text(self, problem: Problem, text: str, train_on: str) -> EncodedRow:
        """Return a plain text and EOS, without a chat template. The first token is the prompt."""
        if self.style is not OWN:
            raise NoEffect(
                f"{problem_label(problem)} is a plain text, which has no prompt for "
                "data.prompt_style; remove the setting",
                at="data.prompt_style",
            )
        if train_on != "all":
            raise NoEffect(
                f"{problem_label(problem)} is a plain text, which has no turns for "
                f"method.train_on={train_on}; remove the setting",
                at="method.train_on",
            )
        ids = self.with_eos(self.encode_plain(text))
        if len(ids) < 2:
            raise Missing(
                f"{problem_label(problem)}: its text has no tokens; remove the row", at="text"
            )
        return EncodedRow(ids[:1], 1, ids[1:], [True] * (len(ids) - 1))

    # ---- what a reward model scores

    def scored(self, problem: Problem, response: str) -> list[int]:
        """Return the problem's messages and the response as the chat template writes them.

        Without a chat template: the prompt, the response and EOS. Padding tokens at the end are
        removed, because transformers reads the score at the last token that is not padding.
        """
        if self.chat_template is None:
            ids = [*self.prompt(problem), *self.reply(problem, response)]
        else:
            if problem.prompt_images:  # a placeholder in the response is no picture
                response = self.without_special_tokens(response)
            reply = {"role": "assistant", "content": response}
            messages = [*self._styled(problem, problem.messages), reply]
            with rendering(problem, messages):
                text = self.chat_template.render(messages, tools_of(problem))
            ids = self.tokenize(text, special=False)
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        while len(ids) > 1 and ids[-1] == pad:
            ids.pop()
        return ids

    def scored_row(self, problem: Problem, response: str) -> EncodedRow:
        """Return the ids of `scored` as prompt and response.

        The response starts where the ids differ from the prompt's, and ends with what the chat
        template writes after it. Raises ConfigError if the prompt is truncated: the score is that
        of the whole conversation.
        """
        row = self.prompt_row(problem)
        if len(row.prompt) < row.num_prompt:
            raise Conflict(
                f"{problem_label(problem)}: data.overlong={self.overlong} would truncate its "
                "prompt, and a reward model scores whole conversations; raise "
                f"data.max_prompt_tokens (now {self.max_prompt_tokens}) or use data.overlong=drop",
                at="data.overlong",
            )
        ids = self.scored(problem, response)
        start = 0
        while start < min(len(ids) - 1, len(row.prompt)) and ids[start] == row.prompt[start]:
            start += 1
        start = max(1, start)
        mask = [True] * (len(ids) - start)
        return EncodedRow(ids[:start], row.num_prompt, ids[start:], mask, images=row.images)

    # ---- limits

    def fit(
        self,
        problems: Sequence[Problem],
        encode: Callable[[Problem], EncodedRow] | None = None,
        response_limit: int | None = None,
    ) -> tuple[list[Problem], int]:
        """Return (the problems that fit, how many of them have a truncated prompt).

        Problems are dropped only if `overlong` is `drop`. Truncated prompts fit; responses are
        never truncated, because their end would be missing.

        Args:
            problems: the problems.
            encode: returns the row of a problem; None for its prompt.
            response_limit: most tokens of a row's response.

        Raises:
            ConfigError: one is too long and `overlong` is not `drop`; all are too long; or a prompt
                cannot be truncated.
        """
        rows = [(encode or self.prompt_row)(problem) for problem in problems]
        lengths = [len(row.prompt) for row in rows]
        key = "data.max_prompt_tokens"
        limit = self.max_prompt_tokens
        fitting = indices_within(problems, lengths, "prompts", key, limit, self.overlong)
        problems = [problems[i] for i in fitting]
        rows = [rows[i] for i in fitting]
        if response_limit is not None:
            lengths = [len(row.response) for row in rows]
            key = "rollout.max_response_tokens"
            limit = response_limit
            fitting = indices_within(problems, lengths, "responses", key, limit, self.overlong)
            problems = [problems[i] for i in fitting]
            rows = [rows[i] for i in fitting]
        return problems, sum(len(row.prompt) < row.num_prompt for row in rows)

    # ---- turns, and text of the model

    def encode_after_turn(self, messages: Sequence[Message], end: int) -> list[int]:
        """Return the token ids between a turn of the model and its next turn.

        They hold the messages and open the next turn. Sampled tokens are not encoded again.
        Special tokens are removed from the messages, so that none can open a turn itself. A plain
        prompt is continued by the text of the messages.

        Args:
            messages: answers of tools (role tool), or what an environment says (role user).
            end: the last token that was sampled.

        Raises: PictureError if the model or its template cannot show a picture of the messages.
        """
        messages = [self._without_special_tokens(message) for message in messages]
        if self.chat_template is None:
            if image_parts(messages):
                raise PictureError("only a chat template places pictures; use data.template=chat")
            text = "".join(message["content"] for message in messages)
            return self.tokenize(text, special=False)
        text = self.chat_template.render_after_turn(messages)
        return self.tokenize(text.removeprefix(self.decode_raw([end])), special=False)

    def _without_special_tokens(self, message: Message) -> Message:
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": self.without_special_tokens(content)}
        parts = [
            {**part, "text": self.without_special_tokens(part["text"])} if "text" in part else part
            for part in content
        ]
        return {**message, "content": parts}

    def encode_prefilled(
        self, problem: Problem, opening: str, text: str, closing: str
    ) -> list[int]:
        """Return the prompt with the assistant's turn prefilled with opening, text and closing.

        Each part is encoded by itself and without special tokens. If the template already wrote
        the opening, it is not added again.
        """
        ids = self.prompt(problem)
        tail = self.decode_raw(ids[-4 * len(opening) - 8 :]).rstrip()
        is_open = bool(opening) and tail.endswith(opening.strip())
        for part in [text, closing] if is_open else [opening, text, closing]:
            if part:
                ids += self.tokenize(part, special=False)
        return ids


def tools_of(problem: Problem) -> tuple[dict[str, Any], ...]:
    """Return the JSON schemas of a problem's row, which its prompt shows."""
    return problem.conversation.tools if problem.conversation else problem.tools


def _reply_message(problem: Problem, text: str) -> Message:
    """Return the assistant message with this text: the last one of a conversation may be it."""
    if problem.conversation is not None and problem.conversation.messages:
        last = problem.conversation.messages[-1]
        if last["content"] == text:
            return last
    return {"role": "assistant", "content": text}


def _is_trained_turn(turn: Turn, messages: Sequence[Message], num_prompt: int) -> bool:
    return turn.message >= num_prompt and is_trained(messages[turn.message])
