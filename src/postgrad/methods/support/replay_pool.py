"""The replay pool of ExGRPO: successful responses of problems that the policy solves only sometimes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.replay import bucket_weight, draw_from_buckets
from postgrad.types import Ragged

POOL_RANGES = ("all", "first_half", "last_half")
PICK_BY = ("entropy", "perplexity", "random")


@dataclass(frozen=True)
class Experience:
    """A success: its tokens with the log-probs, and the mean entropy, of the policy that wrote it."""

    tokens: Tensor  # (tokens,) int32
    logprobs: Tensor  # (tokens,) float32
    entropy: float

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.logprobs.double().mean()))


@dataclass
class Entry:
    """A problem of the pool: its latest number of successes, its different successes."""

    successes: int
    experiences: list[Experience] = field(default_factory=list)


class Pool:
    """Problems that were solved sometimes, by uid, the oldest first."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def add(self, uid: str, successes: int, new: Experience) -> None:
        """Store a success of a problem, unless it is there already."""
        entry = self.entries.setdefault(uid, Entry(successes))
        if not any(torch.equal(old.tokens, new.tokens) for old in entry.experiences):
            entry.experiences.append(new)

    def note(self, uid: str, successes: int) -> None:
        """The latest number of successes of a problem, if it is in the pool; without any it keeps its bucket."""
        if successes and uid in self.entries:
            self.entries[uid].successes = successes

    def drop(self, uid: str) -> None:
        self.entries.pop(uid, None)

    def choose(
        self, num: int, samples: int, kind: str, part: str, uniform: Callable[[], float]
    ) -> list[str]:
        """Up to `num` different problems: of all or of the older or younger half, by the weights of their buckets (none: all alike)."""
        uids = list(self.entries)
        half = len(uids) // 2
        buckets: dict[int, list[str]] = {}
        for uid in {"all": uids, "first_half": uids[:half], "last_half": uids[half:]}[part]:
            buckets.setdefault(0 if kind == "none" else self.entries[uid].successes, []).append(uid)
        weights = {
            key: 1.0 if kind == "none" else bucket_weight(kind, key, samples) for key in buckets
        }
        return draw_from_buckets(buckets, weights, num, uniform)

    def pick(self, uid: str, by: str, largest: bool, uniform: Callable[[], float]) -> Experience:
        """One success of a problem: of the least (or largest) entropy or perplexity when it was stored, or any."""
        stored = self.entries[uid].experiences
        if by == "random":
            return stored[int(uniform() * len(stored))]
        return (max if largest else min)(
            stored, key=lambda e: e.entropy if by == "entropy" else e.perplexity
        )

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_experiences(self) -> int:
        return sum(len(entry.experiences) for entry in self.entries.values())

    def state(self) -> dict[str, Any]:
        """All that `load` needs, as plain values and flat tensors."""
        stored = [
            (uid, entry.successes, e)
            for uid, entry in self.entries.items()
            for e in entry.experiences
        ]
        rows = [[uid, successes, e.entropy] for uid, successes, e in stored]
        lengths = torch.tensor([len(e.tokens) for _, _, e in stored], dtype=torch.int64)
        tokens = torch.cat([torch.zeros(0, dtype=torch.int32), *(e.tokens for _, _, e in stored)])
        logprobs = torch.cat([torch.zeros(0), *(e.logprobs for _, _, e in stored)])
        return {
            "rows": rows,
            "tokens": Ragged(tokens, lengths),
            "logprobs": Ragged(logprobs, lengths),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.entries = {}
        parts = zip(state["rows"], state["tokens"].split(), state["logprobs"].split(), strict=True)
        for (uid, successes, entropy), tokens, logprobs in parts:
            self.entries.setdefault(uid, Entry(successes)).experiences.append(
                Experience(tokens, logprobs, entropy)
            )
