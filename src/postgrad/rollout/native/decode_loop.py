"""Continuous batching over the stock model: rows, the slots that they decode in, and their order.

Each prompt is prefilled once. Rows that have ended leave the batch, and waiting rows take their
slots.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from postgrad import phases
from postgrad.model.passes.attention import prompt_mask
from postgrad.model.passes.head import Head, head_of, upcast_head, upcast_logits
from postgrad.model.passes.support import LogitTransform, has_window
from postgrad.rollout.native.cache import PrefillCache, SlotCache
from postgrad.rollout.native.jobs import Job, Row
from postgrad.rollout.native.sampling import BLOCK, RowRandom, sample_mixed_tokens, truncate
from postgrad.rollout.stops import make_stops

PREFILL_TOKENS = 8192  # padded prompt tokens per prefill pass


def tokens_per_pass(num_keys: int) -> int:
    """Return how many tokens of a row one pass computes, if they attend to this many keys.

    Its attention mask is at most that of PREFILL_TOKENS tokens that attend to each other.
    """
    return max(1, min(PREFILL_TOKENS, PREFILL_TOKENS**2 // num_keys))


def bucket(count: int) -> int:
    """Round up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, ...

    The result is at most 1.5 times `count`, and there are few different sizes.
    """
    power = 1 << (count - 1).bit_length()
    three_quarters = power * 3 // 4
    return three_quarters if power >= 4 and count <= three_quarters else power


@dataclass
class PrefilledPrompt:
    """A prefilled prompt; not all of its rows have a slot yet."""

    job: Job
    cache: PrefillCache
    cache_row: int
    logits: Tensor  # (vocabulary,) after the prompt's last token


@dataclass
class Prefill:
    """Prompts that are prefilled together: several in one pass, or one in one pass or more."""

    jobs: list[Job]
    ids: Tensor  # (jobs, tokens)
    lengths: Tensor  # (jobs,)
    pass_tokens: int  # tokens per row that one pass computes
    cache: PrefillCache
    num_done: int = 0  # tokens per row


class Sampled(NamedTuple):
    """One new token for each of the active rows from `first` on."""

    tokens: list[int]
    logprobs: list[float]
    is_stop: list[bool]
    first: int
    kept_ids: list[list[int]]


class ModelToSample(Protocol):
    """What the decode loop and its streams need of an engine."""

    model: Any
    tokenizer: Any
    device: torch.device
    stop_ids: Tensor
    logit_transform: LogitTransform
    max_context: int
    weights_version: int


class DecodeLoop:
    """Decodes the rows of all jobs, at most `capacity` at a time.

    Args:
        engine: has the model.
        capacity: rows that decode at the same time.
        longest: tokens of the longest row, prompt and response together.
    """

    def __init__(self, engine: ModelToSample, capacity: int, longest: int) -> None:
        self.engine = engine
        self.capacity = capacity
        self.load_head()
        self.cache = SlotCache(self.capacity, longest)
        self.to_prefill: deque[Job] = deque()
        self.prefilled: deque[PrefilledPrompt] = deque()
        self.active: list[Row] = []
        # Of each slot:
        self.lengths = np.zeros(self.capacity, dtype=np.int64)  # tokens in the cache
        self.num_sampled = np.zeros(self.capacity, dtype=np.int64)  # tokens of the response
        self.uniforms = np.zeros((self.capacity, BLOCK))  # the next random numbers
        self.next_tokens = torch.zeros(self.capacity, dtype=torch.int64, device=engine.device)

    def load_head(self) -> None:
        """Take the head's weights from the model; in bfloat16 they may be a copy."""
        weight, bias = head_of(self.engine.model)
        self.head = Head(upcast_head(weight), bias)

    def add(self, job: Job) -> Job:
        """Queue a job; returns it."""
        job.stops = make_stops(self.engine.tokenizer, job.sampling)
        if job.request.seeds:
            self.to_prefill.append(job)
        return job

    @property
    def decoding_jobs(self) -> set[Job]:
        """The jobs that have decoding rows."""
        return {row.job for row in self.active}

    @property
    def has_waiting(self) -> bool:
        """Whether there are waiting rows."""
        return bool(self.prefilled or self.to_prefill)

    @property
    def waiting_jobs(self) -> set[Job]:
        """The jobs that have waiting rows."""
        return {*self.to_prefill, *(prompt.job for prompt in self.prefilled)}

    def drop(self, jobs: Collection[Job]) -> None:
        """Remove jobs with all their rows, decoding or not."""
        if not jobs:
            return
        self.to_prefill = deque(job for job in self.to_prefill if job not in jobs)
        self.prefilled = deque(prompt for prompt in self.prefilled if prompt.job not in jobs)
        self.remove([slot for slot, row in enumerate(self.active) if row.job in jobs])

    def finish(self) -> None:
        """Decode until every row has ended."""
        total = self.num_unfinished()
        self.fill()
        while self.active:
            self.step()
            phases.count(total - self.num_unfinished(), total)

    def num_unfinished(self) -> int:
        """Return how many rows wait or decode."""
        waiting = (len(job.request.seeds) - job.num_started for job in self.waiting_jobs)
        return len(self.active) + sum(waiting)

    def step(self) -> None:
        """Sample one token per active row; then waiting rows take the slots of ended rows."""
        self.record(self.sample(self.decode()))
        self.fill()

    def decode(self) -> Tensor:
        """Return the logits (active, vocabulary) after the last token of each active row.

        The number of rows is rounded up to a bucket with unused slots, because kernel libraries
        compile code for each new shape.
        """
        num_active = len(self.active)
        size = min(bucket(num_active), self.capacity)
        positions = np.zeros(size, dtype=np.int64)
        positions[:num_active] = self.lengths[:num_active]
        position_ids = torch.from_numpy(positions).to(self.engine.device)
        self.cache.set_positions(position_ids)
        hidden = self.engine.model.base_model(
            input_ids=self.next_tokens[:size, None],
            position_ids=position_ids[:, None],
            attention_mask=self.cache.mask(),
            past_key_values=self.cache,
            use_cache=True,
            **self._window_arguments(position_ids[:, None]),
        ).last_hidden_state[:, 0]
        self.lengths[:num_active] += 1
        return self.compute_logits(hidden)[:num_active]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits (rows, vocabulary) of the last hidden states (rows, width)."""
        transform = self.engine.logit_transform
        logits = upcast_logits(hidden, *self.head).float()
        if transform.scale != 1.0:
            logits = logits * transform.scale
        if transform.softcap is not None:
            logits = transform.softcap * torch.tanh(logits / transform.softcap)
        return logits

    def _window_arguments(self, positions: Tensor) -> dict[str, Tensor]:
        """Return the argument that attention needs for a model with a sliding window."""
        return {"token_positions": positions} if has_window(self.engine.model) else {}

    def sample(self, logits: Tensor, first: int = 0) -> Sampled:
        """Sample the next token of the active rows from `first` on, one per row of `logits`."""
        end = first + len(logits)
        for i in range(first, end):
            if self.num_sampled[i] % BLOCK == 0:
                self.uniforms[i] = self.active[i].random.block()
        columns = self.num_sampled[first:end] % BLOCK
        uniforms = self.uniforms[np.arange(first, end), columns]
        samplings = [row.job.sampling for row in self.active[first:end]]
        tokens, logprobs = sample_mixed_tokens(
            logits, torch.from_numpy(uniforms).to(logits.device), samplings
        )
        kept_ids = truncate(logits, logprobs, samplings)
        self.num_sampled[first:end] += 1
        self.next_tokens[first:end] = tokens
        is_stop = torch.isin(tokens, self.engine.stop_ids)
        return Sampled(tokens.tolist(), logprobs.tolist(), is_stop.tolist(), first, kept_ids)

    def record(self, sampled: Sampled) -> None:
        """Append the tokens to their rows and remove the rows that ended."""
        ended: list[int] = []
        for offset, token in enumerate(sampled.tokens):
            slot = sampled.first + offset
            row = self.active[slot]
            row.tokens.append(token)
            row.logprobs.append(sampled.logprobs[offset])
            row.kept_ids.append(sampled.kept_ids[offset])
            finish = row.finish_reason(sampled.is_stop[offset])
            self.on_token(row, finish)
            if finish:
                ended.append(slot)
        self.remove(ended)

    def on_token(self, row: Row, finish: str) -> None:
        """Called for every new token of a row; `finish` is not "" when it is the last one."""
        if finish:
            row.job.completions[row.index] = row.completion(finish)

    def remove(self, slots: list[int]) -> None:
        """Remove the rows of these slots, in ascending order. The last rows move into the gaps."""
        removed = set(slots)
        num_kept = len(self.active) - len(slots)
        gaps = [slot for slot in slots if slot < num_kept]
        moving = [i for i in range(num_kept, len(self.active)) if i not in removed]
        for target, source in zip(gaps, moving, strict=True):
            self.cache.move(source, target, int(self.lengths[source]))
            self.active[target] = self.active[source]
            for column in (self.lengths, self.num_sampled, self.uniforms, self.next_tokens):
                column[target] = column[source]
        del self.active[num_kept:]

    def fill(self) -> None:
        """Give waiting rows a slot while there are free ones.

        All rows that enter together get their first tokens from their prompts' logits at once.
        """
        while len(self.active) < self.capacity and self.has_waiting:
            if not self.prefilled:
                self.prefill()
            if not self.prefilled:
                return  # a server computes the next pass after a step
            first = len(self.active)
            cache = self.prefilled[0].cache  # all of them come from one prefill pass
            logits: list[Tensor] = []
            cache_rows: list[int] = []
            while self.prefilled and len(self.active) < self.capacity:
                cache_row = self.prefilled[0].cache_row
                logits.append(self.enter(self.prefilled[0]))
                cache_rows += [cache_row] * len(logits[-1])
            longest = int(self.lengths[first : len(self.active)].max())
            self.cache.copy_prompts(first, cache, cache_rows, longest)
            self.record(self.sample(torch.cat(logits), first))

    def enter(self, prompt: PrefilledPrompt) -> Tensor:
        """Give rows of a prompt the free slots; returns their logits (entered, vocabulary)."""
        job = prompt.job
        request = job.request
        first = len(self.active)
        count = min(self.capacity - first, len(request.seeds) - job.num_started)
        self.lengths[first : first + count] = len(request.prompt)
        self.num_sampled[first : first + count] = 0
        for index in range(job.num_started, job.num_started + count):
            self.active.append(Row(job, index, RowRandom(request.seeds[index])))
        job.num_started += count
        if job.num_started == len(request.seeds):
            self.prefilled.popleft()
        return prompt.logits.expand(count, -1)

    def prefill(self) -> None:
        """Prefill the next prompts, as many as can get a slot soon.

        They share one pass. A prompt that is too long for a pass is alone and takes several.
        """
        prefill = self.begin_prefill()
        while not self.advance_prefill(prefill):
            pass

    def pass_tokens(self, width: int) -> int:
        """Return how many tokens of a prompt of `width` tokens one pass computes."""
        return tokens_per_pass(width)

    def begin_prefill(self) -> Prefill:
        """Return the next prompts to prefill."""
        jobs = self._take_jobs_to_prefill()
        lengths = torch.tensor([len(job.request.prompt) for job in jobs])
        width = int(lengths.max())
        ids = torch.zeros(len(jobs), width, dtype=torch.int64)
        for row, job in enumerate(jobs):
            ids[row, : lengths[row]] = torch.tensor(job.request.prompt)
        return Prefill(jobs, ids, lengths, self.pass_tokens(width), PrefillCache())

    def advance_prefill(self, prefill: Prefill) -> bool:
        """Compute one pass; returns whether it was the last. Then the prompts are prefilled."""
        start = prefill.num_done
        prefill.num_done += prefill.pass_tokens
        ids = prefill.ids[:, : prefill.num_done]
        hidden = self._prefill_pass(ids, start, prefill.lengths, prefill.cache)
        self.on_prefill(prefill.jobs, hidden)
        if prefill.num_done < prefill.ids.shape[1]:
            return False
        device = self.engine.device
        rows = torch.arange(len(prefill.jobs), device=device)
        logits = self.compute_logits(hidden[rows, (prefill.lengths - 1 - start).to(device)])
        if not self.cache.keys:
            self.cache.allocate(prefill.cache)
        for row, job in enumerate(prefill.jobs):
            self.prefilled.append(PrefilledPrompt(job, prefill.cache, row, logits[row]))
        return True

    def _prefill_pass(
        self, ids: Tensor, first: int, lengths: Tensor, cache: PrefillCache
    ) -> Tensor:
        """Compute the tokens from `first` on of ids (jobs, tokens); those before are in the cache.

        Returns the last hidden states (jobs, tokens - first, width).
        """
        device = self.engine.device
        num_jobs, width = ids.shape
        positions = torch.arange(first, width, device=device)[None].expand(num_jobs, -1)
        return self.engine.model.base_model(
            input_ids=ids[:, first:].to(device),
            position_ids=positions,
            attention_mask=prompt_mask(lengths, width, first).to(device),
            past_key_values=cache,
            use_cache=True,
            **self._window_arguments(positions),
        ).last_hidden_state

    def on_prefill(self, jobs: Sequence[Job], hidden: Tensor) -> None:
        """Called with the last hidden states (jobs, tokens, width) of each prefill pass."""

    def _take_jobs_to_prefill(self) -> list[Job]:
        """Remove jobs from the queue: enough for the free slots, within PREFILL_TOKENS.

        A prompt that takes several passes is alone.
        """
        jobs: list[Job] = []
        free_slots = self.capacity - len(self.active)
        width = 0
        while self.to_prefill and free_slots > 0:
            request = self.to_prefill[0].request
            width = max(width, len(request.prompt))
            is_too_large = width * (len(jobs) + 1) > PREFILL_TOKENS
            if jobs and (is_too_large or width > self.pass_tokens(width)):
                break
            free_slots -= len(request.seeds)
            jobs.append(self.to_prefill.popleft())
        return jobs
