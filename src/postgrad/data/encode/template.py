"""Renders messages with the tokenizer's chat template: options, tools, the next turn's opening."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError, TemplateRuntimeError

from postgrad.data.encode.template_limits import check_template_limits
from postgrad.errors import ConfigError, Conflict, UnknownName, Unsupported, did_you_mean
from postgrad.pictures import PictureError, add_content, image_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from postgrad.picture_processor import PictureProcessor

# Variables that transformers itself passes to a chat template.
RESERVED = (
    "messages",
    "conversation",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "documents",
    "tokenize",
)
# Stands for the model's response when the text that a template writes after it is looked up.
PLACEHOLDER = "postgrad-turn"
# Added to the system message where a chat template does not know tools.
TOOLS_PROMPT = (
    "You may call tools. These are their schemas, one per line:\n"
    "{schemas}\n"
    "To call one, write a JSON object between tags and end your turn; "
    "the answer comes before your next turn:\n"
    '<tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>'
)


class ChatTemplate:
    """The chat template of a tokenizer with its options and tools.

    Args:
        tokenizer: has a chat template.
        options: values that the template reads by name, e.g. {"enable_thinking": False}.
        tools: JSON schemas of the tools that the model may call. A template that does not read
            `tools` gets them in the system message.
        opening: text that starts the assistant's turn, unless the template already wrote it.

    Raises:
        ConfigError: the template does not read an option, cannot render answers of tools, or
            takes too much time or memory.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        options: Mapping[str, Any],
        tools: Sequence[dict[str, Any]] = (),
        opening: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.source = str(tokenizer.chat_template)
        self.options = dict(options)
        self.tools = list(tools)
        self.opening = opening
        check_template_limits(self.source)
        for name in self.options:
            self._check_option(name)
        if self.tools:
            self._check_tool_answers()

    def reads(self, name: str) -> bool:
        """Whether the template's source mentions a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def reads_field(self, name: str) -> bool:
        """Whether the template's source mentions a field of messages: `.name` or `'name'`."""
        return re.search(rf"[.'\"]{re.escape(name)}\b", self.source) is not None

    def _check_option(self, name: str) -> None:
        """Refuses a name that the template does not read: Jinja would ignore it silently."""
        key = f"data.template_options.{name}"
        if name in RESERVED:
            raise Conflict(f"{key} is set by the framework; remove it")
        if not self.reads(name):
            words = re.findall(r"\b[a-z]\w{3,}\b", self.source)
            candidates = {word for word in words if "_" in word} - set(RESERVED)
            raise UnknownName(
                f"{key}: the chat template never reads {name}; {did_you_mean(name, candidates)}"
            )

    def _check_tool_answers(self) -> None:
        try:
            self.render_after_turn([{"role": "tool", "content": "answer"}])
        except (TemplateError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise Unsupported(
                f"rollout.tools: the chat template of {self.tokenizer.name_or_path!r} cannot "
                f"render the answers of tools ({reason}); "
                "remove rollout.tools or use a model whose template knows the role tool"
            ) from error

    def render_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """Return the text of the messages with the assistant's turn opened.

        Args:
            messages: the messages of the prompt.
            tools: schemas of the row, shown if the run has no tools of its own.

        Raises:
            jinja2.TemplateError: the template refuses the messages.
        """
        messages = self.prompt_messages(messages)
        text = self.render(messages, self.tools or tools, add_generation_prompt=True)
        return text if text.endswith(self.opening) else text + self.opening

    def prompt_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages, with the tools in the system message if the template needs that."""
        copies = [dict(message) for message in messages]
        if self.tools and not self.reads("tools"):
            return self._with_tools_prompt(copies)
        return copies

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of the messages exactly as the template writes it, without `opening`.

        Where a picture is, the text has all tokens that stand for it.

        Raises:
            jinja2.TemplateError: the template refuses the messages, or fails in any other way.
            PictureError: the model cannot read pictures, or the text writes their tokens itself.
        """
        pictures = [part["image"] for part in image_parts(messages)]
        if not pictures:
            return self._render_text(messages, tools, add_generation_prompt)
        try:
            processor = self.processor  # refuses a model of text before its template does
            text = self._render_text(messages, tools, add_generation_prompt)
            return processor.expand(text, pictures)
        except ConfigError as error:
            raise PictureError(str(error)) from error

    def _render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                self._contents_as_read(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.options,
            )
        except TemplateError:
            raise
        except Exception as error:  # a template is a program of the model's author
            raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
        return cast(str, text)

    def _contents_as_read(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with parts in place of texts, if the template reads parts only."""
        copies = [dict(message) for message in messages]
        for message in copies if self._reads_parts_only else ():
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        return copies

    @cached_property
    def _reads_parts_only(self) -> bool:
        """Whether a text as content would be lost, as in SmolVLM's template."""
        if "type" not in self.source:
            return False
        message = {"role": "user", "content": PLACEHOLDER}
        try:
            return PLACEHOLDER not in cast(
                str, self.tokenizer.apply_chat_template([message], tokenize=False)
            )
        except Exception:  # a template is a program of the model's author
            return False

    @cached_property
    def processor(self) -> "PictureProcessor":
        """What counts the tokens of pictures. Raises ConfigError for a model of text."""
        from postgrad.picture_processor import PictureProcessor

        return PictureProcessor(self.tokenizer)

    @property
    def has_generation_markers(self) -> bool:
        """Whether the template marks the assistant's tokens with {% generation %}."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    def generation_spans(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[tuple[int, int]]:
        """Return [start, end) of each {% generation %} block in the text of `render`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            [self._contents_as_read(messages)],
            tools=list(tools) or None,
            chat_template=self.tokenizer.get_chat_template(None, list(tools) or None),
            return_assistant_tokens_mask=True,
            **cast(dict[str, Any], self.tokenizer.special_tokens_map | self.options),
        )
        found = cast(list[tuple[int, int]], spans[0])
        pictures = [part["image"] for part in image_parts(messages)]
        if not pictures:
            return found

        def moved(end: int) -> int:
            before = texts[0][:end]
            num_before = before.count(self.processor.placeholder)
            return len(self.processor.expand(before, pictures[:num_before]))

        return [(moved(start), moved(end)) for start, end in found]

    def _with_tools_prompt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        schemas = "\n".join(json.dumps(schema) for schema in self.tools)
        content = TOOLS_PROMPT.format(schemas=schemas)
        if messages[0]["role"] == "system":
            content = add_content(messages[0]["content"], content)
            messages = messages[1:]
        return [{"role": "system", "content": content}, *messages]

    def render_after_turn(self, following: Sequence[Mapping[str, Any]]) -> str:
        """Return the text after a response: its end, the messages, the next turn's start.

        Args:
            following: the messages that follow the response, such as answers of tools.
        """
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": PLACEHOLDER},
            *following,
        ]
        text = self.render_prompt(messages)
        return text[text.index(PLACEHOLDER) + len(PLACEHOLDER) :]
