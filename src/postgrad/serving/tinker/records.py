"""What the service keeps: sessions, training clients and samplers, and its limits."""

from dataclasses import dataclass, field
from typing import Any

from postgrad.serving.tinker.adapters import LoraShape
from postgrad.serving.tinker.checkpoints import Checkpoint, RunInfo
from postgrad.serving.tinker.trained_model import SamplerWeights, TrainedAdapter, TrainedModel
from postgrad.web import HttpError


@dataclass(frozen=True)
class Limits:
    """Limits of the server."""

    clients: int = 16  # training clients at the same time
    samplers: int = 64  # adapters of samplers in memory
    waiting: int = 1024  # requests without a result
    idle_s: float = 1800.0  # a session without a heartbeat for this long is dropped


@dataclass
class ClientSession:
    """One ServiceClient."""

    session_id: str
    user_metadata: dict[str, Any] | None
    display_name: str | None
    seen_at: float
    training_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)


@dataclass
class TrainingClient:
    """One training client; `trained` is there once the worker has made it."""

    model_id: str
    session_id: str
    shape: LoraShape
    info: RunInfo
    trained: TrainedAdapter | None = None

    def adapter(self) -> TrainedAdapter:
        if self.trained is None:
            raise HttpError(404, f"the training client {self.model_id} could not be made")
        return self.trained


@dataclass
class Sampler:
    """What a sampling client samples from.

    `weights` is None for the base model, and for a saved adapter that is not in memory now.
    """

    sampler_id: str
    session_id: str
    checkpoint: Checkpoint | None = None
    shape: LoraShape | None = None
    weights: SamplerWeights | None = None

    def load(self, model: TrainedModel) -> SamplerWeights | None:
        """Return the weights; called in the worker's thread."""
        if self.weights is None and self.checkpoint is not None and self.shape is not None:
            self.weights = model.read_sampler(self.shape, self.checkpoint.folder)
        return self.weights
