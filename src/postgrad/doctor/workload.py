"""The data of a run as numbers of tokens, read as the run itself reads them."""

from types import SimpleNamespace
from typing import Any

from postgrad.data.feed import Feed
from postgrad.errors import ConfigError, RunError
from postgrad.methods.method import Ports, Step
from postgrad.sizing.plan import GroupLengths, Workload
from postgrad.training.prepare import Prepared


def read_workload(run: Prepared) -> Workload:
    """Return the lengths of the first step, composed by the method. Nothing is sampled.

    Raises ConfigError if the data lack what the method needs.
    """
    config = run.config
    method = run.method
    engine: Any = SimpleNamespace(shares_weights=not config.cluster.engine_apart)
    method.bind(Ports(None, engine, run.scorer, run.encoder))  # type: ignore[arg-type]
    step = Step(1, Feed(run.train, config.seed, config.data.shuffle))
    try:
        composed = method.compose(method.draw(None, step), step)
    except RunError as error:
        raise ConfigError(str(error)) from error
    groups: list[GroupLengths] = []
    for group in composed:
        prompt = len(method.encode_row(run.encoder, group.problem).prompt)
        given = tuple(len(trajectory.response) for trajectory in group.given_rows)
        groups.append(GroupLengths(prompt, given, group.num_samples, method.traits.rows_per_loss))
    rows = [method.encode_row(run.encoder, problem) for problem in [*run.train, *run.held_out]]
    longest = max(len(row.prompt) for row in rows)
    return Workload(groups, longest, len(run.held_out) if method.needs_verifier() else 0)
