"""Reward functions of TRL: `def reward(prompts, completions, **columns) -> list[float | None]`.

A function with a parameter `completions` or `completion_ids` is one, and so is one that takes only
`**kwargs`. It is called with keyword arguments, in this process, once for all responses of a score
stage: `prompts`, `completions`, `completion_ids` where they are known, and the columns of the rows
as lists. None means that the reward does not apply to a response.
"""

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from postgrad.errors import Missing, Unsupported, UserCode
from postgrad.pictures import text_of_content
from postgrad.problem import Failure, Problem, Score, problem_label
from postgrad.verifiers.functions import TokenIds, is_async, run_in_thread, score_batch

PROMPTS = "prompts"
COMPLETIONS = "completions"
COMPLETION_IDS = "completion_ids"
NO_REWARD = "none"  # Failure.kind of a response for which a function returned None
# What TRL passes and Postgrad does not, and arguments of functions that are called in another way.
NOT_PASSED = ("environments", "trainer_state", "log_extra", "log_metric")
OTHER_CALLS = ("response", "solution_str", "queries")
_NO_COLUMNS = ("prompt", "completion", COMPLETION_IDS, *NOT_PASSED)  # TRL passes no such columns


def is_trl_reward(function: Any) -> bool:
    """Return whether a function scores a list of completions, as in TRL.

    One that needs a single response, such as verl's, is none if its `completion_ids` has a default.
    """
    parameters = _parameters(function)
    kinds = [parameter.kind for parameter in parameters.values()]
    if COMPLETIONS in parameters or kinds == [inspect.Parameter.VAR_KEYWORD]:
        return True
    required = {name for name, parameter in parameters.items() if _is_required(parameter)}
    return COMPLETION_IDS in (parameters if required.isdisjoint(OTHER_CALLS) else required)


class TrlReward:
    """A reward function of TRL, for which is_trl_reward() is true; it may be `async def`.

    Args:
        label: starts the error messages.
        timeout_s: time limit of an async function, per response of the batch.

    Raises:
        ConfigError: the function cannot be called by name, or needs what only TRL passes.
    """

    def __init__(self, function: Any, label: str, timeout_s: float) -> None:
        self.function = function
        self.label = label
        self.timeout_s = timeout_s
        parameters = _parameters(function)
        kinds = {parameter.kind for parameter in parameters.values()}
        if not kinds.isdisjoint(
            (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
        ):
            raise UserCode(
                f"{label}: TRL's reward functions are called with names, and it has arguments that "
                "are given by their position; write def reward(completions, **kwargs)",
                at="reward",
            )
        self.required = [name for name, one in parameters.items() if _is_required(one)]
        self.names = None if inspect.Parameter.VAR_KEYWORD in kinds else set(parameters)
        for name in self.required:
            if name in (*OTHER_CALLS, *NOT_PASSED):
                raise UserCode(
                    f"{label} is a reward function of TRL and takes {name}, which is not "
                    f"available; the columns of the rows, {PROMPTS}, {COMPLETIONS} and "
                    f"{COMPLETION_IDS} are. Give it a default, or write "
                    "def reward(response, problem), which may return named parts",
                    at="reward",
                )

    def check(self, problems: Sequence[Problem], has_token_ids: bool) -> None:
        """Raise ConfigError if a row lacks a column that the function needs, or token ids do."""
        if COMPLETION_IDS in self.required and not has_token_ids:
            raise Unsupported(
                f"{self.label} needs {COMPLETION_IDS}, and only the texts of the responses are "
                f"known here; give it a default, such as {COMPLETION_IDS}=None",
                at="reward",
            )
        for problem in problems:
            columns = _columns_of(problem)
            for name in self.required:
                if name not in (PROMPTS, COMPLETIONS, COMPLETION_IDS) and name not in columns:
                    known = ", ".join(sorted(columns)) or "none"
                    raise Missing(
                        f"{self.label} needs a column {name}, which {problem_label(problem)} does "
                        f"not have; its columns: {known} (FILE:OLD={name} renames one)",
                        at=name,
                    )

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str], token_ids: TokenIds | None
    ) -> list[Score | Failure]:
        """Return one Score or Failure per response."""
        self.check([], token_ids is not None)
        arguments = self._arguments(problems, responses)
        if token_ids is not None and (self.names is None or COMPLETION_IDS in self.names):
            arguments[COMPLETION_IDS] = token_ids()
        none = Failure(NO_REWARD, f"{self.label} returned None")
        count = len(responses)
        return score_batch(self.label, count, lambda: self._call(arguments, count), none)

    def _arguments(self, problems: Sequence[Problem], responses: Sequence[str]) -> dict[str, Any]:
        rows = [_columns_of(problem) for problem in problems]
        columns = dict.fromkeys(name for row in rows for name in row)
        arguments: dict[str, Any] = {name: [row.get(name) for row in rows] for name in columns}
        arguments[PROMPTS] = [_prompt(problem) for problem in problems]
        pairs = zip(arguments[PROMPTS], responses, strict=True)
        arguments[COMPLETIONS] = [
            response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
            for prompt, response in pairs
        ]
        if self.names is None:
            return arguments
        return {name: arguments[name] for name in arguments.keys() & self.names}

    def _call(self, arguments: dict[str, Any], count: int) -> Any:
        if not is_async(self.function):
            return self.function(**arguments)
        limit_s = self.timeout_s * max(1, count)

        async def call() -> Any:
            return await asyncio.wait_for(self.function(**arguments), limit_s)

        return run_in_thread(call)


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}


def _is_required(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_variadic


def _columns_of(problem: Problem) -> dict[str, Any]:
    """Return the columns of the problem's row as they are in the data.

    A problem that was generated has no row: its columns are its own fields.
    """
    columns = problem.row or {**problem.extra, "data_source": problem.data_source}
    columns = {name: value for name, value in columns.items() if name not in _NO_COLUMNS}
    if problem.ground_truth:
        columns.setdefault("ground_truth", problem.ground_truth)
    return columns


def _prompt(problem: Problem) -> Any:
    """Return the prompt as in the data: a text, or a list of messages."""
    if problem.row and not isinstance(problem.row.get("prompt"), list):
        return problem.row.get("prompt") or text_of_content(problem.messages[-1]["content"])
    return [dict(message) for message in problem.messages]
