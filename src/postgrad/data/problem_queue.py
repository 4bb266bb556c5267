"""The training problems of a run: the next ones, one by its uid, and those to leave out."""

from collections.abc import Iterable, Sequence
from typing import Any

from postgrad.data.cursor import Cursor
from postgrad.problem import Problem


class ProblemQueue:
    """The training problems and the run's position in them.

    Args:
        problems: the training data.
        seed: random seed of the order.
        shuffle: use a new order in each epoch; otherwise the order of the file.
    """

    def __init__(self, problems: Sequence[Problem], seed: int = 0, shuffle: bool = True) -> None:
        self.problems = problems
        self.cursor = Cursor(len(problems), seed, shuffle)
        self.index = {problem.uid: i for i, problem in enumerate(problems)}

    def draw(self, count: int) -> list[Problem]:
        """Return the next `count` problems."""
        return [self.problems[i] for i in self.cursor.take(count)]

    def find(self, uid: str) -> Problem:
        """Return the problem with this uid."""
        return self.problems[self.index[uid]]

    def retire(self, uids: Iterable[str]) -> None:
        """Never draws these problems again."""
        self.cursor.retire(self.index[uid] for uid in uids)

    @property
    def left(self) -> int:
        """Number of problems that are not retired."""
        return len(self.problems) - len(self.cursor.retired)

    @property
    def epoch(self) -> float:
        """Progress in epochs: 1.5 is halfway through the second."""
        return self.cursor.epoch

    def state(self) -> dict[str, Any]:
        """Everything `load` needs, as plain JSON values."""
        return self.cursor.state()

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a saved `state`."""
        self.cursor.load(state)
