"""The decode scheduler: which sequences decode, which wait, and which give way.

One loop for batches, streams and servers. It never sees a tensor: a store holds the keys and
values and runs the model. The order is a function of the order of `add` and of lengths only, so
that a run that is repeated gives the same bits.
"""

from collections import deque
from collections.abc import Collection, Hashable
from typing import Protocol

from postgrad.rollout.native.sequence import Job, Sequence


class Store(Protocol):
    """Holds the keys and values of sequences and decodes them.

    SlotStore has one line per sequence and runs the stock model. PageStore has pages, which the
    sequences of one prompt share, and replays captured steps.
    """

    def start(self, waiting: Collection[Sequence]) -> bool:
        """Give the first of these sequences room; False when it must wait for others to end.

        Raises CacheMemoryError for one that never has room.
        """
        ...

    def prefill(self, starting: Collection[Sequence]) -> None:
        """Compute what these sequences miss, or a part of it: then others decode in between."""
        ...

    def reserve(self, running: Collection[Sequence]) -> int:
        """Return for how many steps all sequences have room now; 0 when one must give way."""
        ...

    def decode(self, running: Collection[Sequence], steps: int) -> None:
        """Add at most `steps` tokens to each sequence; those that end get a `finish`."""
        ...

    def release(self, leaving: Collection[Sequence]) -> None:
        """Free the room of sequences. The text of one that ended and has a key is saved."""
        ...

    def forget(self, owner: Hashable) -> None:
        """Free what is saved for a job or a key."""
        ...

    def reload_weights(self) -> None:
        """Use the model's new weights; free all that is saved of the old ones."""
        ...

    def close(self) -> None:
        """Free the memory of keys and values; the store is not used any more."""
        ...


class Scheduler:
    """Decodes the sequences of all jobs, as many at a time as the store has room for."""

    def __init__(self, store: Store, version: int = 0) -> None:
        self.store = store
        self.version = version  # of the weights
        self.waiting: deque[Sequence] = deque()
        self.starting: list[Sequence] = []  # have room; their prompts are not complete
        self.running: list[Sequence] = []  # in the order of their start

    @property
    def busy(self) -> bool:
        """Whether there are sequences that have not ended."""
        return bool(self.waiting or self.starting or self.running)

    def add(self, job: Job, first: bool = False) -> Job:
        """Queue the sequences of a job, with `first` before those that wait; return the job."""
        job.num_waiting = len(job.sequences)
        self._stamp(job.sequences)
        if first:
            self.waiting.extendleft(reversed(job.sequences))
        else:
            self.waiting += job.sequences
        return job

    def step(self) -> list[Sequence]:
        """Let waiting sequences start, decode a few tokens, and return the sequences that ended."""
        self.admit()
        if steps := self.reserve():
            self.store.decode(self.running, steps)
        ended = [sequence for sequence in self.running if sequence.finish]
        self.running = [sequence for sequence in self.running if not sequence.finish]
        self.store.release(ended)
        return ended

    def admit(self) -> None:
        """Give waiting sequences room, in order, and compute their prompts."""
        while self.waiting and self.store.start(self.waiting):
            self.starting.append(self.waiting.popleft())
        self.store.prefill(self.starting)
        ready = [sequence for sequence in self.starting if not sequence.num_missing]
        self.starting = [sequence for sequence in self.starting if sequence.num_missing]
        self.running += ready
        for sequence in ready:
            sequence.job.num_waiting -= 1
            if not sequence.job.num_waiting:
                self.store.forget(sequence.job)

    def reserve(self) -> int:
        """Return for how many steps there is room; the last sequences give way if there is none."""
        steps = 0
        while self.running and not (steps := self.store.reserve(self.running)):
            self.preempt(self.running.pop())
        return steps

    def preempt(self, sequence: Sequence) -> None:
        """Put a sequence back to the front of the queue.

        One that somebody watches continues after its tokens. Others begin again, because the keys
        that a prefill computes differ from decoded ones by rounding.
        """
        self.store.release([sequence])
        if not sequence.job.is_watched:
            sequence.restart()
            self._stamp([sequence])
        sequence.job.num_waiting += 1
        self.waiting.appendleft(sequence)

    def cancel(self, jobs: Collection[Job]) -> None:
        """Remove jobs with all their sequences."""
        in_store = [*self.starting, *self.running]
        self.store.release([sequence for sequence in in_store if sequence.job in jobs])
        self.waiting = deque(sequence for sequence in self.waiting if sequence.job not in jobs)
        self.starting = [sequence for sequence in self.starting if sequence.job not in jobs]
        self.running = [sequence for sequence in self.running if sequence.job not in jobs]
        for job in jobs:
            self.store.forget(job)

    def weights_changed(self, version: int) -> None:
        """Continue with the model's new weights, from the next token on.

        The keys and values of running sequences stay as they are; other prompts are computed anew.
        """
        self.version = version
        self.store.reload_weights()
        for sequence in self.starting:
            sequence.num_computed = 0
        self._stamp([*self.waiting, *self.starting, *self.running])

    def _stamp(self, sequences: Collection[Sequence]) -> None:
        """Note which weights sample the next token of these sequences."""
        for sequence in sequences:
            sequence.versions[sequence.num_tokens] = self.version
