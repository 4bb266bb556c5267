"""The base class of objectives: what an algorithm decides in the model's process.

An objective is built from the configuration alone, in this process or in a worker. It sees the
batch and the configuration, and nothing that a stage keeps. What a loss reads from a stage is a
column of the batch.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from postgrad.algorithms.aggregation import token_weights
from postgrad.config.schema import Config
from postgrad.errors import UserCode
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import FULL, TokenOutputs, View
from postgrad.types import Batch
from postgrad.user_code import check_functions, load_object


class Objective:
    """Minimizes `loss`. A user's own: method.objective=file.py:Class."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.settings: Any = config.method

    def check(self) -> None:
        """Raise ConfigError for settings that the loss cannot use. Called on the driver."""
        if type(self).loss is Objective.loss:
            raise UserCode(
                f"method={self.settings.name}: {type(self).__name__} has no loss; derive the "
                "method from one that has, or set its Objective to a class that defines "
                "loss(self, batch, current, metrics)"
            )

    def check_model(self, model: Any) -> None:
        """Raise ConfigError for a model that cannot be trained. Called once it is loaded."""

    def view(self, step: int) -> View:
        """Return which policy is trained at this step: the full one, or an internal one."""
        return FULL

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]:
        """Return factors of the learning rate by parameter name; 1 for names that are absent."""
        return {}

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch of one optimizer step, with the token column `loss_weight`.

        Called once, before the batch is split. May drop rows without gradient.
        """
        batch.tokens["loss_weight"] = self.loss_weight(batch)
        return batch

    def loss_weight(self, batch: Batch) -> Tensor:
        """Return (tokens,) the weight of each token's loss, from counts over the whole batch."""
        return self.token_weights(self.settings.aggregation, batch.tokens["loss_mask"], batch)

    def token_weights(self, aggregation: str, mask: Tensor, batch: Batch) -> Tensor:
        """Return (tokens,) weights whose sum with token losses is their mean by `aggregation`."""
        return token_weights(
            aggregation,
            mask,
            batch.row_index,
            len(batch),
            self.config.rollout.max_response_tokens,
            groups=batch.rows["group"],
        )

    def row_groups(self, batch: Batch) -> Sequence[int] | None:
        """Return ids of rows that one loss reads jointly; None if it reads each row alone."""
        return None

    def target_ids(self, batch: Batch) -> Tensor:
        """Return (tokens,) ids whose log-probs the loss reads, or (tokens, ids) for several."""
        return batch.response.values

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        """Return the sum of token losses times `loss_weight` over a micro-batch, a scalar.

        Micro-batches add up: any split of the rows gives the same total.
        """
        raise NotImplementedError


def build_objective(config: Config, kind: type[Objective]) -> Objective:
    """Return the objective of a run: method.objective if it is set, or `kind`, its method's.

    The driver and the model's process call this with the same configuration. A user's class is
    derived from the method's: otherwise it would drop what the method trains, such as BuPO's view.
    """
    name = config.method.objective
    if not name:
        return kind(config)

    def is_derived(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, kind)

    what = f"class derived from {kind.__name__}"
    found = load_object(name, f"method.objective={name}", is_derived, what)
    check_functions(found)
    return found(config)
