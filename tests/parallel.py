"""Policies in one process and on gloo ranks, and their results, for tests that compare them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import SumOfLogprobs, save_family
from packaging.version import Version
from tiny_runs import config_of, random_batch

from postgrad.model.load import load
from postgrad.model.lora import adapter_parameters, add_adapters
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.policy import LocalPolicy
from postgrad.model.ranks import Ranks
from postgrad.model.sharded import ShardedPolicy
from postgrad.model.views import FULL

CPU = torch.device("cpu")
BATCH = random_batch(1, groups=5, samples=4, longest_prompt=9, longest=12)
TENSOR = "cluster.tensor_parallel=2"
TENSOR_4 = "cluster.tensor_parallel=4"  # pads the vocabulary of 18
EXPERT = "cluster.expert_parallel=2"
SEQUENCE = "cluster.sequence_parallel=2"
LORA = "model.lora.rank=2"
HAS_EXPERTS = Version(transformers.__version__) >= Version("5.19")
needs_experts = pytest.mark.skipif(
    not HAS_EXPERTS, reason="experts of transformers before 5.19 compute all tokens"
)


class LogprobsAndEntropy(SumOfLogprobs):
    """The weighted sum of log-probs and entropies."""

    def loss(self, batch, current, metrics):
        entropy = (current.entropy * batch.tokens["advantages"].abs()).sum()
        return super().loss(batch, current, metrics) + 0.3 * entropy


@torch.no_grad()
def fill_second_matrices(model):
    """Draw the second matrices of adapters: they are zero, and the first have no gradient then."""
    generator = torch.Generator().manual_seed(1)
    for name, p in adapter_parameters(model).items():
        if ".lora_B." in name:
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))


def make_policy(folder, settings, device, make):
    words = ["training.token_budget=60", f"model.device={device.type}", *settings]
    config = config_of("grpo", folder, *words)
    loaded = load(config.model, device)
    if config.model.lora.rank:
        add_adapters(loaded.model, config.model.lora, seed=0)
        fill_second_matrices(loaded.model)
    return make(config, loaded)


def local_policy(
    folder, settings=(), objective=LogprobsAndEntropy, device: torch.device = CPU
) -> LocalPolicy:
    def make(config, loaded):
        return LocalPolicy(config, loaded, objective())

    shared = [word for word in settings if word.startswith("model.")]
    return make_policy(folder, shared, device, make)


def sharded_policy(
    folder, settings, objective=LogprobsAndEntropy, device: torch.device = CPU
) -> ShardedPolicy:
    def make(config, loaded):
        ranks = Ranks.from_process_group(device, config.cluster)
        return ShardedPolicy(config, loaded, objective(), ranks)

    return make_policy(folder, ["cluster=ray", *settings], device, make)


def compute(policy, batch=BATCH) -> dict[str, torch.Tensor]:
    """Return log-probs, those of the top tokens, gradients by name, and the gradient norm."""
    results = policy.logprobs(batch)
    results["top logprobs"] = policy.top_logprobs(batch, 11)["logprobs"]
    policy.accumulate(batch, FULL, MetricAccumulator())
    assert policy.optimizer.has_gradients()
    gradients = {name: m.grad for name, m in policy.optimizer.masters.items()}
    results["norm"] = policy.optimizer.norm(list(gradients.values()))
    for name, gradient in gradients.items():
        full = gradient
        if isinstance(policy, ShardedPolicy):
            full = policy.ranks.full_tensor(gradient, policy.optimizer.sharded_params[name])
        results[f"gradient of {name}"] = full
    return {name: value.detach().clone() for name, value in results.items()}


def difference(expected, actual) -> str:
    """Return where the results differ by more than 1e-5 of their scale; empty if nowhere."""
    largest = max(float(v.abs().max()) for name, v in expected.items() if "gradient" in name)
    for name, value in expected.items():
        scale = largest if "gradient" in name else 1.0
        try:
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5 * scale)
        except AssertionError as error:
            return f"{name}: {error}"
    return ""


def folder_maker(root: Path) -> Callable[[str, dict[str, Any]], Path]:
    """Return a function that gives the folder of a family with changes; each is written once."""

    def folder(family: str, changes: dict[str, Any]) -> Path:
        path = root / "-".join([family, *map(str, changes.values())])
        return path if path.exists() else save_family(path, family, **changes)

    return folder
