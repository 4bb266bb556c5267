"""A language model that compares: it is shown a response and the problem's reference answer, and says which is better."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from postgrad.config.schema import JudgeConfig
from postgrad.judge.llm import Ask, LlmJudge, put, question_of
from postgrad.problem import Failure, Problem, Score

RANKING = re.compile(r"^[\s>#*_`-]*ranking[\s*_`]*:(.*)$", re.IGNORECASE | re.MULTILINE)
FIRST, TIE, SECOND = 2, 1, 0  # verdicts on two answers, in halves of the first one's win
ORDERS = {"a>b": FIRST, "b>a": SECOND, "a=b": TIE, "b=a": TIE}


def parse_ranking(answer: str) -> int | None:
    """FIRST, TIE or SECOND: the last RANKING line of a judge's answer, or an answer that is one ranking and nothing else; None otherwise.

    A > B, B > A, A = B: nothing but these, white space, Markdown's marks and a full stop at the end aside. A ranking in prose is none.
    """
    lines = RANKING.findall(answer)
    text = re.sub(r"[\s*_`]", "", lines[-1] if lines else answer)
    return ORDERS.get(text.removesuffix(".").lower())


def answer_of(response: str, stops: Sequence[str]) -> str:
    """A response up to the string that ended it (rollout.stop), which stands in its tokens and is no part of what a user reads."""
    ends = [response.find(stop) for stop in stops if stop in response]
    return response[: min(ends)] if ends else response


class PairJudge(LlmJudge):
    """Compares each response with its problem's ground truth, another answer to the same question.

    The two are shown in an order that follows from `seed`, problem and response, as judges favor a place; with
    reward.judge.both_orders in either order, and the two verdicts are averaged. Equal texts are a tie that nobody is asked about.
    Of a response that one of `stops` ended the judge sees what stands before it.
    """

    def __init__(
        self,
        config: JudgeConfig,
        template: str,
        ask: Ask,
        file: Path | None = None,
        who: str = "",
        seed: int = 0,
        stops: Sequence[str] = (),
    ) -> None:
        super().__init__(config, template, ask, file, who)
        self.seed, self.stops = seed, stops

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score | Failure]:
        """1 for a response that is better than the reference, 0.5 for a tie, 0 for one that is worse; a Failure where a verdict is missing.

        Parts: `win` is the same; `chose_first` says how often the judge preferred what it was shown first (a tie counts half).
        """
        responses = [answer_of(response, self.stops) for response in responses]
        shown = [
            (i, order)
            for i, text in enumerate(responses)
            for order in self.orders(problems[i], text)
        ]
        prompts = [self.prompt(problems[i], responses[i], own_first) for i, own_first in shown]
        found: list[list[tuple[bool, int | Failure]]] = [[] for _ in responses]
        for (i, own_first), verdict in zip(
            shown, self.verdicts(prompts, parse_ranking, "ranking"), strict=True
        ):
            found[i].append((own_first, verdict))
        return [_pair_score(one) for one in found]

    def orders(self, problem: Problem, response: str) -> tuple[bool, ...]:
        """Whether the response is shown first, of each time it is shown."""
        if response == problem.ground_truth:
            return ()
        if self.config.both_orders:
            return True, False
        digest = hashlib.blake2b(
            f"{self.seed}\0{problem.uid}\0{response}".encode(), digest_size=1
        ).digest()
        return (digest[0] % 2 == 0,)

    def prompt(self, problem: Problem, response: str, own_first: bool) -> str:
        first, second = (
            (response, problem.ground_truth) if own_first else (problem.ground_truth, response)
        )
        return put(self.template, question=question_of(problem), first=first, second=second)


def _pair_score(found: Sequence[tuple[bool, int | Failure]]) -> Score | Failure:
    if not found:
        return Score(0.5, {"win": 0.5})
    wins: list[float] = []
    firsts: list[float] = []
    for own_first, verdict in found:
        if isinstance(verdict, Failure):
            return verdict
        firsts.append(verdict / FIRST)
        wins.append(firsts[-1] if own_first else 1 - firsts[-1])
    win = sum(wins) / len(wins)
    return Score(win, {"win": win, "chose_first": sum(firsts) / len(firsts)})
