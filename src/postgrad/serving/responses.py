"""OpenAI's responses, complete or in chunks, with the token ids and log-probs of the samples."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from postgrad.net.bodies import HttpError
from postgrad.rollout.native.sampling import TopTokens
from postgrad.rollout.native.sequence import Job
from postgrad.serving.detokenizer import Detokenizer
from postgrad.serving.model_text import ModelText
from postgrad.serving.requests import GenerationRequest
from postgrad.serving.worker import RowUpdate

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_body(error: HttpError) -> dict[str, Any]:
    """Return the JSON of an error in OpenAI's shape."""
    default = "invalid_request_error" if error.status < 429 else "server_error"
    return {
        "error": {
            "message": error.reason,
            "type": ERROR_TYPES.get(error.status, default),
            "param": vars(error).get("param"),
            "code": vars(error).get("code"),
        }
    }


@dataclass
class Choice:
    """One completion that is being sampled. Text, tokens and log-probs are those not sent yet."""

    number: int
    prompt: int
    detokenizer: Detokenizer
    finish: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[TopTokens] = field(default_factory=list)
    text: str = ""
    offsets: "TokenOffsets | None" = None  # of the tokens sent so far, if there are log-probs
    started: bool = False  # whether a chunk of it was sent
    echo: "EchoedPrompt | None" = None  # the prompt, until it was sent

    def clear_unsent(self) -> None:
        self.started = True
        self.text = ""
        self.tokens = []
        self.logprobs = []
        self.top_tokens = []
        self.echo = None


class TokenOffsets:
    """Where each token of a text begins.

    The tokens of one character that has several begin at the same place.

    Args:
        detokenizer: a new one, without stop strings.
        start: number of characters before the first token.
    """

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self.detokenizer = detokenizer
        self.start = start

    def add(self, tokens: Sequence[int]) -> list[int]:
        """Return the offset of each of the next tokens."""
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self.start + len(self.detokenizer.text))
            self.detokenizer.push([token])
        return offsets


class EchoedPrompt:
    """The text of a prompt, and where each of its tokens begins in it."""

    def __init__(self, served: ModelText, request: GenerationRequest, ids: list[int]) -> None:
        detokenizer = served.make_detokenizer(request, stops=())
        self.offsets = TokenOffsets(detokenizer).add(ids)
        detokenizer.push([], finish="length")
        self.text = detokenizer.text


class ResponseBuilder:
    """The response to one request: takes row updates, gives the whole response or its chunks."""

    ends_with_done: ClassVar[bool] = True  # a stream's last event is [DONE]

    def __init__(self, request: GenerationRequest, served: ModelText, jobs: list[Job]) -> None:
        self.request = request
        self.served = served
        self.jobs = jobs
        self.prompts = [job.request.prompt for job in jobs]
        self.id = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.choices: list[Choice] = []
        for prompt, ids in enumerate(self.prompts):
            echo = EchoedPrompt(served, request, ids) if request.echoes_prompt else None
            for _ in range(request.n):
                choice = Choice(len(self.choices), prompt, served.make_detokenizer(request))
                choice.echo = echo
                self.choices.append(choice)
        self.num_sampled = 0  # tokens

    @property
    def done(self) -> bool:
        return all(choice.finish for choice in self.choices)

    def add(self, update: RowUpdate) -> Choice:
        """Add a row's new tokens to its choice; returns the choice."""
        choice = self.choices[update.prompt * self.request.n + update.index]
        if self.request.token_limit == 0:  # only the prompt is wanted
            choice.finish = "length"
            return choice
        stop_ids = self.served.stop_ids.union(self.request.stop_token_ids)
        ends_with_stop_token = update.finish == "stop" and update.tokens[-1] in stop_ids
        choice.text += choice.detokenizer.push(update.tokens, update.finish, ends_with_stop_token)
        choice.tokens += update.tokens
        choice.logprobs += update.logprobs
        choice.top_tokens += update.top_tokens
        choice.finish = update.finish
        self.num_sampled += len(update.tokens)
        return choice

    # ---- the complete response

    def complete(self) -> dict[str, Any]:
        """Return the JSON of the complete response."""
        body = self._head("chat.completion" if self.request.is_chat else "text_completion")
        body["choices"] = [self._complete_choice(choice) for choice in self.choices]
        body["usage"] = self.usage()
        if self.request.is_chat and self.request.return_token_ids:
            body["prompt_token_ids"] = self.prompts[0]
        return body

    def _complete_choice(self, choice: Choice) -> dict[str, Any]:
        entry: dict[str, Any] = {"index": choice.number}
        if self.request.is_chat:
            entry["message"] = {"role": "assistant", **self.message_fields(choice)}
        else:
            entry["text"] = choice.echo.text + choice.text if choice.echo else choice.text
        entry |= self._details(choice) | self._finish_fields(choice)
        if self.request.return_token_ids and not self.request.is_chat:
            entry["prompt_token_ids"] = self.prompts[choice.prompt]
        return entry

    # ---- chunks of a stream

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks before the first token: a chat names the role of each choice."""
        if not self.request.is_chat:
            return []
        chunks: list[dict[str, Any]] = []
        for choice in self.choices:
            entry = {
                "index": choice.number,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            chunk = self._chunk([entry])
            if self.request.return_token_ids:
                chunk["prompt_token_ids"] = self.prompts[0]
            chunks.append(chunk)
        return chunks

    def next_chunk(self, choice: Choice) -> dict[str, Any] | None:
        """Return what is new in a choice; None when there is nothing to send yet."""
        sends_tokens = self.request.return_token_ids or self.request.num_top is not None
        has_news = choice.text or choice.finish or (sends_tokens and choice.tokens)
        # With tools, only the whole response shows which part of it is a call.
        if not has_news or (self.request.tool_schemas and not choice.finish):
            return None
        entry: dict[str, Any] = {"index": choice.number}
        if self.request.is_chat:
            entry["delta"] = self.message_fields(choice)
            for number, call in enumerate(entry["delta"].get("tool_calls", [])):
                call["index"] = number
        else:
            entry["text"] = choice.echo.text + choice.text if choice.echo else choice.text
        entry |= self._details(choice) | self._finish_fields(choice)
        if self.request.return_token_ids and not self.request.is_chat and not choice.started:
            entry["prompt_token_ids"] = self.prompts[choice.prompt]
        choice.clear_unsent()
        return self._chunk([entry])

    def next_chunks(self, choice: Choice) -> list[dict[str, Any]]:
        """Return the chunks with what is new in a choice; none when there is nothing to send."""
        chunk = self.next_chunk(choice)
        return [] if chunk is None else [chunk]

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks after the last token: the usage, with stream_options.include_usage."""
        if not self.request.include_usage:
            return []
        return [self._chunk([]) | {"usage": self.usage()}]

    def error_chunk(self, error: HttpError) -> dict[str, Any]:
        """Return the last chunk of a stream that fails."""
        return error_body(error)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._head("chat.completion.chunk" if self.request.is_chat else "text_completion")
        body["choices"] = choices
        if self.request.include_usage:
            body["usage"] = None
        return body

    # ---- parts of both

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}

    def usage(self) -> dict[str, int]:
        """Return the token counts."""
        num_prompt_tokens = sum(len(ids) for ids in self.prompts)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_sampled,
            "total_tokens": num_prompt_tokens + self.num_sampled,
        }

    def message_fields(self, choice: Choice) -> dict[str, Any]:
        """Return the content of a message, and its tool calls if the request has tools."""
        content, calls = self.served.find_tool_calls(self.request, choice.tokens)
        if not calls or choice.finish not in ("stop", "tool_calls"):
            return {"content": choice.text}
        choice.finish = "tool_calls"
        return {"content": content, "tool_calls": calls}

    def _finish_fields(self, choice: Choice) -> dict[str, Any]:
        return {
            "finish_reason": choice.finish or None,
            "stop_reason": choice.detokenizer.stopped_by,
        }

    def _details(self, choice: Choice) -> dict[str, Any]:
        """Return log-probs and token ids, if the request asks for them."""
        details: dict[str, Any] = {"logprobs": None}
        if self.request.num_top is not None:
            if self.request.is_chat:
                details["logprobs"] = self.chat_logprobs(choice)
            else:
                details["logprobs"] = self._completion_logprobs(choice)
        if self.request.return_token_ids:
            details["token_ids"] = choice.tokens
        return details

    def _completion_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Return the log-probs of the tokens; with echo, first those of the prompt.

        The prompt's first token has no log-prob, because no token is before it.
        """
        tokens: list[int] = []
        logprobs: list[float | None] = []
        top_tokens: list[TopTokens | None] = []
        offsets: list[int] = []
        if choice.echo is not None:
            job = self.jobs[choice.prompt]
            tokens += job.request.prompt
            logprobs += [None, *job.prompt_logprobs]
            top_tokens += [None, *job.prompt_top_tokens]
            offsets += choice.echo.offsets
        if choice.offsets is None:
            start = len(choice.echo.text) if choice.echo is not None else 0
            detokenizer = self.served.make_detokenizer(self.request, stops=())
            choice.offsets = TokenOffsets(detokenizer, start)
        offsets += choice.offsets.add(choice.tokens)
        tokens += choice.tokens
        logprobs += choice.logprobs
        top_tokens += choice.top_tokens
        top_logprobs: list[dict[str, float] | None] | None = None
        if self.request.num_top:
            rows = zip(tokens, logprobs, top_tokens, strict=True)
            top_logprobs = [self._top_logprobs(*row) for row in rows]
        return {
            "tokens": [self._token_name(token) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _top_logprobs(
        self, token: int, logprob: float | None, top: TopTokens | None
    ) -> dict[str, float] | None:
        """Return the log-probs of the most likely tokens and of the token itself, by name.

        Of several tokens with the same text, the most likely one counts.
        """
        if top is None or logprob is None:
            return None
        entry: dict[str, float] = {}
        for other, value in [*top, (token, logprob)]:
            entry.setdefault(self._token_name(other), value)
        return entry

    def chat_logprobs(self, choice: Choice) -> dict[str, Any]:
        """Return the log-probs of the tokens in the form of a chat."""
        top_tokens = choice.top_tokens or [[] for _ in choice.tokens]
        content: list[dict[str, Any]] = []
        for token, value, top in zip(choice.tokens, choice.logprobs, top_tokens, strict=True):
            entry = self._token_entry(token, value)
            entry["top_logprobs"] = [self._token_entry(*other) for other in top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _token_entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_name(token),
            "logprob": logprob,
            "bytes": list(self.served.token_bytes(token)),
        }

    def _token_name(self, token: int) -> str:
        if self.request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.served.token_text(token)
