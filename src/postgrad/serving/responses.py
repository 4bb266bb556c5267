"""Answers as OpenAI writes them, whole or in pieces, with the token ids and log-probs of what was sampled."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from postgrad.rollout.native.live import TopTokens
from postgrad.serving.detokenizer import TextStream
from postgrad.serving.requests import Ask
from postgrad.serving.served_model import Served
from postgrad.serving.worker import Event
from postgrad.web import HttpError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
}


def error_body(error: HttpError) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    kind = KINDS.get(
        error.status, "invalid_request_error" if error.status < 429 else "server_error"
    )
    kind = "rate_limit_error" if error.status == 429 else kind
    return {
        "error": {
            "message": error.reason,
            "type": kind,
            "param": vars(error).get("param"),
            "code": vars(error).get("code"),
        }
    }


@dataclass
class Choice:
    """One completion on its way."""

    number: int
    prompt: int
    stream: TextStream
    finish: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopTokens] = field(default_factory=list)
    text: str = ""
    offset: int = 0  # characters of the tokens told so far
    begun: bool = False


class Reply:
    """The answer to one request: takes events, gives the whole answer or its next piece."""

    def __init__(self, ask: Ask, served: Served, prompts: list[list[int]]) -> None:
        self.ask, self.served, self.prompts = ask, served, prompts
        self.id = f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.choices = [
            Choice(p * ask.n + i, p, served.stream(ask)) for p in range(len(prompts)) for i in range(ask.n)
        ]  # fmt: skip
        self.num_sampled = 0

    @property
    def done(self) -> bool:
        return all(choice.finish for choice in self.choices)

    def take(self, event: Event) -> Choice:
        """Add what has come to its choice; `choice.text` and the others hold what was not told yet."""
        choice = self.choices[event.prompt * self.ask.n + event.index]
        ended = event.finish == "stop" and event.tokens[-1] in self.served.stop_ids
        choice.text += choice.stream.push(event.tokens, event.finish, ended)
        choice.tokens += event.tokens
        choice.logprobs += event.logprobs
        choice.tops += event.tops
        choice.finish = event.finish
        self.num_sampled += len(event.tokens)
        return choice

    # ---- whole

    def whole(self) -> dict[str, Any]:
        kind = "chat.completion" if self.ask.chat else "text_completion"
        body = self._head(kind) | {
            "choices": [self._whole_choice(choice) for choice in self.choices],
            "usage": self.usage(),
        }
        if self.ask.chat and self.ask.token_ids:
            body["prompt_token_ids"] = self.prompts[0]
        return body

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        content = (
            {"message": {"role": "assistant", "content": choice.text}}
            if self.ask.chat
            else {"text": choice.text}
        )
        out = {"index": choice.number, **content, **self._details(choice), **self._end(choice)}
        if self.ask.token_ids and not self.ask.chat:
            out["prompt_token_ids"] = self.prompts[choice.prompt]
        return out

    # ---- in pieces

    def opening(self) -> list[dict[str, Any]]:
        """What is said before the first token: a chat names its role."""
        if not self.ask.chat:
            return []
        ids = {"prompt_token_ids": self.prompts[0]} if self.ask.token_ids else {}
        delta = {"role": "assistant", "content": ""}
        return [
            self._piece(
                [{"index": c.number, "delta": delta, "logprobs": None, "finish_reason": None}]
            )
            | ids
            for c in self.choices
        ]

    def piece(self, choice: Choice) -> dict[str, Any] | None:
        """What has come of a choice since its last piece; None when there is nothing to tell yet."""
        ids_told = self.ask.token_ids or self.ask.num_top is not None
        if not (choice.text or choice.finish or (ids_told and choice.tokens)):
            return None
        content = {"delta": {"content": choice.text}} if self.ask.chat else {"text": choice.text}
        out = {"index": choice.number, **content, **self._details(choice), **self._end(choice)}
        if self.ask.token_ids and not self.ask.chat and not choice.begun:
            out["prompt_token_ids"] = self.prompts[choice.prompt]
        choice.begun, choice.text, choice.tokens, choice.logprobs, choice.tops = (
            True,
            "",
            [],
            [],
            [],
        )
        return self._piece([out])

    def usage_piece(self) -> dict[str, Any]:
        return self._piece([]) | {"usage": self.usage()}

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._head("chat.completion.chunk" if self.ask.chat else "text_completion") | {
            "choices": choices
        }
        return body | {"usage": None} if self.ask.stream_usage else body

    # ---- parts

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}

    def usage(self) -> dict[str, int]:
        prompt = sum(len(ids) for ids in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_sampled,
            "total_tokens": prompt + self.num_sampled,
        }

    def _end(self, choice: Choice) -> dict[str, Any]:
        return {"finish_reason": choice.finish or None, "stop_reason": choice.stream.stopped_by}

    def _details(self, choice: Choice) -> dict[str, Any]:
        """Log-probs and token ids, as far as they were asked for."""
        out: dict[str, Any] = {"logprobs": None}
        if self.ask.num_top is not None:
            out["logprobs"] = (
                self._chat_logprobs(choice) if self.ask.chat else self._logprobs(choice)
            )
        if self.ask.token_ids:
            out["token_ids"] = choice.tokens
        return out

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        names = [self._name(token) for token in choice.tokens]
        offsets: list[int] = []
        for token in choice.tokens:
            offsets.append(choice.offset)
            choice.offset += len(self.served.token_text(token))
        tops = (
            [{self._name(token): value for token, value in top} for top in choice.tops]
            if self.ask.num_top
            else None
        )
        return {
            "tokens": names,
            "token_logprobs": choice.logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _chat_logprobs(self, choice: Choice) -> dict[str, Any]:
        tops = choice.tops or [[] for _ in choice.tokens]
        content = [
            self._named(token, value) | {"top_logprobs": [self._named(*other) for other in top]}
            for token, value, top in zip(choice.tokens, choice.logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, value: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": value,
            "bytes": list(self.served.token_text(token).encode()),
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.ask.named_ids else self.served.token_text(token)
