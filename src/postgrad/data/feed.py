"""The problems of a run as a step sees them: the next ones, one by its uid, and the ones that need not come again."""

from collections.abc import Iterable, Sequence
from typing import Any

from postgrad.data.cursor import Cursor
from postgrad.problem import Problem


class Feed:
    """The training problems and where the run stands in them.

    Args:
        problems: the data.
        seed: of the order.
        shuffle: a new order each epoch; otherwise the data's own.
    """

    def __init__(self, problems: Sequence[Problem], seed: int = 0, shuffle: bool = True) -> None:
        self.problems = problems
        self.cursor = Cursor(len(problems), seed, shuffle)
        self.index = {problem.uid: i for i, problem in enumerate(problems)}

    def draw(self, count: int) -> list[Problem]:
        """The next problems."""
        return [self.problems[i] for i in self.cursor.take(count)]

    def find(self, uid: str) -> Problem:
        """The problem of this uid."""
        return self.problems[self.index[uid]]

    def retire(self, uids: Iterable[str]) -> None:
        """Leave these problems out from now on."""
        self.cursor.retire(self.index[uid] for uid in uids)

    @property
    def left(self) -> int:
        """Number of problems that are not retired."""
        return len(self.problems) - len(self.cursor.retired)

    @property
    def epoch(self) -> float:
        return self.cursor.epoch

    def state(self) -> dict[str, Any]:
        return self.cursor.state()

    def load(self, state: dict[str, Any]) -> None:
        self.cursor.load(state)
