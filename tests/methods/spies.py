"""Ports that record what a method calls, for the tests of GRPO's family."""

import torch

from postgrad.model.metrics import MetricAccumulator
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL
from postgrad.types import Batch


class Spy:
    """A port that notes how it is called."""

    def __init__(self, port, **own) -> None:
        self.port, self.calls = port, []
        self.__dict__.update(own)

    def __getattr__(self, name: str):
        found = getattr(self.port, name)
        if not callable(found):
            return found

        def call(*arguments):
            self.calls.append((name, arguments))
            return found(*arguments)

        return call

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)


def gradient(policy: LocalPolicy, batch: Batch) -> torch.Tensor:
    """The gradient of one optimizer step, flat; cleared."""
    policy.accumulate(
        policy.objective.prepare(batch.select(range(len(batch)))), FULL, MetricAccumulator()
    )
    masters = policy.optimizer.masters.values()
    flat = torch.cat(
        [(torch.zeros_like(m) if m.grad is None else m.grad).flatten() for m in masters]
    ).double()
    policy.optimizer.adam.zero_grad(set_to_none=True)
    return flat
