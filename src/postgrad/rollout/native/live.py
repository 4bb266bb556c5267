"""The decode loops of a server: jobs join and leave while others decode."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from postgrad.rollout.native.decode_loop import DecodeLoop, ModelToSample, Prefill, Sampled
from postgrad.rollout.native.jobs import (
    Job,
    LiveJob,
    LiveLoop,
    Report,
    Row,
    find_top_tokens,
    logprobs_at,
)

if TYPE_CHECKING:
    from postgrad.rollout.native.engine import NativeEngine

# Tokens of a long prompt that a CPU computes between two tokens of the decoding rows.
CPU_PASS_TOKENS = 256


def open_live_loop(
    engine: "NativeEngine", capacity: int, longest: int, cache_bytes: int, report: Report
) -> LiveLoop:
    """Return a loop over pages if the engine has a captured decoder, else one over slots.

    Args:
        engine: has the model.
        capacity: rows that decode at the same time.
        longest: tokens of prompt and response together.
        cache_bytes: memory for keys and values; slots take what their rows need.
        report: called with the new tokens of each row.
    """
    if engine.decoder is None:
        return LiveDecodeLoop(engine, capacity, longest, report)
    from postgrad.rollout.native.paged_live import PagedLiveLoop

    return PagedLiveLoop(engine, engine.decoder, capacity, longest, cache_bytes, report)


@torch.no_grad()
def warm_up(engine: "NativeEngine", capacity: int, longest: int, cache_bytes: int) -> None:
    """Capture the decoder's graphs, if it has any, before the first request waits for them."""
    if engine.decoder is None:
        return
    loop = open_live_loop(engine, capacity, longest, cache_bytes, lambda *_: None)
    loop.warm_up()
    loop.close()


class LiveDecodeLoop(DecodeLoop):
    """The loop of a server over slots; see jobs.LiveLoop. A step decodes one token per row."""

    def __init__(self, engine: ModelToSample, capacity: int, longest: int, report: Report) -> None:
        super().__init__(engine, capacity, longest)
        self.report = report
        self.prefilling: Prefill | None = None  # passes of it are left

    @property
    def busy(self) -> bool:
        return bool(self.active or self.has_waiting)

    @property
    def has_waiting(self) -> bool:
        return super().has_waiting or self.prefilling is not None

    @property
    def waiting_jobs(self) -> set[Job]:
        prefilling = self.prefilling.jobs if self.prefilling is not None else []
        return super().waiting_jobs.union(prefilling)

    def drop(self, jobs: Collection[Job]) -> None:
        super().drop(jobs)
        # One that is not complete after a pass has one job.
        if self.prefilling is not None and self.prefilling.jobs[0] in jobs:
            self.prefilling = None

    def pass_tokens(self, width: int) -> int:
        limit = CPU_PASS_TOKENS if self.engine.device.type == "cpu" else width
        return min(super().pass_tokens(width), limit)

    def prefill(self) -> None:
        """Compute one pass of the next prompts.

        The next pass of a long prompt follows after a token of the decoding rows. Meanwhile its
        client may leave.
        """
        if self.prefilling is None:
            self.prefilling = self.begin_prefill()
        if self.advance_prefill(self.prefilling):
            self.prefilling = None

    def step(self) -> None:
        if self.active:
            super().step()
        else:
            self.fill()

    def warm_up(self) -> None:
        """Do nothing: there are no graphs."""

    def close(self) -> None:
        """Do nothing: the slots are freed with the loop."""

    def sample(self, logits: Tensor, first: int = 0) -> Sampled:
        sampled = super().sample(logits, first)
        for i, row in enumerate(self.active[first : first + len(logits)]):
            job = row.job
            if isinstance(job, LiveJob) and job.num_top:
                logprobs = logprobs_at(logits[i : i + 1], job.sampling.temperature)
                job.top_tokens.setdefault(row.index, []).extend(
                    find_top_tokens(logprobs, job.num_top)
                )
        return sampled

    def on_prefill(self, jobs: Sequence[Job], hidden: Tensor) -> None:
        for job, states in zip(jobs, hidden, strict=True):
            if isinstance(job, LiveJob) and job.scores_prompt:
                job.score_prompt(states, self.compute_logits)

    def on_token(self, row: Row, finish: str) -> None:
        super().on_token(row, finish)
        self.report(row, 1, finish)
