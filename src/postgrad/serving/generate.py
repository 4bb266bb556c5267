"""POST /inference/v1/generate, tokens in and tokens out, as vLLM has it.

The clients of verifiers and prime-rl send `{"model", "token_ids", "sampling_params"}` and read
`choices[0].token_ids` with one log-prob per token, whose token is named `token_id:7`.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from postgrad.serving.requests import (
    ApiError,
    CompletionRequest,
    TokenCount,
    check_schema,
    parse_fields,
)
from postgrad.serving.responses import ResponseBuilder

# Keys of sampling_params that do not change the tokens.
IGNORED_PARAMS = {"routed_experts_prompt_start", "detokenize", "output_kind", "prompt_logprobs"}


class GenerateBody(BaseModel):
    """The body; a field with multimodal data is unknown and therefore refused."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""
    token_ids: list[int] = Field(min_length=1)
    sampling_params: dict[str, Any] = {}
    stream: bool = False
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool = True


class GenerateRequest(CompletionRequest):
    """One prompt of token ids; without max_tokens the response may fill the context."""

    max_tokens: TokenCount | None = None  # type: ignore[assignment]


def parse_generate(body: Any) -> GenerateRequest:
    """Return the request in the form that completions have. Raises ApiError."""
    given = check_schema(body, GenerateBody)
    if given.stream:
        raise ApiError(400, "stream is not supported here; leave it out", "stream")
    params = {
        name: value for name, value in given.sampling_params.items() if name not in IGNORED_PARAMS
    }
    fixed = {
        "model": given.model,
        "prompt": given.token_ids,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    return parse_fields({"logprobs": 0, **params, **fixed}, GenerateRequest)


def generate_response(builder: ResponseBuilder) -> dict[str, Any]:
    """Return the JSON of the response."""
    choices: list[dict[str, Any]] = []
    for choice in builder.choices:
        choices.append(
            {
                "index": choice.number,
                "token_ids": choice.tokens,
                "logprobs": builder.chat_logprobs(choice),
                "finish_reason": choice.finish,
            }
        )
    return {
        "request_id": builder.id,
        "choices": choices,
        "prompt_logprobs": None,
        "usage": builder.usage(),
    }
