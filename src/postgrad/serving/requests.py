"""Requests as OpenAI writes them, read and checked: everything wrong with one is a Refusal that names the field.

Beyond OpenAI's fields there are those of vLLM that a trainer needs: top_k, min_p, return_token_ids, return_tokens_as_token_ids,
skip_special_tokens, include_stop_str_in_output, chat_template_kwargs.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from postgrad.errors import did_you_mean
from postgrad.rollout.engine import Sampling
from postgrad.web import HttpError

MAX_CHOICES = 128  # of one prompt
MAX_PROMPTS = 256
MAX_MESSAGES = 1000
MAX_TOP = 20
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
COLDEST = 1e-3  # below it a temperature is neither greedy nor safe to divide by
NO_LIMIT = 1 << 30  # each request brings its own number of tokens

SAMPLING = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop"}
TELLING = {
    "logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
}
COMMON = {"model", "stream", "stream_options"} | SAMPLING | TELLING
OF_CHAT = {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
KNOWN = {False: COMMON | {"prompt"}, True: COMMON | OF_CHAT}
# Said by clients, and of no meaning here.
HARMLESS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
}
# What would change the answer and is not there: allowed only with the value that asks for nothing.
ABSENT: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "prompt_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class Refusal(HttpError):
    """A request that is answered with an error, the field that is wrong, and a word for programs."""

    def __init__(
        self, status: int, reason: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, reason)
        self.param, self.code = param, code


@dataclass(frozen=True)
class Ask:
    """What one request wants. `prompts` are texts or token ids, or, of a chat, its one list of messages."""

    model: str
    chat: bool
    prompts: list[Any]
    n: int
    max_tokens: int | None
    sampling: Sampling
    seed: int | None
    num_top: int | None  # likeliest tokens told beside each token; None: no log-probs at all
    stream: bool
    stream_usage: bool
    token_ids: bool
    named_ids: bool  # tokens in log-probs are written as token_id:7
    keep_special: bool
    keep_stop: bool
    template_options: dict[str, Any] = field(default_factory=dict)


def read_ask(body: Any, chat: bool) -> Ask:
    """The request in this JSON. Raises Refusal."""
    if not isinstance(body, dict):
        raise Refusal(400, "the request must be a JSON object")
    read = _Fields({key: value for key, value in body.items() if value is not None})
    _check_names(read.body, chat)
    stream = read.flag("stream")
    options = read.object("stream_options")
    if options and not stream:
        raise Refusal(400, "stream_options is for stream=true", "stream_options")
    most = read.whole("max_completion_tokens", None, 1, NO_LIMIT) if chat else None
    return Ask(
        model=read.text("model", ""),
        chat=chat,
        prompts=[_messages(read.body)] if chat else _prompts(read.body),
        n=read.whole("n", 1, 1, MAX_CHOICES) or 1,
        max_tokens=most or read.whole("max_tokens", None if chat else 16, 1, NO_LIMIT),
        sampling=_sampling(read),
        seed=read.whole("seed", None, -(2**63), 2**64 - 1),
        num_top=_num_top(read, chat),
        stream=stream,
        stream_usage=bool(options.get("include_usage")),
        token_ids=read.flag("return_token_ids"),
        named_ids=read.flag("return_tokens_as_token_ids"),
        keep_special=not read.flag("skip_special_tokens", True),
        keep_stop=read.flag("include_stop_str_in_output"),
        template_options=read.object("chat_template_kwargs"),
    )


def _check_names(body: dict[str, Any], chat: bool) -> None:
    for name, value in body.items():
        if name in ABSENT:
            if not any(
                value == neutral and isinstance(value, type(neutral) | int | float)
                for neutral in ABSENT[name]
            ):
                raise Refusal(
                    400,
                    f"{name} is not supported by this server; leave it out",
                    name,
                    "unsupported_parameter",
                )
        elif name not in KNOWN[chat] and name not in HARMLESS:
            raise Refusal(
                400,
                f"unknown field {name[:80]}; {did_you_mean(name[:80], KNOWN[chat])}",
                name[:80],
                "unknown_parameter",
            )


def _sampling(read: "_Fields") -> Sampling:
    temperature = read.real("temperature", 1.0, 0.0, 100.0)
    if 0.0 < temperature < COLDEST:
        raise Refusal(400, f"temperature must be 0 (greedy) or at least {COLDEST:g}", "temperature")
    top_p = read.real("top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise Refusal(400, "top_p must be above 0", "top_p")
    top_k = max(0, read.whole("top_k", 0, -1, NO_LIMIT) or 0)
    return Sampling(
        temperature, NO_LIMIT, top_p, top_k, read.real("min_p", 0.0, 0.0, 1.0), _stops(read.body)
    )


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(
        isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stops
    ):
        raise Refusal(
            400,
            f"stop must be a text or a list of texts of 1 to {MAX_STOP_LENGTH} characters",
            "stop",
        )
    if len(stops) > MAX_STOPS:
        raise Refusal(400, f"there are more than {MAX_STOPS} stop strings", "stop")
    return tuple(stops)


def _num_top(read: "_Fields", chat: bool) -> int | None:
    if not chat:
        return read.whole("logprobs", None, 0, MAX_TOP)
    top = read.whole("top_logprobs", None, 0, MAX_TOP)
    if not read.flag("logprobs"):
        if top is not None:
            raise Refusal(400, "top_logprobs needs logprobs=true", "top_logprobs")
        return None
    return top or 0


def _prompts(body: dict[str, Any]) -> list[Any]:
    prompt = body.get("prompt")
    wrong = Refusal(400, "prompt must be a text, token ids, or a list of either", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise wrong
    if _are_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise Refusal(400, f"there are more than {MAX_PROMPTS} prompts", "prompt")
    if not all(isinstance(item, str) for item in prompt) and not all(
        isinstance(item, list) and _are_ids(item) for item in prompt
    ):
        raise wrong
    return prompt


def _are_ids(items: list[Any]) -> bool:
    return bool(items) and all(type(item) is int for item in items)


def _messages(body: dict[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise Refusal(400, f"messages must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(400, f"{where} must be an object with role and content", where)
    content = message.get("content", "")
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refusal(
            400, f"{where}.content must be a text or a list of text parts", f"{where}.content"
        )
    return {"role": message["role"], "content": content}


@dataclass
class _Fields:
    """A JSON object's fields by type; what has another type or lies outside its bounds is refused by name."""

    body: dict[str, Any]

    def whole(self, name: str, default: int | None, least: int, most: int) -> int | None:
        value = self.body.get(name, default)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise Refusal(400, f"{name} must be a whole number from {least} to {most}", name)
        return value

    def real(self, name: str, default: float, least: float, most: float) -> float:
        value = self.body.get(name, default)
        if (
            type(value) not in (int, float)
            or not math.isfinite(value)
            or not least <= value <= most
        ):
            raise Refusal(400, f"{name} must be a number from {least:g} to {most:g}", name)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name, default)
        if not isinstance(value, bool):
            raise Refusal(400, f"{name} must be true or false", name)
        return value

    def text(self, name: str, default: str) -> str:
        value = self.body.get(name, default)
        if not isinstance(value, str):
            raise Refusal(400, f"{name} must be a text", name)
        return value

    def object(self, name: str) -> dict[str, Any]:
        value = self.body.get(name, {})
        if not isinstance(value, dict):
            raise Refusal(400, f"{name} must be an object", name)
        return value
