"""The contract of all backends: what every method of the ports returns, in a fixed order."""

from pathlib import Path

from tiny_runs import random_batch

from postgrad.errors import ConfigError, RunError
from postgrad.model.port import after
from postgrad.rollout.engine import Request, Sampling, trajectory_seed
from postgrad.types import Batch

REQUESTS = [
    Request(prompt, [trajectory_seed(3, 1, str(i), j) for j in range(3)])
    for i, prompt in enumerate([[1, 2, 3], [4, 15], [9, 8, 7, 6]])
]
SAMPLING = Sampling(1.0, 10)


def use_ports(policy, engine, folder: Path) -> dict:
    """Call every method of the ports; return the results.

    The order matters: each call depends on the updates before it.
    """
    results = {"shares_weights": engine.shares_weights}
    batch = random_batch(31)
    results["logprobs"] = policy.logprobs(batch)
    results["inside"] = policy.logprobs(batch, after(1))
    results["generated"] = engine.generate(REQUESTS, SAMPLING)
    results["greedy"] = engine.generate(REQUESTS, Sampling(0.0, 10))
    updated = random_batch(32)
    results["metrics"] = policy.update(updated, 1)
    del results["metrics"]["memory_gib"]
    results["columns"] = set(updated.tokens)
    stats = policy.token_stats()
    results["token_stats"] = {name: one.nan_to_num(-1.0) for name, one in stats.items()}
    results["before publish"] = engine.generate(REQUESTS, SAMPLING)
    if not engine.shares_weights:
        engine.publish(policy.weights())
    results["after publish"] = engine.generate(REQUESTS, SAMPLING)
    policy.save(str(folder))
    results["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    policy.update(random_batch(33), 2)
    results["after second update"] = policy.logprobs(batch)
    policy.load(str(folder))
    results["after load"] = policy.logprobs(batch)
    policy.update(random_batch(33), 2)
    results["weights"] = dict(policy.weights())
    mask = {"loss_mask": batch.tokens["loss_mask"]}
    no_columns = Batch(batch.prompt, batch.response, mask, dict(batch.rows))
    for name, refused in {
        "refused": lambda: policy.logprobs(batch, after(99)),
        "failed": lambda: engine.generate([Request([1] * 600, [0])], SAMPLING),
        "broken": lambda: policy.update(no_columns, 3),
    }.items():
        try:
            refused()
        except (ConfigError, RunError) as error:
            results[name] = type(error), str(error)
    results["alive"] = policy.logprobs(batch)
    return results
