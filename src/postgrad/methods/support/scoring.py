"""The score stage: texts to scores, scores to columns, and rows that could not be scored."""

from collections.abc import Sequence

import torch

from postgrad.errors import RunError
from postgrad.methods.ports import Ports
from postgrad.methods.step import Step
from postgrad.types import TOOL, Batch, Failure, Problem, Score


def policy_texts(ports: Ports, batch: Batch) -> Sequence[str | None]:
    """Return what the policy wrote in each row, without tool output; None if there is nothing.

    All rows of one agent have the text of its last reply.
    """
    if "answer" in batch.rows:
        return batch.rows["answer"]
    own = batch.tokens["token_source"] != TOOL
    if bool(own.all()):
        return batch.rows["text"]
    rows = zip(batch.response.split(), own.split(batch.response.lengths.tolist()), strict=True)
    return [ports.encoder.decode(ids[keep].tolist()) for ids, keep in rows]


def score_texts(
    ports: Ports,
    batch: Batch,
    problems: Sequence[Problem],
    texts: Sequence[str | None],
    no_output_score: float,
) -> list[Score | Failure]:
    """Return the verifier's result per row's text; `no_output_score` where the text is None."""
    indices = [i for i, text in enumerate(texts) if text is not None]

    def token_ids() -> list[list[int]]:
        rows = batch.response.split()
        return [rows[i].tolist() for i in indices]

    written = [text for text in texts if text is not None]
    results = ports.scorer.score([problems[i] for i in indices], written, token_ids)
    scores: list[Score | Failure] = [Score(no_output_score) for _ in texts]
    for i, result in zip(indices, results, strict=True):
        scores[i] = result
    return scores


def add_scores(batch: Batch, results: Sequence[Score | Failure]) -> None:
    """Set the row columns `reward`, `reward/PART` and `failure`; NaN where there is no number."""
    nan = float("nan")
    batch.rows["failure"] = [
        f"{one.kind}: {one.reason}" if isinstance(one, Failure) else "" for one in results
    ]
    batch.rows["reward"] = torch.tensor(
        [one.value if isinstance(one, Score) else nan for one in results]
    )
    scores = [one for one in results if isinstance(one, Score)]
    for name in sorted({name for score in scores for name in score.parts}):
        parts = [one.parts.get(name, nan) if isinstance(one, Score) else nan for one in results]
        batch.rows[f"reward/{name}"] = torch.tensor(parts)


def reward_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics of the rows' rewards and their parts."""
    metrics: dict[str, float] = {}
    for name, column in batch.rows.items():
        if name == "reward":
            metrics["reward/mean"] = float(column.double().mean())
            metrics["reward/std"] = float(column.double().std(unbiased=False))
        elif name.startswith("reward/"):
            metrics[name] = float(column.double().nanmean())
    return metrics


class NoRowsLeft(Exception):
    """All rows of a refill failed; the rows of the step that have a score are enough to go on."""


def drop_failures(batch: Batch, step: Step, max_rate: float) -> Batch:
    """Return the rows without a `failure`. The others are recorded in the step and counted.

    Raises: RunError if all failed, or more than `max_rate` of them (reward.max_failure_rate). In a
        refill this counts all rows of the step, and NoRowsLeft is raised if all of its own failed.
    """
    failed = torch.tensor([bool(reason) for reason in batch.rows["failure"]])
    before = step.metrics.get("reward/failures", 0.0)
    step.metrics["reward/failures"] = before + float(failed.sum())
    if not bool(failed.any()):
        return batch
    rate = float(failed.sum()) / (len(batch) + step.num_scored)
    all_failed = bool(failed.all())
    if rate > max_rate or (all_failed and not step.num_scored):
        example = next(reason for reason in batch.rows["failure"] if reason)
        raise RunError(
            f"{rate:.0%} of the responses could not be scored "
            f"(reward.max_failure_rate={max_rate:g}); the first: {example}"
        )
    step.failed.append(batch.select(torch.nonzero(failed)[:, 0]))
    if all_failed:
        raise NoRowsLeft
    return batch.select(torch.nonzero(~failed)[:, 0])
