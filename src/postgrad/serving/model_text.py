"""The text side of a model that is served: requests to token ids, token ids to text."""

import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from postgrad.data.encode.encoder import Encoder
from postgrad.errors import ConfigError
from postgrad.pictures import Picture, PictureError, add_content, check_picture, image_parts
from postgrad.problem import Problem
from postgrad.serving.detokenizer import REPLACEMENT, Detokenizer, raw_bytes
from postgrad.serving.requests import (
    NO_LIMIT,
    ApiError,
    ChatRequest,
    GenerationRequest,
    IdsWithPictures,
)
from postgrad.serving.tool_calls import find_tool_calls

Messages = tuple[dict[str, Any], ...]
# A prompt with more characters per token of the context is refused before it is encoded. Text has
# about 4; only long runs of spaces and the like have more than this.
CHARACTERS_PER_TOKEN = 16
MAX_PICTURES = 32  # of one request: a small one may become as large as the model reads
MAX_PICTURE_PIXELS = 1 << 24  # of all of one request


class ModelText:
    """Encodes requests and decodes responses with the tokenizer of a model.

    `reads_pictures` says whether requests may have pictures.

    Args:
        name: the name that requests use.
        tokenizer: a transformers tokenizer.
        stop_ids: the tokens that end a response of the model.
        vocabulary_size: number of token ids that the model knows.
        template: how chats are rendered; see Encoder.
        options: values that the chat template reads; a request may add others.
        max_tokens: largest number of tokens of a prompt and its response.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        stop_ids: set[int],
        vocabulary_size: int,
        template: str = "auto",
        options: Mapping[str, Any] | None = None,
        max_tokens: int = NO_LIMIT,
    ) -> None:
        self.name = name
        self.reads_pictures = False
        self.max_tokens = max_tokens
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.vocabulary_size = vocabulary_size
        self.template = template
        self.options = dict(options or {})
        # An empty prompt is refused here, in words for a client.
        self.plain_prompts = self._make_encoder("plain")
        self.chat_prompts = self._make_encoder(template, self.options)
        self.lock = threading.Lock()  # tokenizers are not thread-safe
        self._token_texts: dict[int, str] = {}

    def encode(self, request: GenerationRequest, prompt: Any) -> list[int]:
        """Return the token ids of a text, of messages, or of a prompt of ids. Raises ApiError."""
        if not request.is_chat and isinstance(prompt, list | IdsWithPictures):
            return self._check_ids(request, prompt)
        self._check_length(request, prompt)
        self.check_pictures(request, pictures_of(request, prompt))
        if request.tool_schemas and self.chat_prompts.chat_template is None:
            raise ApiError(
                400,
                f"tools need a chat template, which {self.name!r} has not; leave tools out",
                "tools",
            )
        messages: Messages = ({"role": "user", "content": prompt},)
        if request.is_chat:
            messages = tuple(self._known_role(message) for message in prompt)
        try:
            with self.lock:
                encoder = self.prompts_for(request)
                _check_roles(encoder, messages)
                ids = encoder.prompt(Problem("", messages, ""))
        except ConfigError as error:
            reason = str(error).removeprefix("problem : ")
            reason = reason.replace("data.template_options", "chat_template_kwargs")
            reason = reason.replace("rollout.tools", "tools")
            reason = reason.replace(" or use data.template=plain", "")
            reason = reason.replace(repr(self.tokenizer.name_or_path), repr(self.name))
            raise ApiError(400, reason, request.prompt_field) from error
        if not ids:
            field = request.prompt_field
            raise ApiError(400, f"{field} is empty: the model needs at least one token", field)
        return ids

    def _check_ids(self, request: GenerationRequest, prompt: Any) -> list[int]:
        """Return the ids of a prompt that has them. Raises ApiError."""
        ids: list[int] = prompt.ids if isinstance(prompt, IdsWithPictures) else prompt
        if not all(0 <= token < self.vocabulary_size for token in ids):
            raise ApiError(
                400, f"prompt has a token id outside 0 to {self.vocabulary_size - 1}", "prompt"
            )
        pictures = pictures_of(request, prompt)
        self.check_pictures(request, pictures)
        if pictures:
            try:
                with self.lock:
                    self.chat_prompts.check_places(ids, pictures, may_follow=True)
            except (ConfigError, PictureError) as error:
                raise ApiError(400, str(error), "prompt") from error
        return ids

    def _check_length(self, request: GenerationRequest, prompt: Any) -> None:
        """Raise ApiError for more characters than fit, before time is spent on encoding them."""
        num_characters = count_characters([prompt, request.tool_schemas, request.template_options])
        if num_characters > CHARACTERS_PER_TOKEN * self.max_tokens:
            raise ApiError(
                400,
                f"a prompt of {num_characters} characters exceeds the context of "
                f"{self.max_tokens} tokens; shorten the prompt",
                request.prompt_field,
                "context_length_exceeded",
            )

    def check_pictures(self, request: GenerationRequest, pictures: Sequence[Picture]) -> None:
        """Raise ApiError for pictures that the model cannot read, or that take long to decode.

        Their sizes are checked before the first one is decoded.
        """
        try:
            if pictures and not self.reads_pictures:
                raise PictureError(f"{self.name!r} reads no pictures; leave them out")
            if len(pictures) > MAX_PICTURES:
                raise PictureError(f"{len(pictures)} pictures; a request may have {MAX_PICTURES}")
            num_pixels = sum(prod(picture.size) for picture in pictures)
            if num_pixels > MAX_PICTURE_PIXELS:
                raise PictureError(
                    f"pictures of {num_pixels / 1e6:.0f} megapixels; all of a request may have "
                    f"{MAX_PICTURE_PIXELS >> 20}"
                )
            for picture in pictures:
                check_picture(picture)
        except PictureError as error:
            raise ApiError(400, str(error), request.prompt_field) from error

    def _known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message; one of the developer is the system's if the template has none.

        Many templates would leave it out without a word.
        """
        knows_developer = "developer" in str(self.tokenizer.chat_template)
        if message["role"] != "developer" or knows_developer:
            return message
        return {**message, "role": "system"}

    def prompts_for(self, request: GenerationRequest) -> Encoder:
        """Return what renders the prompt of a request. Raises ConfigError."""
        if not isinstance(request, ChatRequest):
            return self.plain_prompts
        if request.template_options or request.tool_schemas:
            options = self.options | request.template_options
            return self._make_encoder(self.template, options, request.tool_schemas)
        return self.chat_prompts

    def _make_encoder(
        self,
        template: str,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Encoder:
        return Encoder(
            self.tokenizer,
            template,
            options=options,
            tools=tools,
            may_be_empty=True,
            checks_messages=False,
        )

    def find_tool_calls(
        self, request: GenerationRequest, tokens: list[int]
    ) -> tuple[str | None, list[dict[str, Any]]]:
        """Return (text before the calls, tool calls) of a response; no calls without tools."""
        if not request.tool_schemas:
            return None, []
        with self.lock:
            text = self.chat_prompts.decode_turn(tokens)
            return find_tool_calls(self.tokenizer, text, request.tool_schemas)

    def make_detokenizer(
        self, request: GenerationRequest, stops: Sequence[str] | None = None
    ) -> Detokenizer:
        """Return a detokenizer for a response; `stops` replaces the request's stop strings."""
        return Detokenizer(
            self.tokenizer,
            stops=request.stop if stops is None else stops,
            keep_special=not request.skip_special_tokens,
            keep_stop=request.include_stop_str_in_output,
        )

    def token_text(self, token: int) -> str:
        """Return the text of one token; that of special tokens, too."""
        text = self._token_texts.get(token)
        if text is None:
            text = self.tokenizer.decode(
                [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            self._token_texts[token] = text
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, also of one that is a part of a character."""
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return text.encode()
        return raw_bytes(self.tokenizer.convert_ids_to_tokens(token)) or text.encode()


def pictures_of(request: GenerationRequest, prompt: Any) -> tuple[Picture, ...]:
    """Return the pictures of a prompt, in order."""
    if isinstance(prompt, IdsWithPictures):
        return prompt.images
    return tuple(part["image"] for part in image_parts(prompt)) if request.is_chat else ()


def count_characters(value: Any) -> int:
    """Return the number of characters of all texts in a value of lists and objects."""
    total = 0
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            total += len(node)
        elif isinstance(node, dict):
            waiting += [*node.keys(), *node.values()]
        elif isinstance(node, list):
            waiting += node
    return total


def _check_roles(encoder: Encoder, messages: Messages) -> None:
    """Raise ApiError if the chat template leaves out the messages of a role without a word.

    Such a template writes the same text when their contents change.
    """
    roles = {message["role"] for message in messages} - {"user", "assistant"}
    text = encoder.text(Problem("", messages, "")) if roles else ""
    for role in sorted(roles):
        changed = tuple(
            {**message, "content": add_content(message["content"], "x")}
            if message["role"] == role
            else message
            for message in messages
        )
        if encoder.text(Problem("", changed, "")) == text:
            raise ApiError(
                400,
                f"the chat template of this model leaves out messages of role {role[:40]!r}; "
                "use another role",
                "messages",
            )
