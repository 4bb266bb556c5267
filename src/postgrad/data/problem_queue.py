"""The training problems of a run: the next ones, one by its uid, and those to leave out."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from postgrad.errors import Changed, Damaged, Missing, RunError, TooLarge
from postgrad.problem import Problem


class Cursor:
    """Iterates over the indices 0 .. num_items-1, each once per epoch.

    The order depends on (seed, epoch) only. A `take` that crosses into a new epoch may return an
    index twice: once from the end of one epoch, once from the start of the next.

    Args:
        num_items: number of rows.
        seed: random seed of the order.
        shuffle: use a new order in each epoch; otherwise the order of the file.
    """

    def __init__(self, num_items: int, seed: int = 0, shuffle: bool = True) -> None:
        if num_items < 1:
            raise Missing(
                "the data hold no problems; set data.train to a source with some", at="data.train"
            )
        self.num_items = num_items
        self.seed = seed
        self.shuffle = shuffle
        self.retired: set[int] = set()
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order(0)

    @property
    def epoch(self) -> float:
        """Progress in epochs: 1.5 is halfway through the second."""
        return self._epoch + self._position / self.num_items

    def take(self, n: int) -> list[int]:
        """Return the next n indices.

        Raises:
            ConfigError: the data have fewer than n rows.
            RunError: fewer than n rows are left because the others were retired.
        """
        if n > self.num_items:
            raise TooLarge(
                f"a step needs {n} problems, but the data hold {self.num_items}; "
                f"set training.problems_per_step={self.num_items} or less "
                "(from Python: batch_size=)",
                at="training.problems_per_step",
            )
        num_left = self.num_items - len(self.retired)
        if n > num_left:
            raise RunError(
                f"a step needs {n} problems, but {num_left} of {self.num_items} are left and the "
                "others are retired; end the run here, or start a run on new data"
            )
        taken: list[int] = []
        while len(taken) < n:
            if self._position == self.num_items:
                self._epoch += 1
                self._position = 0
                self._order = self._epoch_order(self._epoch)
            index = self._order[self._position]
            self._position += 1
            if index not in self.retired:
                taken.append(index)
        return taken

    def retire(self, indices: Iterable[int]) -> None:
        """Never returns these indices again."""
        retired = {int(i) for i in indices}
        for i in retired:
            if not 0 <= i < self.num_items:
                raise IndexError(
                    f"cannot retire index {i}: the data hold {self.num_items} problems"
                )
        self.retired |= retired

    def state(self) -> dict[str, Any]:
        """Everything `load` needs, as plain JSON values."""
        return {
            "num_items": self.num_items,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "retired": sorted(self.retired),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a saved `state`.

        Raises:
            ConfigError: the state is from data of another size, another seed or another shuffle.
        """
        current = self.state()
        unmatched = sorted(current.keys() ^ state.keys())
        if unmatched:
            raise Changed(
                f"data cursor: only one of this run and the checkpoint has {unmatched[0]!r}; "
                "use a checkpoint of this version"
            )
        settings = {"num_items": "data.train", "seed": "seed", "shuffle": "data.shuffle"}
        for name, key in settings.items():
            if current[name] != state[name]:
                raise Changed(
                    f"data cursor: {name} is {current[name]} here and {state[name]} in the "
                    "checkpoint, so problems would be repeated or skipped; "
                    f"set {key} as it was, or start a new run",
                    at=key,
                )
        self._check_progress(state)
        self._epoch = state["epoch"]
        self._position = state["position"]
        self.retired = set(state["retired"])
        self._order = self._epoch_order(self._epoch)

    def _check_progress(self, state: dict[str, Any]) -> None:
        epoch = state["epoch"]
        position = state["position"]
        retired = set(state["retired"])
        is_valid = (
            epoch >= 0 and 0 <= position <= self.num_items and retired <= set(range(self.num_items))
        )
        if not is_valid:
            raise Damaged(
                f"data cursor: the checkpoint's state is damaged (epoch {epoch}, position "
                f"{position} of {self.num_items}, {len(retired)} retired); "
                "resume from an earlier checkpoint"
            )

    def _epoch_order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_items))
        text = f"{self.seed}:{epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=16, person=b"cursor").digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
        return generator.permutation(self.num_items).tolist()


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
