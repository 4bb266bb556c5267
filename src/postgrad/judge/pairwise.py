"""A language model that compares: is a response better than the problem's reference answer?"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from postgrad.config.schema import JudgeConfig
from postgrad.judge.llm import AskModel, LlmJudge, question_of
from postgrad.judge.templates import fill
from postgrad.problem import Failure, Problem, Score

_RANKING_LINE = re.compile(r"^[\s>#*_`-]*ranking[\s*_`]*:(.*)$", re.IGNORECASE | re.MULTILINE)
FIRST, TIE, SECOND = 2, 1, 0  # rankings of two answers, in half wins of the first answer
RANKINGS = {"a>b": FIRST, "b>a": SECOND, "a=b": TIE, "b=a": TIE}


def parse_ranking(reply: str) -> int | None:
    """Return FIRST, TIE or SECOND, or None if the reply has no ranking.

    The ranking is on the last RANKING line, or the reply is one ranking and nothing else. It is
    A > B, B > A or A = B, up to white space, Markdown emphasis and a final full stop. A ranking
    in prose does not count.
    """
    lines = _RANKING_LINE.findall(reply)
    text = re.sub(r"[\s*_`]", "", lines[-1] if lines else reply)
    return RANKINGS.get(text.removesuffix(".").lower())


def answer_of(response: str, stops: Sequence[str]) -> str:
    """Return the response up to the first stop string (rollout.stop), which users do not see."""
    ends = [response.find(stop) for stop in stops if stop in response]
    return response[: min(ends)] if ends else response


class PairJudge(LlmJudge):
    """Compares each response with its problem's ground truth, another answer to the same question.

    Judges favor a position. The order of the two answers is therefore derived from `seed`, the
    problem and the response; with reward.judge.both_orders the judge is asked in both orders and
    the results are averaged. Equal texts are a tie, and the judge is not asked. The judge sees
    a response up to the first of `stops`.
    """

    def __init__(
        self,
        config: JudgeConfig,
        template: str,
        ask: AskModel,
        file: Path | None = None,
        judge_name: str = "",
        seed: int = 0,
        stops: Sequence[str] = (),
    ) -> None:
        super().__init__(config, template, ask, file, judge_name)
        self.seed = seed
        self.stops = stops

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score | Failure]:
        """Return one Score or Failure per response, in order.

        1 is a response that is better than the reference, 0.5 a tie, 0 a worse one. A missing
        ranking makes it a Failure. Parts: `win` is the value; `chose_first` is how often the judge
        preferred the answer shown first (a tie counts half).
        """
        answers = [answer_of(response, self.stops) for response in responses]
        comparisons: list[tuple[int, bool]] = []  # (row, the response is shown first)
        prompts: list[str] = []
        for row, (problem, answer) in enumerate(zip(problems, answers, strict=True)):
            for response_first in self.orders(problem, answer):
                comparisons.append((row, response_first))
                prompts.append(self.prompt(problem, answer, response_first))
        rankings = self.ask_all(prompts, parse_ranking, "ranking")
        rankings_by_row: list[list[tuple[bool, int | Failure]]] = [[] for _ in responses]
        for (row, response_first), ranking in zip(comparisons, rankings, strict=True):
            rankings_by_row[row].append((response_first, ranking))
        return [_pair_score(row_rankings) for row_rankings in rankings_by_row]

    def orders(self, problem: Problem, response: str) -> tuple[bool, ...]:
        """Return, for each comparison, whether the response is shown first."""
        if response == problem.ground_truth:
            return ()
        if self.config.both_orders:
            return True, False
        text = f"{self.seed}\0{problem.uid}\0{response}"
        digest = hashlib.blake2b(text.encode(), digest_size=1).digest()
        return (digest[0] % 2 == 0,)

    def prompt(self, problem: Problem, response: str, response_first: bool) -> str:
        """Return the judge's prompt for one comparison."""
        first, second = problem.ground_truth, response
        if response_first:
            first, second = response, problem.ground_truth
        return fill(self.template, question=question_of(problem), first=first, second=second)


def _pair_score(rankings: Sequence[tuple[bool, int | Failure]]) -> Score | Failure:
    if not rankings:  # the response is the reference
        return Score(0.5, {"win": 0.5})
    wins: list[float] = []
    first_wins: list[float] = []
    for response_first, ranking in rankings:
        if isinstance(ranking, Failure):
            return ranking
        first_win = ranking / FIRST
        first_wins.append(first_win)
        wins.append(first_win if response_first else 1 - first_win)
    win = sum(wins) / len(wins)
    return Score(win, {"win": win, "chose_first": sum(first_wins) / len(first_wins)})
