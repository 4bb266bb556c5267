"""ReMax's baseline: the reward of one greedy response per problem."""

import torch

from postgrad.methods.base import Method, Step
from postgrad.rollout.engine import make_sampling
from postgrad.types import Batch, Failure, Score


def add_greedy_rewards(method: Method, batch: Batch, step: Step) -> Batch:
    """Sets the row column `greedy_reward`.

    Rows of a problem whose greedy response could not be scored leave the batch.
    """
    uids = list(dict.fromkeys(batch.rows["uid"]))
    problems = [step.data.find(uid) for uid in uids]
    sampling = make_sampling(method.config.rollout, temperature=0.0)
    requests = [(problem, [0], []) for problem in problems]
    completions = method.generate(requests, sampling, step.number)
    texts = [method.ports.prompts.decode(each[0].policy_tokens) for each in completions]
    results = method.ports.scorer.score(
        problems, texts, lambda: [list(each[0].tokens) for each in completions]
    )
    verdicts = dict(zip(uids, results, strict=True))
    rewards: list[float] = []
    failures: list[str] = []
    for uid in batch.rows["uid"]:
        verdict = verdicts[uid]
        rewards.append(verdict.value if isinstance(verdict, Score) else float("nan"))
        failed = isinstance(verdict, Failure)
        failures.append(f"greedy response: {verdict.kind}: {verdict.reason}" if failed else "")
    batch.rows["greedy_reward"] = torch.tensor(rewards)
    batch.rows["failure"] = failures
    return method.drop_failures(batch, step)
