"""The JSON bodies of requests, as the `tinker` package 0.36 sends them.

A field that is not listed here is refused: a newer client may mean something by it.
"""

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from postgrad.web import HttpError

MAX_RANK = 1024
MAX_SAMPLES = 4096
MAX_TOP = 100

Parsed = TypeVar("Parsed", bound=BaseModel)


class Body(BaseModel):
    """A request's body; `type` names the request and is not needed."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: str = ""


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class Heartbeat(Body):
    session_id: str


class LoraSettings(Body):
    rank: int = Field(ge=1, le=MAX_RANK)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerSettings(BaseModel):
    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraSettings
    optimizer_config: OptimizerSettings = OptimizerSettings()


class ModelRequest(Body):
    """get_info and unload_model."""

    model_id: str


class AdamParams(Body):
    learning_rate: FiniteFloat = Field(ge=0)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    eps: FiniteFloat = Field(gt=0)
    weight_decay: FiniteFloat = Field(0.0, ge=0)
    grad_clip_norm: FiniteFloat = Field(0.0, ge=0)


class OptimStep(Body):
    model_id: str
    seq_id: int
    adam_params: AdamParams


class SaveWeights(Body):
    """save_weights, save_weights_for_sampler and save_weights_external."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    model_id: str
    seq_id: int
    path: str
    optimizer: bool


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class ModelInput(BaseModel):
    chunks: list[TextChunk]


class SamplingParams(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: FiniteFloat = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleBody(Body):
    sampling_session_id: str
    seq_id: int
    num_samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    prompt: ModelInput
    sampling_params: SamplingParams
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=MAX_TOP)
    topk_sample_logprobs: int = Field(0, ge=0, le=MAX_TOP)
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None


class RequestId(Body):
    request_id: str
    allow_metadata_only: bool = False


class WeightsInfo(Body):
    tinker_path: str


class Ttl(Body):
    ttl_seconds: int | None = None


class AnyBody(BaseModel):
    """A body that is not read: client configuration and telemetry."""


def parse(kind: type[Parsed], body: Any) -> Parsed:
    """Return the body as this kind of request. Raises HttpError: 422 that names the field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the body"
        raise HttpError(422, f"{field}: {first['msg']}; see docs/tinker.md") from None
