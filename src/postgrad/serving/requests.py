"""OpenAI's requests, parsed and checked. Every error is an ApiError that names the field.

Beyond OpenAI's fields there are those of vLLM that a trainer needs: top_k, min_p, stop_token_ids,
return_token_ids, return_tokens_as_token_ids, skip_special_tokens, include_stop_str_in_output,
chat_template_kwargs. The prompt of a completion may be token ids with pictures, in the form of
vLLM's Python interface.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from postgrad.errors import did_you_mean
from postgrad.net.bodies import HttpError
from postgrad.pictures import Picture, PictureError, image_parts, picture_of_data_url
from postgrad.rollout.engine import Sampling
from postgrad.rollout.native.sampling import MAX_TOP_LOGPROBS
from postgrad.serving.tool_calls import template_message

MAX_CHOICES = 128  # per prompt
MAX_PROMPTS = 256
MAX_MESSAGES = 1000
MAX_STOPS = 16
MAX_TOOLS = 128
MAX_STOP_LENGTH = 256
MIN_TEMPERATURE = 1e-3  # a smaller one, except 0, overflows when logits are divided by it
NO_LIMIT = 1 << 30  # tokens; each request has its own limit
MAX_NAME_LENGTH = 80  # of a field name in an error

# Fields that clients send and that have no effect here.
IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}
# Fields that would change the response and are not implemented, with the values that are allowed
# because they change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),  # of a chat
    "suffix": ("",),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "prompt_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class ApiError(HttpError):
    """A request that is answered with an error in OpenAI's shape.

    Args:
        status: HTTP status.
        reason: the message for people.
        param: the field that is wrong.
        code: a constant that programs can compare.
    """

    def __init__(
        self, status: int, reason: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, reason)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class IdsWithPictures:
    """A prompt of token ids, and the pictures that its image tokens show, in order."""

    ids: list[int]
    images: tuple[Picture, ...]


def _parse_prompts(value: Any) -> list[Any]:
    """Return a list of texts, of token id lists, or of one IdsWithPictures."""
    if isinstance(value, dict):
        return [_parse_ids_with_pictures(value)]
    if isinstance(value, str) or _is_id_list(value):
        return [value]
    if isinstance(value, list) and value:
        if len(value) > MAX_PROMPTS:
            raise PydanticCustomError(
                "too_many", "must have at most {limit} prompts", {"limit": MAX_PROMPTS}
            )
        if all(isinstance(item, str) for item in value):
            return value
        if all(_is_id_list(item) for item in value):
            return value
    raise PydanticCustomError("prompt", "must be a string, token ids, or a list of either")


def _is_id_list(value: Any) -> bool:
    """Return whether this is a list of integers (and not booleans) with at least one entry."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _parse_ids_with_pictures(value: dict[str, Any]) -> IdsWithPictures:
    match value:
        case {"prompt_token_ids": ids, "multi_modal_data": {"image": [*urls], **more}, **others}:
            if _is_id_list(ids) and not more and not others:
                return IdsWithPictures(ids, tuple(map(_read_url, urls)))
    raise PydanticCustomError(
        "prompt",
        'must have token ids and data URLs: {"prompt_token_ids": [...], '
        '"multi_modal_data": {"image": [...]}}',
    )


def _parse_stops(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else value


def _read_parts(value: Any) -> Any:
    """Return the text of a content that is a list of text parts; other values as they are.

    With pictures it is the list of parts, and a picture's part has it as `image`.
    """
    if isinstance(value, str | None):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of parts")
    parts = [_read_part(part if isinstance(part, dict) else {}) for part in value]
    return parts if image_parts([{"content": parts}]) else "".join(p["text"] for p in parts)


def _read_part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == "image_url":
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        return {"type": "image", "image": _read_url(url)}
    if not isinstance(part.get("text"), str):
        raise PydanticCustomError(
            "content", "must be a string or a list of text and image_url parts"
        )
    return {"type": "text", "text": part["text"]}


def _read_url(url: Any) -> Picture:
    if not isinstance(url, str) or not url.startswith("data:"):
        raise PydanticCustomError("image_url", "must be a data URL; nothing is fetched")
    try:
        return picture_of_data_url(url)
    except PictureError as error:
        raise PydanticCustomError("image_url", "{reason}", {"reason": str(error)}) from None


def _check_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of an earlier turn, as they are, if each names a function."""
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise PydanticCustomError(
                "tool_call", 'must have a function: {"name": ..., "arguments": ...}'
            )
    return calls


TokenCount = Annotated[int, Field(ge=1, le=NO_LIMIT)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
NumTopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class NestedFields(BaseModel):
    """An object inside of a request. A field that is null counts as absent, as at the top."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(NestedFields):
    """`stream_options`; unknown keys are ignored."""

    include_usage: bool = False


class ChatMessage(BaseModel):
    """One message of a chat; keys other than these are ignored."""

    model_config = ConfigDict(strict=True)

    role: str
    content: Annotated[Any, BeforeValidator(_read_parts)] = None  # a text or a list of parts
    tool_calls: Annotated[list[dict[str, Any]], AfterValidator(_check_calls)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ToolFunction(NestedFields):
    """The function of a tool; unknown keys are ignored."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
    description: str = ""
    parameters: dict[str, Any] = {}


class Tool(NestedFields):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: ToolFunction


class GenerationRequest(BaseModel):
    """The fields of completions and chats alike. Types are strict: "5" is not a number."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    is_chat: ClassVar[bool]
    prompt_field: ClassVar[str]  # the field that has the prompt
    limit_field: ClassVar[str] = "max_tokens"  # the field that has the token limit
    ignored: ClassVar[set[str]] = IGNORED
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED
    instead: ClassVar[dict[str, str]] = {}  # fields of another path -> what to use here

    model: str = ""
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1, le=NO_LIMIT)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: Annotated[
        list[StopString], BeforeValidator(_parse_stops), Field(max_length=MAX_STOPS)
    ] = []
    stop_token_ids: list[int] = Field([], max_length=MAX_STOPS)  # besides the model's own
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # log-probs name tokens as token_id:7
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float) -> float:
        if 0.0 < value < MIN_TEMPERATURE:
            raise PydanticCustomError(
                "temperature", "must be 0 (greedy) or at least {least}", {"least": MIN_TEMPERATURE}
            )
        return value

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters; the token limit is that of each prompt."""
        return Sampling(
            temperature=self.temperature,
            max_new_tokens=NO_LIMIT,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            stop=tuple(self.stop),
            stop_ids=tuple(self.stop_token_ids),
        )

    @property
    @abstractmethod
    def prompts(self) -> list[Any]:
        """Texts, or token ids with or without pictures; of a chat, its one list of messages."""

    @property
    @abstractmethod
    def token_limit(self) -> int | None:
        """Largest number of new tokens per choice; None: as many as the context allows."""

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools that the model may call; a completion has none."""
        return []

    @property
    def template_options(self) -> dict[str, Any]:
        """Values that the chat template reads; a completion has none."""
        return {}

    @property
    def echoes_prompt(self) -> bool:
        """Whether the response begins with the prompt, and its log-probs with the prompt's."""
        return False

    @property
    @abstractmethod
    def num_top(self) -> int | None:
        """Number of most likely tokens in the log-probs; None: the response has no log-probs."""


AnyModel = TypeVar("AnyModel", bound=BaseModel)
AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    is_chat: ClassVar[bool] = False
    prompt_field: ClassVar[str] = "prompt"
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: neutral for name, neutral in UNSUPPORTED.items() if name != "echo"
    }

    prompt: Annotated[list[Any], BeforeValidator(_parse_prompts)]
    max_tokens: int = Field(16, ge=0, le=NO_LIMIT)
    logprobs: NumTopLogprobs | None = None
    echo: bool = False  # the response begins with the prompt

    @property
    def prompts(self) -> list[Any]:
        return self.prompt

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def echoes_prompt(self) -> bool:
        return self.echo

    @property
    def num_top(self) -> int | None:
        return self.logprobs


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    is_chat: ClassVar[bool] = True
    prompt_field: ClassVar[str] = "messages"

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: NumTopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none"] = "auto"

    @property
    def prompts(self) -> list[Any]:
        dumped = [message.model_dump(exclude={"content"}) for message in self.messages]
        pairs = zip(dumped, self.messages, strict=True)
        return [[template_message({**fields, "content": m.content}) for fields, m in pairs]]

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def template_options(self) -> dict[str, Any]:
        return self.chat_template_kwargs

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def parse_request(body: Any, is_chat: bool) -> CompletionRequest | ChatRequest:
    """Parse the JSON of a completion or a chat. Raises ApiError."""
    return parse_fields(body, ChatRequest if is_chat else CompletionRequest)


def parse_fields(body: Any, schema: type[AnyRequest]) -> AnyRequest:
    """Return a request from its JSON. A field that is null counts as absent. Raises ApiError."""
    if not isinstance(body, dict):
        raise ApiError(400, "the request must be a JSON object")
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in schema.ignored:
            continue
        if name in schema.instead:
            reason = f"unknown field {name}; use {schema.instead[name]}"
            raise ApiError(400, reason, name, "unknown_parameter")
        if name in schema.unsupported:
            _check_unsupported(name, value, schema.unsupported[name])
            continue
        fields[name] = value
    request = check_schema(fields, schema)
    if fields.get("stream_options") and not request.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    if fields.get("top_logprobs") and request.num_top is None:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    if request.token_limit == 0 and not request.echoes_prompt:
        raise ApiError(400, "max_tokens: must be at least 1, or 0 with echo=true", "max_tokens")
    return request


def check_schema(fields: Any, schema: type[AnyModel]) -> AnyModel:
    """Return the validated model. Raises ApiError."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise to_api_error(error, schema) from None


def _check_unsupported(name: str, value: Any, neutral_values: tuple[Any, ...]) -> None:
    """Raise ApiError unless this value of an unsupported field changes nothing."""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
    for neutral in neutral_values:
        if value == neutral and isinstance(value, type(neutral) | int | float):
            return
    raise ApiError(
        400, f"{name} is not supported by this server; leave it out", name, "unsupported_parameter"
    )


def to_api_error(error: ValidationError, schema: type[BaseModel]) -> ApiError:
    """Return the first error of a validation; an unknown field before all others."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    for detail in details:
        if detail["type"] == "extra_forbidden":
            name = str(detail["loc"][0])[:MAX_NAME_LENGTH]
            hint = did_you_mean(name, schema.model_fields)
            return ApiError(400, f"unknown field {name}; {hint}", name, "unknown_parameter")
    path = _dotted_path(details[0]["loc"])
    message = details[0]["msg"]
    label = path or "the request"
    return ApiError(400, f"{label}: {message[:1].lower()}{message[1:]}", path or None)


def _dotted_path(location: tuple[int | str, ...]) -> str:
    """Return a field's path as messages[0].content."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
