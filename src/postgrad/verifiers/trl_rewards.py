"""Reward functions of TRL: `def reward(prompts, completions, **columns) -> list[float | None]`.

A function with a parameter `completions`, `completion_ids`, `trainer_state`, `log_extra` or
`log_metric` is one, and so is one that takes only `**kwargs`. It is called with keyword arguments,
once for all responses of a score stage: `prompts`, `completions`, and the columns of the rows as
lists; `completion_ids` and `trainer_state` where they are known; `log_extra` and `log_metric` of a
RewardLog. It runs in this process. None means that the reward does not apply to a response.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, named
from postgrad.user_code import refuse_object_name
from postgrad.verifiers.combine import Term, parse_sum
from postgrad.verifiers.loading import load_function
from postgrad.verifiers.lookup import is_sum
from postgrad.verifiers.reward_log import RewardLog
from postgrad.verifiers.table import VERIFIERS

COMPLETIONS = "completions"
COMPLETION_IDS = "completion_ids"
TRAINER_STATE = "trainer_state"
LOG_EXTRA = "log_extra"
LOG_METRIC = "log_metric"
NO_REWARD = "none"  # Failure.kind of a response for which a function returned None
# TRL passes its environments; Postgrad's run in other processes and have ended when it scores.
NOT_PASSED = ("environments",)
# Arguments of functions that are called in another way.
OTHER_CALLS = ("response", "solution_str", "queries")
# What only some callers have, and why the others do not.
_REASONS = {
    COMPLETION_IDS: "only the texts of the responses are known here",
    TRAINER_STATE: "no run trains here (in a Session: score(batch, reward, global_step=0))",
}
# What TRL passes besides the columns, whatever the columns are.
_PASSED = ("prompts", COMPLETIONS, COMPLETION_IDS, TRAINER_STATE, LOG_EXTRA, LOG_METRIC)
_RESERVED = ("prompt", "completion", *_PASSED[2:])  # columns TRL does not pass

# completion_ids and trainer_state, where they are known; each is made if a function takes it.
LazyArguments = Mapping[str, Callable[[], Any]]
NO_ARGUMENTS: LazyArguments = {}


def is_trl_reward(function: Any) -> bool:
    """Return whether a function scores a list of completions, as in TRL.

    One that needs a single response, such as verl's, is none if the arguments that only TRL passes
    have defaults.
    """
    parameters = _parameters(function)
    if COMPLETIONS in parameters or _takes_only_keywords(parameters):
        return True
    required = [name for name, parameter in parameters.items() if _is_required(parameter)]
    names = parameters if set(required).isdisjoint(OTHER_CALLS) else required
    return not set(names).isdisjoint(_PASSED[2:])


class TrlReward:
    """A reward function of TRL as a batch reward.

    Args:
        function: for which is_trl_reward() is true; may be `async def`.
        label: starts the error messages.
        timeout_s: time limit of an async function, per response of the batch.

    Raises:
        ConfigError: the function cannot be called by name, or needs what only TRL passes.
    """

    def __init__(self, function: Any, label: str, timeout_s: float) -> None:
        self.function = function
        self.label = label
        self.timeout_s = timeout_s
        self.required: list[str] = []
        self.optional: list[str] = []
        self.takes_any = False
        for name, parameter in _parameters(function).items():
            self._add_parameter(name, parameter)

    def _add_parameter(self, name: str, parameter: inspect.Parameter) -> None:
        if parameter.kind is parameter.VAR_KEYWORD:
            self.takes_any = True
            return
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"{self.label}: TRL's reward functions are called with names, and {name} has to be "
                "given by its position; write def reward(completions, **kwargs)"
            )
        is_required = _is_required(parameter)
        if is_required and name in (*OTHER_CALLS, *NOT_PASSED):
            raise ConfigError(
                f"{self.label} is a reward function of TRL and takes {name}, which is not "
                f"available; the columns of the rows and {', '.join(_PASSED)} are. Give it a "
                "default, or write def reward(response, problem)"
            )
        (self.required if is_required else self.optional).append(name)

    def check(self, problems: Sequence[Problem], available: Collection[str] = ()) -> None:
        """Raise ConfigError if a row lacks a column that the function needs.

        `available` says which of completion_ids and trainer_state score() will get.
        """
        self._check_available(available)
        needed = [name for name in self.required if name not in _PASSED]
        for problem in problems:
            columns = _columns_of(problem)
            for name in needed:
                if name not in columns:
                    known = ", ".join(sorted(columns)) or "none"
                    raise ConfigError(
                        f"{self.label} needs a column {name}, which {named(problem)} does not "
                        f"have; its columns: {known} (FILE:OLD={name} renames one)"
                    )

    def _check_available(self, available: Collection[str]) -> None:
        for name, reason in _REASONS.items():
            if name in self.required and name not in available:
                raise ConfigError(
                    f"{self.label} needs {name}, which is not available: {reason}; give it a "
                    f"default, such as {name}=None"
                )

    def score(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        lazy_arguments: LazyArguments = NO_ARGUMENTS,
        log: RewardLog | None = None,
    ) -> list[Any]:
        """Return one number or Failure per response; `log` gets what the function logs.

        Raises:
            ConfigError: the function needs completion_ids or trainer_state, and it is not known.
        """
        self._check_available(lazy_arguments)
        arguments = self._arguments(problems, responses)
        log = log or RewardLog()
        logs = {LOG_EXTRA: lambda: log.log_extra, LOG_METRIC: lambda: log.log_metric}
        for name, make in {**lazy_arguments, **logs}.items():
            if self.takes_any or name in self.required or name in self.optional:
                arguments[name] = make()
        if inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004
        ):
            results = self._await(arguments, len(responses))
        else:
            results = self.function(**arguments)
        is_unordered = isinstance(results, str | Mapping | Set)
        if is_unordered or not hasattr(results, "__len__"):
            raise TypeError(f"it returned {type(results).__name__}, not a list of rewards")
        none = Failure(NO_REWARD, f"{self.label} returned None")
        return [none if result is None else result for result in results]

    def _arguments(self, problems: Sequence[Problem], responses: Sequence[str]) -> dict[str, Any]:
        rows = [_columns_of(problem) for problem in problems]
        names = list(dict.fromkeys(name for row in rows for name in row))
        arguments = {name: [row.get(name) for row in rows] for name in names}
        pairs = zip(problems, responses, strict=True)
        completions = [_completion(problem, response) for problem, response in pairs]
        arguments |= {"prompts": [_prompt(problem) for problem in problems]}
        arguments |= {COMPLETIONS: completions}
        if self.takes_any:
            return arguments
        taken = (*self.required, *self.optional)
        return {name: values for name, values in arguments.items() if name in taken}

    def _await(self, arguments: dict[str, Any], count: int) -> Any:
        """Return the result of the async function, in an event loop of a thread of its own."""
        results: list[Any] = []
        errors: list[BaseException] = []
        limit_s = self.timeout_s * max(1, count)

        def run() -> None:
            try:
                call = asyncio.wait_for(self.function(**arguments), limit_s)
                results.append(asyncio.run(call))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


def trl_terms(rules: str, timeout_s: float) -> dict[str, TrlReward]:
    """Return the reward functions of TRL in the text of reward.verifier, by their terms' labels.

    Raises:
        ConfigError: one of them has numbers as arguments or a part, which it cannot have.
    """
    found: dict[str, TrlReward] = {}
    for term in sum_terms(rules):
        if ":" not in term.name or term.name in VERIFIERS:
            continue
        refuse_object_name(term.name, f"reward.verifier={rules}")
        function = load_function(term.name, "verifier")
        if not is_trl_reward(function):
            continue
        if term.arguments or term.part:
            raise ConfigError(
                f"reward.verifier={rules}: {term.name} is a reward function of TRL, which has "
                f"neither arguments nor parts; write {term.name} alone"
            )
        found[term.label] = TrlReward(function, f"verifier {term.name}", timeout_s)
    return found


def sum_terms(rules: str) -> list[Term]:
    """Return the terms of the text of reward.verifier; a path alone is one term."""
    return parse_sum(rules) if is_sum(rules) else [Term(1.0, rules)]


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}


def _is_required(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_variadic


def _takes_only_keywords(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether the function is `def reward(**kwargs)`."""
    return [parameter.kind for parameter in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]


def _columns_of(problem: Problem) -> dict[str, Any]:
    """Return the columns of the problem's row as they are in the data.

    A problem that was generated has no row: its columns are its own fields.
    """
    columns = problem.row or {**problem.extra, "data_source": problem.data_source}
    columns = {name: value for name, value in columns.items() if name not in _RESERVED}
    if problem.ground_truth:
        columns.setdefault("ground_truth", problem.ground_truth)
    return columns


def _prompt(problem: Problem) -> Any:
    """Return the prompt as in the data: a text, or a list of messages."""
    if problem.row and not isinstance(problem.row.get("prompt"), list):
        return problem.row.get("prompt") or problem.messages[-1]["content"]
    return [dict(message) for message in problem.messages]


def _completion(problem: Problem, response: str) -> Any:
    """Return the response in the form of the prompt: a text, or a list of one message."""
    prompt = _prompt(problem)
    return response if isinstance(prompt, str) else [{"role": "assistant", "content": response}]
