"""evaluate(), generate() and score()."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.api.models import as_model, model_path
from postgrad.api.rewards import Reward, as_verifier_setting
from postgrad.api.rows import HELD_OUT, as_problems, as_source, to_jsonl
from postgrad.api.run import Run, _pandas
from postgrad.api.sampler import Prompt, Sampler
from postgrad.api.settings import Settings
from postgrad.data.sets import SET_NAME
from postgrad.errors import Conflict, Missing, WrongValue
from postgrad.evaluation.folder import read_rows
from postgrad.evaluation.model import find_model
from postgrad.evaluation.plan import make_plan
from postgrad.evaluation.progress import Progress
from postgrad.evaluation.report import table
from postgrad.evaluation.run import evaluate as run_evaluation
from postgrad.evaluation.settings import full_key, read_settings
from postgrad.model.threads import kept_threads
from postgrad.problem import Failure, Score
from postgrad.user_code import PYTHON, PythonObject
from postgrad.verifiers.scorer import AUTO, Scorer

if TYPE_CHECKING:
    import pandas

ALIASES = {"max_tokens": "rollout.max_response_tokens", "group_size": "rollout.samples"}


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        summary: what summary.json holds: per set avg@k, pass@k, maj@k and their intervals.
        folder: the folder with summary.json, report.md and one .jsonl file per set.
    """

    summary: dict[str, Any]
    folder: Path

    @property
    def accuracy(self) -> float:
        """The share of right responses, as the mean over the sets."""
        sets = self.summary["sets"].values()
        return sum(one["avg"]["value"] for one in sets) / len(sets)

    @property
    def responses(self) -> pandas.DataFrame:
        """One row per response: set, uid, prompt, response, score, right ..."""
        rows = []
        for name in self.summary["sets"]:
            for _, row in read_rows(self.folder / f"{name}.jsonl"):
                rows.append({"set": name, **row})
        return _pandas().DataFrame(rows)

    def __repr__(self) -> str:
        return table(self.summary)


@kept_threads()
def evaluate(
    model: Any,
    data: Any,
    n: int = 1,
    *,
    tokenizer: Any = None,
    reward: Reward | Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    limit: int | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    progress: bool = True,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Evaluation:
    """Sample and score answers of a model, as `postgrad eval MODEL data=SET n=16` does.

    The same call continues an evaluation that was stopped and gives the same files. With a reward
    that is a Python function it does so with `out=` only; do not change the function then.

        result = postgrad.evaluate(run, data="gsm8k/test.jsonl", n=16)
        result.accuracy, result.summary, result.responses

    Args:
        model: a Run (its newest checkpoint), a path, a hub id, or `(model, tokenizer)` in memory.
        data: problems as in `train`; a dict gives names to several sets.
        n: responses per problem; more than 1 are sampled at temperature 1 unless given.
        tokenizer: the tokenizer of a model in memory, if `model` is not a pair.
        reward: as in `train`; by default that of the run.
        reward_weights: one factor per reward of a list.
        temperature: 0 is greedy.
        max_tokens: longest response in tokens.
        limit: use only the first problems of each set.
        seed: random seed.
        out: the result folder; by default in the run folder or in eval/.
        progress: show the progress.
        settings: any setting of `postgrad eval` by its name.
        **more: any setting of `postgrad eval` by its short name, such as top_p=0.95.

    Raises:
        ConfigError: an argument is wrong; nothing was written.
        RunError: too many responses could not be scored.
    """
    if isinstance(model, Run):
        if reward is None and reward_weights is None:
            verifier: str | None = model.reward
        else:
            verifier = as_verifier_setting(reward, reward_weights)
        model = str(model.folder)
    else:
        verifier = as_verifier_setting(reward, reward_weights)
    values = Settings()
    given = {
        "n": n,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "limit": limit,
        "seed": seed,
        "out": None if out is None else str(out),
        **(settings or {}),
        **more,
    }
    with ExitStack() as stack:
        path = stack.enter_context(model_path(as_model(model, tokenizer)))
        sets = stack.enter_context(_sets(data))
        for name, value in given.items():
            if value is not None:
                values.add(full_key(ALIASES.get(name, name)), value)
        if isinstance(verifier, PythonObject) and out is None:
            # Another function may have the same name, so its results get a folder of their own.
            text = verifier.removeprefix(f"{PYTHON}:")
            verifier = PythonObject(f"{text} {secrets.token_hex(4)}", verifier.value)
        if verifier is not None:
            values.add("reward.verifier", verifier)
        target = find_model(path)
        config = read_settings(target.path, [("data.sets", sets), *values.overrides], target.config)
        if out is not None:
            config.out = str(out)
        values.attach(config)
        plan = make_plan(config, target)
        summary = run_evaluation(plan, Progress(progress))
    return Evaluation(summary, plan.folder)


@contextmanager
def _sets(data: Any) -> Iterator[str]:
    """Yield the value of `data=`; rows in memory are files meanwhile."""
    named = data if isinstance(data, Mapping) else {"": data}
    with tempfile.TemporaryDirectory() as folder:
        parts: list[str] = []
        for name, one in named.items():
            if isinstance(data, Mapping) and not SET_NAME.fullmatch(str(name)):
                raise WrongValue(
                    f"data has the key {name!r}, which is no name of a set; use letters, digits, "
                    "_, . and -",
                    at="data",
                )
            source = as_source(one, f"data[{name!r}]" if name else "data", HELD_OUT[::-1])
            if not isinstance(source, str):
                file = Path(folder) / f"{name or 'rows'}.jsonl"
                file.write_text(to_jsonl(source))
                source = str(file)
            parts.append(f"{name}={source}" if name else source)
        yield ",".join(parts)


def generate(
    model: Any,
    prompts: Prompt | Sequence[Prompt],
    n: int = 1,
    *,
    tokenizer: Any = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Responses of a model to one prompt or to several.

        postgrad.generate("smollm2", "What is 3+3?")               # a text
        postgrad.generate("smollm2", ["2+2=", "3+3="])             # a list of texts
        postgrad.generate("smollm2", ["2+2=", "3+3="], n=4)        # four texts per prompt

    A Run keeps its model loaded: use `run.generate` for many calls.

    Args:
        model: as in `evaluate`.
        prompts: a text, a list of messages, or a list of either.
        n: responses per prompt.
        tokenizer: the tokenizer of a model in memory, if `model` is not a pair.
        temperature: 0 is greedy; by default 0 for one response, otherwise 1.
        max_tokens: longest response in tokens.
        seed: random seed.
        settings: any setting of `postgrad eval` by its name.
        **more: any setting of `postgrad eval` by its short name.

    Raises:
        ConfigError: an argument is wrong.
    """
    values = Settings()
    for name, value in {**(settings or {}), **more}.items():
        values.add(full_key(ALIASES.get(name, name)), value)
    source = str(model.folder) if isinstance(model, Run) else model
    with model_path(as_model(source, tokenizer)) as path:
        sampler = Sampler(path, values.overrides)
    return sampler.generate(prompts, n, temperature=temperature, max_tokens=max_tokens, seed=seed)


def score(
    data: Any,
    responses: Sequence[str] | None = None,
    *,
    reward: Reward | Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
    timeout_s: float = 5.0,
    workers: int = 0,
) -> list[Score | Failure]:
    """Score responses with a verifier or a reward function; one Score or Failure per response.

        postgrad.score([{"prompt": "2+2=", "ground_truth": "4"}], ["4"], reward="exact")[0].value

    Args:
        data: problems as in `train`, one per response.
        responses: the responses; by default the column `response` of the data.
        reward: as in `train`; by default the verifier of each problem's data_source.
        reward_weights: one factor per reward of a list.
        timeout_s: time limit per response for verifiers in child processes.
        workers: number of child processes, 0: by the number of cores, as reward.workers.

    Raises:
        ConfigError: an argument is wrong.
    """
    problems = as_problems(data)
    if responses is None:
        responses = [_own_response(problem) for problem in problems]
    if isinstance(responses, str):
        raise WrongValue(
            "responses is a text; give a list with one response per problem", at="responses"
        )
    if len(responses) != len(problems):
        raise Conflict(
            f"{len(problems)} problems and {len(responses)} responses; give one response per row",
            at="responses",
        )
    verifier = as_verifier_setting(reward, reward_weights) or AUTO
    with Scorer(verifier, timeout_s, workers) as scorer:
        scorer.check(problems)
        return scorer.score(problems, list(responses))


def _own_response(problem: Any) -> str:
    if problem.demonstrations:
        return problem.demonstrations[0]
    raise Missing(
        f"problem {problem.uid} has no response; give responses=[...] or a column response",
        at="responses",
    )
