"""The Scorer of the score stage: it scores responses term by term and adds the terms up."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Protocol

from postgrad.errors import Conflict, UnknownName, Unsupported, WrongValue
from postgrad.problem import Failure, Problem, Score
from postgrad.user_code import refuse_object_name
from postgrad.verifiers.expression import Term, add_term, parse_reward, term_value
from postgrad.verifiers.functions import BatchReward, TokenIds, as_batch_reward, score_batch
from postgrad.verifiers.loading import find_verifier, load_function
from postgrad.verifiers.pool import VerifierPool
from postgrad.verifiers.table import NOTES, VERIFIERS, choose
from postgrad.verifiers.trl import NO_REWARD, TrlReward, is_trl_reward

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
    """Scores responses with the terms of a reward.

    `auto` is the verifier for each problem's data source. `judge` (for `llm_judge`) and
    `reward_models` (for `model:PATH`, by role) are set by the code that starts the models. The code
    that starts verifiers on a cluster gives them to use_backend() and stops them.

    Args:
        verifier: `auto`, a built-in name, `package.module:function`, `path/to/file.py:function`,
            `llm_judge`, `model:PATH`, or a sum of them such as `auto + 0.1*format`. From Python
            also a PythonObject whose value is a list of Terms.
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
            raise WrongValue(f"reward.timeout_s={timeout_s} must be above 0")
        if workers < 0:
            raise WrongValue(f"reward.workers={workers} must be at least 0")
        self.verifier = verifier
        self.timeout_s = timeout_s
        self.minimize = minimize
        self.reward = parse_reward(verifier)
        self.functions: dict[str, BatchReward | TrlReward] = {}  # by the terms' labels
        for term in self.reward.terms:
            self._load(term)
        self.rules = [term for term in self.reward.rules if term.label not in self.functions]
        self.reward_models: dict[str, JudgeModel] = {}
        self.judge: JudgeModel | None = None
        self.local_pool = VerifierPool(workers, timeout_s)
        self.backend: VerifierBackend = self.local_pool

    def _load(self, term: Term) -> None:
        """Load a function of the user, and check that there is such a verifier."""
        function = term.function
        label = f"reward {term.name}"
        if term.is_rule and ":" in term.name:
            refuse_object_name(term.name, f"reward.verifier={self.verifier}")
            label = f"verifier {term.name}"
            function = load_function(term.name, "verifier")
            if not is_trl_reward(function):
                function = None
            elif term.arguments or term.part:
                raise WrongValue(
                    f"reward.verifier={self.verifier}: {term.name} is a reward function of TRL, "
                    f"which has neither arguments nor parts; write {term.name} alone"
                )
        if callable(function) and is_trl_reward(function):
            self.functions[term.label] = TrlReward(function, label, self.timeout_s)
        elif function is not None:
            self.functions[term.label] = as_batch_reward(function, label, self.timeout_s)
        elif term.is_rule:
            find_verifier(_AUTO_TERM.sub("exact", term.rule))

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the child processes."""
        self.local_pool.close()

    def use_backend(self, backend: VerifierBackend) -> None:
        """Run the verifiers in `backend` instead of in child processes of this process."""
        self.backend = backend
        self.local_pool.close()

    def name_for(self, problem: Problem) -> str:
        """Return reward.verifier with `auto` replaced for this problem. Raises ConfigError."""
        return self._name(self.verifier, problem) if self._uses_auto else self.verifier

    @property
    def _uses_auto(self) -> bool:
        return any(term.name == AUTO for term in self.rules)

    def _name(self, text: str, problem: Problem) -> str:
        return _AUTO_TERM.sub(lambda _: choose(problem), text)

    def _for_problem(self, term: Term, problem: Problem) -> Term:
        return replace(term, name=choose(problem)) if term.name == AUTO else term

    def _rules_for(self, problem: Problem) -> list[Term]:
        return [self._for_problem(term, problem) for term in self.rules]

    # ---- checks before a run

    def check(self, problems: Iterable[Problem], has_token_ids: bool = False) -> None:
        """Raise ConfigError, before a run starts, if some problem has no verifier.

        Also if a reward function of TRL lacks a column, or needs completion_ids and the responses'
        token ids will not be known.
        """
        problems = list(problems)
        for problem in problems:
            self.name_for(problem)
        for function in self.functions.values():
            if isinstance(function, TrlReward):
                function.check(problems, has_token_ids)

    def check_fit(self, problems: Sequence[Problem], name: str) -> None:
        """Raise ConfigError if a built-in verifier can score no problem of the set `name`.

        Such a verifier needs something that the problems lack, as `code` needs tests. It scores
        an empty response to a few problems, evenly spaced over the set.
        """
        stride = max(1, len(problems) // NUM_PROBED)
        asked: dict[str, tuple[Term, list[Problem]]] = {}
        for problem in problems[::stride][:NUM_PROBED]:
            for term in self._rules_for(problem):
                if term.name in VERIFIERS and term.name != ENVIRONMENT:
                    asked.setdefault(term.label, (term, []))[1].append(problem)
        for label, (term, probed) in asked.items():
            items = [("", problem) for problem in probed]
            scores = self.backend.verify(items, [term.rule] * len(items))
            results = [one if isinstance(one, Failure) else term_value(term, one) for one in scores]
            failures = [one for one in results if isinstance(one, Failure)]
            if failures and len(failures) == len(results):
                advice = "choose a verifier that fits the data (docs/rewards.md)"
                if failures[0].reason.startswith("the ground truth ''"):
                    advice = (
                        "add a column ground_truth (FILE:COLUMN=ground_truth renames one), or "
                        "choose a verifier that needs none (docs/rewards.md)"
                    )
                raise Conflict(
                    f"reward.verifier={self.verifier}: {label} can score none of the "
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
        if self.functions or self.reward.asks_judge or not self.rules:
            return
        by_verifier: dict[str, list[Problem]] = {}
        for problem in problems:
            by_verifier.setdefault(self.name_for(problem), []).append(problem)
        for verifier, probed in by_verifier.items():
            names = {term.name for term in self._rules_for(probed[0])}
            score = None if names - (set(VERIFIERS) - {ENVIRONMENT}) else self._first_score(probed)
            if score is None:
                continue
            known = [*score.parts, *(term.role for term in self.reward.models)]
            for setting, part in settings.items():
                if part not in known:
                    listed = ", ".join(sorted(known)) or "none"
                    raise UnknownName(
                        f"{setting}: the verifier {verifier} reports no part {part} of its score; "
                        f"name one of its parts: {listed} (a method that adds parts lists them in "
                        "own_reward_parts)"
                    )

    def _first_score(self, problems: Sequence[Problem]) -> Score | None:
        """Return the rules' score of an empty response to the first problem that can be scored."""
        for problem in problems[:NUM_PROBED]:
            columns = self._score_rules([problem], [""])
            result = self._combine(problem, {label: one for label, (one,) in columns.items()})
            if isinstance(result, Score):
                return result
        return None

    def notes(self, problems: Iterable[Problem]) -> list[str]:
        """Return what the user should know about verifiers that `auto` chose, and about truths."""
        problems = list(problems)
        notes: list[str] = []
        if self._uses_auto:
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
        names = {term.name for term in self._rules_for(problem)}
        return bool(self.functions or names & ONE_ANSWER or names - set(VERIFIERS))

    def _compares_text(self, problem: Problem) -> bool:
        return any(term.name in ONE_ANSWER for term in self._rules_for(problem))

    # ---- scores

    def score(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        token_ids: TokenIds | None = None,
    ) -> list[Score | Failure]:
        """Return one Score or Failure per response, in order; responses[i] answers problems[i].

        The first Failure of a sum counts. `token_ids` returns the responses' token ids; it is
        called if a reward takes them.
        """
        if len(problems) != len(responses):
            raise ValueError(f"{len(problems)} problems for {len(responses)} responses")
        columns = self._score_rules(problems, responses)
        for term in self.reward.terms:
            if term.name and term.label not in columns:
                columns[term.label] = self._score_term(term, problems, responses, token_ids)
        scores = [
            self._combine(problem, {label: column[row] for label, column in columns.items()})
            for row, problem in enumerate(problems)
        ]
        return [_negate(score) for score in scores] if self.minimize else scores

    def _score_rules(
        self, problems: Sequence[Problem], responses: Sequence[str]
    ) -> dict[str, list[Score | Failure]]:
        """Return the scores of every verifier by the terms' labels, asked for in one call."""
        items: list[tuple[str, Problem]] = []
        rules: list[str] = []
        for term in self.rules:
            items += zip(responses, problems, strict=True)
            rules += [self._name(term.rule, problem) for problem in problems]
        results = iter(self.backend.verify(items, rules) if items else ())
        return {term.label: list(islice(results, len(problems))) for term in self.rules}

    def _score_term(
        self,
        term: Term,
        problems: Sequence[Problem],
        responses: Sequence[str],
        token_ids: TokenIds | None,
    ) -> list[Score | Failure]:
        """Return the scores of a term that is a model or runs in this process."""
        function = self.functions.get(term.label)
        if isinstance(function, TrlReward):
            return function.score(problems, responses, token_ids)
        if function is not None:
            score = partial(function.score, problems, responses)
            return score_batch(f"reward {term.name}", len(responses), score)
        model = self.reward_models.get(term.role) if term.role else self.judge
        if model is None:
            raise Unsupported(
                f"reward.verifier={self.verifier} needs a model for {term.label}, and this command "
                "loads none; use it in postgrad train, eval or score"
            )
        return model.score(problems, responses)

    def _combine(self, problem: Problem, scores: Mapping[str, Score | Failure]) -> Score | Failure:
        """Return the sum of the terms that have a score, or the first Failure.

        A reward function of TRL that does not apply to a response is left out, unless all are.
        """
        if not self.reward.is_sum:
            return next(iter(scores.values()))
        results = scores.values()
        if all(isinstance(one, Failure) and one.kind == NO_REWARD for one in results):
            return next(iter(results))
        total = 0.0
        parts: dict[str, float] = {}
        for term in self.reward.terms:
            score = scores.get(term.label)
            if not term.name:
                total += term.weight
            elif score is not None and not (isinstance(score, Failure) and score.kind == NO_REWARD):
                value = add_term(self._for_problem(term, problem), score, parts)
                if isinstance(value, Failure):
                    return value
                total += value
        return Score(total, parts)


def is_json(truth: str) -> bool:
    """Return whether a ground truth is the JSON text of an object, or of a list that has texts."""
    if truth[:1] + truth[-1:] not in ("[]", "{}"):
        return False
    try:
        values = json.loads(truth)
    except ValueError:
        return False
    return isinstance(values, dict) or any(isinstance(value, str) for value in values)


def _negate(score: Score | Failure) -> Score | Failure:
    return Score(-score.value, score.parts) if isinstance(score, Score) else score
