"""The Scorer of the score stage: the right verifier for each problem, inline or in the pool."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, Score
from postgrad.user_code import PythonObject
from postgrad.verifiers.combine import Term, parse_sum
from postgrad.verifiers.functions import FunctionScorer, WeightedReward
from postgrad.verifiers.lookup import find_verifier
from postgrad.verifiers.model_terms import (
    LLM_JUDGE,
    ModelTerm,
    add_judge_score,
    add_score,
    judge_term,
    model_terms,
    rules_of,
)
from postgrad.verifiers.pool import VerifierPool
from postgrad.verifiers.reward_log import RewardLog
from postgrad.verifiers.table import NOTES, VERIFIERS, choose
from postgrad.verifiers.trainer_state import TrainerState
from postgrad.verifiers.trl_rewards import (
    COMPLETION_IDS,
    TRAINER_STATE,
    LazyArguments,
    sum_terms,
    trl_terms,
)

AUTO = "auto"
ENVIRONMENT = "environment"  # the verifier that reads what an environment gave during the run
# Verifiers that compare a response with one answer.
ONE_ANSWER = {
    *("exact", "numeric", "boxed", "gsm8k", "gsm8k_strict", "gsm8k_flexible"),
    *("math", "math_answer", "oat", "think_math", "r1_zero", "r1_zero_math", "question_only"),
}
NUM_PROBED = 16  # problems that check_fit() tries of a set, and check_parts() per verifier
_AUTO_TERM = re.compile(r"(?<![\w./:-])auto(?![\w./:-])")


class JudgeModel(Protocol):
    """A model that scores responses: a judge (judge/) or a reward model."""

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str]
    ) -> list[Score | Failure]: ...


class VerifierBackend(Protocol):
    """Runs verifiers: in child processes (pool.py), or in actors of a Ray cluster (cluster/)."""

    def verify(
        self, items: Sequence[tuple[str, Problem]], verifier_names: Sequence[str]
    ) -> list[Score | Failure]: ...


class Scorer:
    """Scores responses with one verifier, or with the one for each problem's data source (`auto`).

    `judge` (for `llm_judge`) and `reward_models` (for `model:PATH`, by role) are set by the code
    that starts the models. The code that starts verifiers on a cluster gives them to
    use_backend() and stops them. `trainer_state` is set by the code that trains; it returns the
    present state for reward functions of TRL.

    Args:
        verifier: `auto`, a built-in name, `package.module:function`, `path/to/file.py:function`, a
            sum such as `auto + 0.1*format`; `llm_judge` or `model:PATH`, also in a sum. From
            Python also a PythonObject whose value is a list of WeightedReward.
        timeout_s: time limit for scoring one response.
        workers: number of child processes, 0: by the number of cores; they start with the first
            response that needs one.
        minimize: negate every score, so that a run trains against the verifier. Parts keep their
            sign.

    Raises:
        ConfigError: there is no such verifier, or a limit is not positive.
    """

    def __init__(
        self, verifier: str = AUTO, timeout_s: float = 5.0, workers: int = 0, minimize: bool = False
    ) -> None:
        if not timeout_s > 0:
            raise ConfigError(f"reward.timeout_s={timeout_s} must be above 0")
        if workers < 0:
            raise ConfigError(f"reward.workers={workers} must be at least 0")
        self.functions: FunctionScorer | None = None
        self.model_terms: list[ModelTerm] = []
        self.judge_term: Term | None = None
        self.rules: str = verifier
        self.constant = 0.0  # the score before the models' if the rules are empty
        if isinstance(verifier, PythonObject):
            self.functions = _python_functions(verifier.value, timeout_s, workers)
        else:
            self.model_terms = model_terms(verifier)
            self.judge_term = judge_term(verifier)
            self.rules, self.constant = rules_of(verifier)
            if self.rules not in ("", AUTO, LLM_JUDGE):
                self.functions = _trl_functions(self.rules, timeout_s, workers)
            if self.rules not in ("", AUTO, LLM_JUDGE) and self.functions is None:
                find_verifier(_replace_auto(self.rules, "exact"))
        self.verifier = verifier
        self.reward_models: dict[str, JudgeModel] = {}
        self.minimize = minimize
        self.judge: JudgeModel | None = None
        self.trainer_state: Callable[[], TrainerState] | None = None
        self.local_pool = VerifierPool(workers, timeout_s)
        self.backend: VerifierBackend = self.local_pool
        self.use_backend(self.local_pool)

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def use_backend(self, backend: VerifierBackend) -> None:
        """Run the verifiers in `backend`, also those that are terms beside functions."""
        self.backend = backend
        if backend is not self.local_pool:
            self.local_pool.close()
        for scorer in _scorers_of(self.functions) if self.functions is not None else ():
            scorer.use_backend(backend)

    def name_for(self, problem: Problem) -> str:
        """Return the name of the verifier for this problem. Raises ConfigError."""
        if self.functions is not None or AUTO not in self.rules:
            return self.rules
        return _replace_auto(self.rules, choose(problem))

    def check(self, problems: Iterable[Problem], available: Collection[str] = ()) -> None:
        """Raise ConfigError, before a run starts, if some problem has no verifier.

        Also if a reward function of TRL lacks a column, or needs completion_ids or trainer_state
        that is not `available` where the responses will be scored.
        """
        problems = list(problems)
        for problem in problems:
            self.name_for(problem)
        if self.functions is not None:
            self.functions.check(problems, available)
            for scorer in _scorers_of(self.functions):
                scorer.check(problems)

    def check_fit(self, problems: Sequence[Problem], name: str) -> None:
        """Raise ConfigError if a built-in verifier can score no problem of the set `name`.

        Such a verifier needs something that the problems lack, as `code` needs tests. It scores
        an empty response to a few problems, evenly spaced over the set.
        """
        if self.functions is not None or not self.rules or self.rules == LLM_JUDGE:
            return
        stride = max(1, len(problems) // NUM_PROBED)
        probed = problems[::stride][:NUM_PROBED]
        by_verifier: dict[str, list[Problem]] = {}
        for problem in probed:
            for term in parse_sum(self.name_for(problem)):
                if term.name in VERIFIERS and term.name != ENVIRONMENT:
                    by_verifier.setdefault(term.label, []).append(problem)
        for verifier, asked in by_verifier.items():
            items = [("", problem) for problem in asked]
            results = self.backend.verify(items, [verifier] * len(items))
            failures = [result for result in results if isinstance(result, Failure)]
            if failures and len(failures) == len(results):
                advice = "choose a verifier that fits the data (docs/rewards.md)"
                if failures[0].reason.startswith("the ground truth ''"):
                    advice = (
                        "add a column ground_truth (FILE:COLUMN=ground_truth renames one), or "
                        "choose a verifier that needs none (docs/rewards.md)"
                    )
                raise ConfigError(
                    f"reward.verifier={self.verifier}: {verifier} can score none of the "
                    f"{len(results)} rows of {name} that were tried; the first: "
                    f"{failures[0].reason}; {advice}"
                )

    def check_parts(self, problems: Sequence[Problem], settings: Mapping[str, str]) -> None:
        """Raise ConfigError for a part of the score that a verifier of these problems lacks.

        Only built-in verifiers and reward models are known to report the same parts for every
        response. The parts of other verifiers are known with the first scores.

        Args:
            settings: the parts that the run reads, by the setting that names them.
        """
        if self.functions is not None or self.judge_term is not None:
            return
        if self.rules in ("", LLM_JUDGE):
            return
        by_verifier: dict[str, list[Problem]] = {}
        for problem in problems:
            by_verifier.setdefault(self.name_for(problem), []).append(problem)
        for verifier, own in by_verifier.items():
            terms = [term.name for term in parse_sum(verifier) if term.name]
            if any(name not in VERIFIERS or name == ENVIRONMENT for name in terms):
                continue
            score = self._first_score(verifier, own[:NUM_PROBED])
            if score is None:
                continue
            known = [*score.parts, *(term.role for term in self.model_terms)]
            for setting, part in settings.items():
                if part not in known:
                    names = ", ".join(sorted(known)) or "none"
                    raise ConfigError(
                        f"{setting}: the verifier {verifier} reports no part {part} of its score; "
                        f"name one of its parts: {names} (a method that adds parts lists them in "
                        "own_reward_parts)"
                    )

    def _first_score(self, verifier: str, problems: Sequence[Problem]) -> Score | None:
        """Return the score of an empty response to the first problem that can be scored."""
        for problem in problems:
            (result,) = self.backend.verify([("", problem)], [verifier])
            if isinstance(result, Score):
                return result
        return None

    def notes(self, problems: Iterable[Problem]) -> list[str]:
        """Return what the user should know about verifiers that `auto` chose, and about truths."""
        if self.functions is not None:
            return []
        problems = list(problems)
        notes: list[str] = []
        if AUTO in self.rules:
            chosen = {choose(problem) for problem in problems}
            notes += [note for name, note in NOTES.items() if name in chosen]
        return notes + self.json_notes(problems)

    def json_notes(self, problems: Sequence[Problem]) -> list[str]:
        """Return a line about truths that are JSON, if their verifier takes them as they are."""
        found = [p for p in problems if is_json(p.ground_truth) and self._compares_text(p)]
        if not found:
            return []
        return [
            f"warning: {len(found)} of {len(problems)} ground truths are lists or objects, such as "
            f"{found[0].ground_truth[:60]}; {self.name_for(found[0])} takes each as one answer "
            "(FILE:COLUMN.0=COLUMN reads the first of a list, FILE:COLUMN.KEY=COLUMN a value of an "
            "object)"
        ]

    def truth_notes(self, sets: Mapping[str, Sequence[Problem]]) -> list[str]:
        """Return a line about the sets, by name, of which only some rows have a ground truth."""
        counts: list[str] = []
        for name, problems in sets.items():
            without = [problem for problem in problems if not problem.ground_truth]
            num_read = sum(self._reads_truth(problem) for problem in without)
            if num_read and len(without) < len(problems):
                counts.append(f"{num_read} of {len(problems)} rows of {name}")
        if not counts:
            return []
        return [
            f"warning: no ground truth in {', '.join(counts)}; the verifier gets an empty text for "
            "it, so fill it or remove these rows"
        ]

    def _reads_truth(self, problem: Problem) -> bool:
        """Return whether a verifier may compare with the truth: a function, or ONE_ANSWER."""
        if self.functions is not None:
            own = list(_scorers_of(self.functions))
            has_function = len(own) < self.functions.num_rewards()
            return has_function or any(scorer._reads_truth(problem) for scorer in own)
        if self.rules in ("", LLM_JUDGE):
            return False
        names = {term.name for term in parse_sum(self.name_for(problem)) if term.name}
        return any(name in ONE_ANSWER or name not in VERIFIERS for name in names)

    def _compares_text(self, problem: Problem) -> bool:
        return not ONE_ANSWER.isdisjoint(re.findall(r"\w+", self.name_for(problem)))

    def score(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        token_ids: Callable[[], list[list[int]]] | None = None,
        log: RewardLog | None = None,
    ) -> list[Score | Failure]:
        """Return one Score or Failure per response, in order; responses[i] answers problems[i].

        `token_ids` returns the responses' token ids; it is called if a reward takes them. `log`
        gets what reward functions of TRL log; without it, that is dropped.
        """
        if len(problems) != len(responses):
            raise ValueError(f"{len(problems)} problems for {len(responses)} responses")
        scores: list[Score | Failure] = [Score(self.constant) for _ in responses]
        if self.functions is not None:
            scores = self.functions.score(problems, responses, self._lazy_arguments(token_ids), log)
        elif self.verifier == LLM_JUDGE:
            scores = self._ask_judge(problems, responses)
        elif self.rules:
            names = [self.name_for(problem) for problem in problems]
            scores = self.backend.verify(list(zip(responses, problems, strict=True)), names)
        if self.judge_term is not None:
            results = self._ask_judge(problems, responses)
            pairs = zip(scores, results, strict=True)
            scores = [add_judge_score(rules, self.judge_term, result) for rules, result in pairs]
        for term in self.model_terms:
            if term.role not in self.reward_models:
                raise ConfigError(
                    f"reward.verifier={self.verifier} needs a reward model, and this command "
                    "loads none; use it in postgrad train, eval or score"
                )
            results = self.reward_models[term.role].score(problems, responses)
            pairs = zip(scores, results, strict=True)
            scores = [add_score(rules, term, result) for rules, result in pairs]
        return [_negate(score) for score in scores] if self.minimize else scores

    def _lazy_arguments(self, token_ids: Callable[[], list[list[int]]] | None) -> LazyArguments:
        arguments = {COMPLETION_IDS: token_ids, TRAINER_STATE: self.trainer_state}
        return {name: make for name, make in arguments.items() if make is not None}

    def _ask_judge(
        self, problems: Sequence[Problem], responses: Sequence[str]
    ) -> list[Score | Failure]:
        if self.judge is None:
            raise ConfigError(
                f"reward.verifier={self.verifier} needs a judge, and this command loads none; use "
                "it in postgrad train, eval or score"
            )
        return self.judge.score(problems, responses)

    def close(self) -> None:
        """Stop the child processes."""
        self.local_pool.close()


def _python_functions(
    rewards: Sequence[WeightedReward], timeout_s: float, workers: int
) -> FunctionScorer:
    """Return the scorer of several rewards; those that are verifiers by name have the limits."""
    terms = [
        replace(one, reward=_scorer_of_term(one.reward, timeout_s, workers))
        if isinstance(one.reward, str)
        else one
        for one in rewards
    ]
    return FunctionScorer(terms, timeout_s)


def _scorer_of_term(verifier: str, timeout_s: float, workers: int) -> Scorer | FunctionScorer:
    """Return what scores with this verifier as one term of several rewards.

    For reward functions of TRL it is the FunctionScorer, which takes their arguments.
    """
    scorer = Scorer(verifier, timeout_s, workers)
    has_models = scorer.model_terms or scorer.judge_term is not None
    return scorer if scorer.functions is None or has_models else scorer.functions


def _trl_functions(rules: str, timeout_s: float, workers: int) -> FunctionScorer | None:
    """Return the scorer of a sum in which a term is a reward function of TRL; None without one.

    The other terms run as they would alone.
    """
    if ":" not in rules:
        return None
    rewards = trl_terms(rules, timeout_s)
    if not rewards:
        return None
    weighted: list[WeightedReward] = []
    for term in sum_terms(rules):
        if not term.name:
            raise ConfigError(
                f"reward.verifier={rules}: a constant cannot be added to a reward function of TRL; "
                "return it from the function"
            )
        reward = rewards.get(term.label) or Scorer(term.label, timeout_s, workers)
        weighted.append(WeightedReward(term.weight, term.label, reward))
    return FunctionScorer(weighted, timeout_s)


def _scorers_of(functions: FunctionScorer) -> Iterator[Scorer]:
    """Return the scorers of the terms that are verifiers by name, such as `auto`."""
    for reward in functions.rewards:
        if isinstance(reward.reward, Scorer):
            yield reward.reward
        elif isinstance(reward.reward, FunctionScorer):
            yield from _scorers_of(reward.reward)


def is_json(truth: str) -> bool:
    """Return whether a ground truth is the JSON text of an object, or of a list that has texts."""
    if truth[:1] + truth[-1:] not in ("[]", "{}"):
        return False
    try:
        values = json.loads(truth)
    except ValueError:
        return False
    return isinstance(values, dict) or any(isinstance(value, str) for value in values)


def _replace_auto(verifier: str, name: str) -> str:
    """Return the setting with `auto` replaced by a verifier's name."""
    return _AUTO_TERM.sub(lambda _: name, verifier)


def _negate(score: Score | Failure) -> Score | Failure:
    return Score(-score.value, score.parts) if isinstance(score, Score) else score
