"""Which problems come next: a resumable walk over the data, epoch after epoch."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from postgrad.errors import ConfigError, RunError


class Cursor:
    """Walks over the indices 0 .. num_items-1, each once an epoch, in an order that follows from (seed, epoch) alone.

    A take that crosses into a new epoch may hold an index twice: once from the end of one epoch, once from the start of the next.

    Args:
        num_items: size of the data.
        seed: of the order.
        shuffle: a new order each epoch; otherwise the data's own.
    """

    def __init__(self, num_items: int, seed: int = 0, shuffle: bool = True) -> None:
        if num_items < 1:
            raise ConfigError(
                "the data hold no problems; give data.train a source with at least one"
            )
        self.num_items, self.seed, self.shuffle = num_items, seed, shuffle
        self.retired: set[int] = set()
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> float:
        """Progress in epochs: 1.5 is half way through the second."""
        return self._epoch + self._position / self.num_items

    def take(self, n: int) -> list[int]:
        """The next n indices.

        Raises:
            ConfigError: the data are smaller than n.
            RunError: fewer than n are left because the others were retired.
        """
        if n > self.num_items:
            fix = f"set training.problems_per_step={self.num_items} or less"
            raise ConfigError(f"{n} problems a step wanted, the data hold {self.num_items}; {fix}")
        if n > (left := self.num_items - len(self.retired)):
            fix = "end here, or start a run on new data"
            raise RunError(
                f"{n} problems a step wanted, {left} of {self.num_items} are left, the others are retired; {fix}"
            )
        taken: list[int] = []
        while len(taken) < n:
            if self._position == self.num_items:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            index = self._order[self._position]
            self._position += 1
            if index not in self.retired:
                taken.append(index)
        return taken

    def retire(self, indices: Iterable[int]) -> None:
        """Leave these indices out from now on."""
        indices = {int(i) for i in indices}
        if wrong := [i for i in indices if not 0 <= i < self.num_items]:
            raise IndexError(
                f"cannot retire index {wrong[0]}: the data hold {self.num_items} problems"
            )
        self.retired |= indices

    def state(self) -> dict[str, Any]:
        """All that `load` needs, as plain JSON values."""
        return {
            "num_items": self.num_items,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "retired": sorted(self.retired),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ConfigError: the state is of data of another size, another seed or another shuffle.
        """
        own = self.state()
        if odd := sorted(own.keys() ^ state.keys()):
            raise ConfigError(
                f"data cursor: the checkpoint's state differs at {odd[0]!r}; use a checkpoint of this version"
            )
        for name, key in (
            ("num_items", "data.train"),
            ("seed", "seed"),
            ("shuffle", "data.shuffle"),
        ):
            if own[name] != state[name]:
                raise ConfigError(
                    f"data cursor: {name} is {own[name]} here and {state[name]} in the checkpoint; "
                    f"problems would be repeated or missed: give {key} as it was, or start a new run"
                )
        epoch, position, retired = state["epoch"], state["position"], set(state["retired"])
        if (
            epoch < 0
            or not 0 <= position <= self.num_items
            or not retired <= set(range(self.num_items))
        ):
            seen = f"epoch {epoch}, position {position} of {self.num_items}, {len(retired)} retired"
            raise ConfigError(
                f"data cursor: the checkpoint's state is damaged ({seen}); resume from an earlier checkpoint"
            )
        self._epoch, self._position, self.retired = epoch, position, retired
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_items))
        digest = hashlib.blake2b(
            f"{self.seed}:{epoch}".encode(), digest_size=16, person=b"cursor"
        ).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))
        return generator.permutation(self.num_items).tolist()
