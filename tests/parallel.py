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

from postgrad.cluster.host import load_role
from postgrad.model.load.load import load
from postgrad.model.lora import adapter_parameters, add_adapters
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.parallel.ranks import Ranks
from postgrad.model.parallel.sharded import ShardedModel
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL, after
from postgrad.model.scored import LocalCritic

CPU = torch.device("cpu")
BATCH = random_batch(1, groups=5, samples=4, longest_prompt=9, longest=12)
# Few tokens: Triton's interpreter is slow.
SHORT_BATCH = random_batch(10, groups=1, samples=3, longest_prompt=3, longest=3)
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


def make_config(folder, settings, device: torch.device = CPU):
    words = ["training.token_budget=60", f"model.device={device.type}", *settings]
    return config_of("grpo", folder, *words)


def with_adapters(config, loaded):
    """Add adapters to a loaded model if the configuration has some; return it."""
    if config.model.lora.rank:
        add_adapters(loaded.model, config.model.lora, seed=0)
        fill_second_matrices(loaded.model)
    return loaded


def local_settings(settings) -> list[str]:
    """Return the settings that also apply to one process."""
    return [word for word in settings if word.startswith(("model.", "optimizer."))]


def local_policy(
    folder, settings=(), objective=LogprobsAndEntropy, device: torch.device = CPU
) -> LocalPolicy:
    config = make_config(folder, local_settings(settings), device)
    return LocalPolicy(config, with_adapters(config, load(config.model, device)), objective())


def sharded_policy(
    folder, settings, objective=LogprobsAndEntropy, device: torch.device = CPU
) -> LocalPolicy:
    """Return a policy on the ranks; each of them loads the model on its device."""
    config = make_config(folder, ["cluster=ray", *settings], device)
    loaded = with_adapters(config, load(config.model, device))
    ranks = Ranks.from_process_group(device, config.cluster)
    return LocalPolicy(config, loaded, objective(), ranks)


def rank_policy(
    folder, settings, device: torch.device, objective=LogprobsAndEntropy
) -> LocalPolicy:
    """Return a policy on the ranks, loaded as by a run: in host memory, by the first rank only."""
    config = make_config(folder, ["cluster=ray", *settings], device)
    ranks = Ranks.from_process_group(device, config.cluster)
    loaded = load_role(config, "policy", config.model.path, ranks)
    return LocalPolicy(config, with_adapters(config, loaded), objective(), ranks)


class SquaredError:
    """What a critic learns here: the advantages."""

    def prepare_values(self, batch):
        return batch

    def value_loss(self, batch, values, metrics):
        return (values - batch.tokens["advantages"]).square().sum()


def local_critic(folder, settings=(), device: torch.device = CPU) -> LocalCritic:
    config = make_config(folder, local_settings(settings), device)
    return LocalCritic(config, load(config.model, device), SquaredError(), 1e-2)


def rank_critic(folder, settings, device: torch.device = CPU) -> LocalCritic:
    """Return a critic on the ranks that is loaded as a run does."""
    config = make_config(folder, ["cluster=ray", *settings], device)
    ranks = Ranks.from_process_group(device, config.cluster)
    loaded = load_role(config, "critic", config.model.path, ranks)
    return LocalCritic(config, loaded, SquaredError(), 1e-2, ranks=ranks)


def compute_critic(critic, batch=BATCH) -> dict[str, torch.Tensor]:
    """Return a critic's values after two updates, and the norms of its gradients.

    Its head starts at zero, so the model below it has a gradient in the second update only.
    """
    norms = [critic.update(batch, step)["critic/grad_norm"] for step in (1, 2)]
    # As a gradient: it sets the scale by which difference() measures norms.
    return {"values": critic.values(batch), "norms of the gradient": torch.tensor(norms)}


def compute(policy, batch=BATCH) -> dict[str, torch.Tensor]:
    """Return log-probs, those of the top tokens, gradients by name, and the gradient norm."""
    results = policy.logprobs(batch)
    results["top logprobs"] = policy.top_logprobs(batch, 11)["logprobs"]
    policy.accumulate(batch, FULL, MetricAccumulator())
    assert policy.optimizer.has_gradients()
    masters = policy.optimizer.masters.items()
    gradients = {name: m.grad for name, m in masters if m.grad is not None}
    results["norm"] = policy.optimizer.norm(list(gradients.values()))
    for name, gradient in gradients.items():
        full = gradient
        if isinstance(policy.ranks, ShardedModel):
            full = policy.ranks.full_tensor(policy.optimizer.sharded_params[name], gradient)
        results[f"gradient of {name}"] = full
    return {name: value.detach().clone() for name, value in results.items()}


def compute_with_step(policy, batch=BATCH) -> dict[str, torch.Tensor]:
    """Return compute(), and log-probs after an optimizer step."""
    results = compute(policy, batch)
    policy.optimizer.step(1e-3)
    results["logprobs after a step"] = policy.logprobs(batch)["logprobs"]
    return results


def step_on_first_block(policy, batch=BATCH) -> dict[str, torch.Tensor]:
    """Return log-probs of BuPO's policy after the first block, after a step on it."""
    view = after(1)
    policy._freeze_unused(view)
    policy.accumulate(batch, view, MetricAccumulator())
    assert policy.optimizer.has_gradients()
    policy.optimizer.step(1e-3)
    return {"logprobs of the first block": policy.logprobs(batch, view)["logprobs"]}


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
