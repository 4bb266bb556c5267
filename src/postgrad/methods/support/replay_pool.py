"""The replay pool of ExGRPO: successful responses of problems that are solved sometimes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.replay import bucket_weight, draw_from_buckets
from postgrad.types import TOOL, Batch, Ragged

POOL_RANGES = ("all", "first_half", "last_half")
PICK_BY = ("entropy", "perplexity", "random")


@dataclass(frozen=True)
class Experience:
    """A successful response, with log-probs and mean entropy of the policy that wrote it.

    Perplexity and mean entropy are over the policy's own tokens.
    """

    tokens: Tensor  # (tokens,) int32
    logprobs: Tensor  # (tokens,) float32
    own: Tensor  # (tokens,) bool: written by the policy, not by a tool
    entropy: float

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.logprobs[self.own].double().mean()))


@dataclass
class Entry:
    """A problem of the pool: its latest number of successes, and its distinct responses."""

    successes: int
    experiences: list[Experience] = field(default_factory=list)


class ReplayPool:
    """Problems that were solved sometimes, by uid, the oldest first."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def add(self, uid: str, successes: int, new: Experience) -> None:
        """Store a response of a problem, unless the same tokens are stored already."""
        entry = self.entries.setdefault(uid, Entry(successes))
        if not any(torch.equal(old.tokens, new.tokens) for old in entry.experiences):
            entry.experiences.append(new)

    def add_rows(self, rows: Batch, successes: Tensor, outputs: dict[str, Tensor]) -> None:
        """Store rows of successful responses.

        Args:
            successes: (rows,) the number of successes in the group of each row.
            outputs: `logprobs` and `entropy` of the policy, (tokens,) each.
        """
        lengths = rows.response.lengths
        tokens = rows.response.split()
        logprobs = Ragged(outputs["logprobs"], lengths).split()
        entropy = Ragged(outputs["entropy"], lengths).split()
        own = Ragged(rows.tokens["token_source"] != TOOL, lengths).split()
        for i, uid in enumerate(rows.rows["uid"]):
            experience = Experience(
                tokens[i].int(),
                logprobs[i].clone(),
                own[i].clone(),
                float(entropy[i][own[i]].double().mean()),
            )
            self.add(uid, int(successes[i]), experience)

    def set_successes(self, uid: str, successes: int) -> None:
        """Set the latest number of successes of a problem in the pool; 0 changes nothing."""
        if successes and uid in self.entries:
            self.entries[uid].successes = successes

    def drop(self, uid: str) -> None:
        self.entries.pop(uid, None)

    def choose(
        self, num: int, samples: int, weighting: str, pool_range: str, uniform: Callable[[], float]
    ) -> list[str]:
        """Draws up to `num` different problems by the weights of their buckets.

        Args:
            samples: responses per group.
            weighting: a name of algorithms.replay.BUCKET_WEIGHTS; `none` weighs all equally.
            pool_range: one of POOL_RANGES; first_half has the older problems.
            uniform: returns the next random number in [0, 1).
        """
        uids = list(self.entries)
        half = len(uids) // 2
        ranges = {"all": uids, "first_half": uids[:half], "last_half": uids[half:]}
        buckets: dict[int, list[str]] = {}
        for uid in ranges[pool_range]:
            bucket = 0 if weighting == "none" else self.entries[uid].successes
            buckets.setdefault(bucket, []).append(uid)
        weights = dict.fromkeys(buckets, 1.0)
        if weighting != "none":
            weights = {key: bucket_weight(weighting, key, samples) for key in buckets}
        return draw_from_buckets(buckets, weights, num, uniform)

    def pick(self, uid: str, by: str, largest: bool, uniform: Callable[[], float]) -> Experience:
        """One stored response: of the smallest or largest entropy or perplexity, or any."""
        stored = self.entries[uid].experiences
        if by == "random":
            return stored[int(uniform() * len(stored))]
        choose = max if largest else min
        return choose(stored, key=lambda one: one.entropy if by == "entropy" else one.perplexity)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_experiences(self) -> int:
        return sum(len(entry.experiences) for entry in self.entries.values())

    def state(self) -> dict[str, Any]:
        """Return the content of the pool as plain values and flat tensors."""
        rows: list[list[Any]] = []
        tokens = [torch.zeros(0, dtype=torch.int32)]
        logprobs = [torch.zeros(0)]
        own = [torch.zeros(0, dtype=torch.bool)]
        for uid, entry in self.entries.items():
            for experience in entry.experiences:
                rows.append([uid, entry.successes, experience.entropy])
                tokens.append(experience.tokens)
                logprobs.append(experience.logprobs)
                own.append(experience.own)
        lengths = torch.tensor([len(column) for column in tokens[1:]], dtype=torch.int64)
        return {
            "rows": rows,
            "tokens": Ragged(torch.cat(tokens), lengths),
            "logprobs": Ragged(torch.cat(logprobs), lengths),
            "own": Ragged(torch.cat(own), lengths),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continues from the result of state()."""
        self.entries = {}
        columns = [state[name].split() for name in ("tokens", "logprobs", "own")]
        for row, tokens, logprobs, own in zip(state["rows"], *columns, strict=True):
            uid, successes, entropy = row
            entry = self.entries.setdefault(uid, Entry(successes))
            entry.experiences.append(Experience(tokens, logprobs, own, entropy))


def count_successes(batch: Batch, success: Tensor) -> Tensor:
    """(rows,) the number of successes in the group of each row."""
    _, group = batch.rows["group"].unique(return_inverse=True)
    per_group = torch.zeros(len(batch), dtype=torch.int64).index_add(0, group, success.long())
    return per_group[group]
