"""Continuous batching over the trainer's own model: one prefill a prompt, finished rows leave, waiting ones enter."""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from postgrad.config.schema import RolloutConfig
from postgrad.errors import RunError
from postgrad.model.device import free_memory_bytes, supports_triton
from postgrad.model.load import stop_ids
from postgrad.model.loaded import Loaded
from postgrad.model.passes.attention import prompt_mask
from postgrad.model.passes.head import upcast_head, upcast_logits
from postgrad.model.passes.support import has_window, support_of
from postgrad.rollout.engine import Completion, Request, Sampling, limit_of
from postgrad.rollout.hf import HfEngine
from postgrad.rollout.native.cache import Prefill, Slots
from postgrad.rollout.native.sampling import BLOCK, RowRandom, pick_mixed
from postgrad.rollout.stops import StopStrings

if TYPE_CHECKING:
    from postgrad.rollout.native.decoder import Decoder

PREFILL_TOKENS = 8192  # padded prompt tokens of one prefill pass


def bucket(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, ...: at most half more than asked for, and few different sizes."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


@dataclass(eq=False)
class Job:
    """One request, how its rows are sampled, and where its completions go."""

    request: Request
    sampling: Sampling
    done: list[Completion] = field(default_factory=list)
    stops: StopStrings | None = None

    def __post_init__(self) -> None:
        self.done = [Completion()] * len(self.request.seeds)

    @property
    def limit(self) -> int:
        return limit_of(self.request, self.sampling)


@dataclass(eq=False)
class Row:
    """One trajectory on its way."""

    job: Job
    index: int
    random: RowRandom
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def ends(self, stop: bool) -> str:
        """Why the row ends with its last token: stop or length, or empty when it goes on."""
        if stop or (
            self.job.stops is not None and self.job.stops.end(self.tokens, len(self.tokens) - 1)
        ):
            return "stop"
        return "length" if len(self.tokens) == self.job.limit else ""


@dataclass
class _Waiting:
    """A prefilled prompt whose samples have not all found a slot yet."""

    job: Job
    prefill: Prefill
    row: int
    logits: Tensor  # (vocabulary,)
    next_index: int = 0


class NativeEngine:
    """Samples from `loaded.model`, the very parameters that the trainer updates."""

    shares_weights = True

    def __init__(self, loaded: Loaded, config: RolloutConfig) -> None:
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.device = next(self.model.parameters()).device
        self.max_rows, self.cache_gib = config.max_rows or 256, config.cache_gib
        self.stop = torch.tensor(stop_ids(loaded), device=self.device)
        self.max_context = int(self.model.config.get_text_config().max_position_embeddings)
        self.transform = support_of(self.model).transform
        self.decoder = self._decoder() if supports_triton(self.device) else None
        self.stock_engine: HfEngine | None = None
        if reason := self._decode_problem(loaded):
            print(
                f"rollouts use transformers' generate, which is slower: {reason}", file=sys.stderr
            )
            self.stock_engine = HfEngine(loaded, config)

    def _decode_problem(self, loaded: Loaded) -> str:
        """Return why the cache of this engine cannot decode the model; empty when it can."""
        from postgrad.rollout.native.gate import decode_problem

        if support_of(self.model).passes == "rows":
            family = self.model.config.get_text_config().model_type
            return f"{family} has layers that are not attention over keys and values"
        return decode_problem(loaded, self)

    def _decoder(self) -> "Decoder | None":
        """The captured decode step; models of another family take the plain path, and that is said once."""
        from postgrad.rollout.native.decoder import Decoder, refusal

        if reason := refusal(self.model):
            print(f"rollouts take the plain path, several times slower: {reason}", file=sys.stderr)
            return None
        return Decoder(self.model, self.stop)

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Take weights from a trainer that lives elsewhere."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(weights[name])

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        if not any(r.seeds for r in requests):
            return [[] for _ in requests]
        if self.stock_engine is not None:
            return self.stock_engine.generate(requests, sampling)
        worst = max(requests, key=lambda r: len(r.prompt) + limit_of(r, sampling))
        longest = len(worst.prompt) + limit_of(worst, sampling)
        if longest > self.max_context:
            raise RunError(
                f"a prompt of {len(worst.prompt)} tokens and {limit_of(worst, sampling)} new ones exceed the model's context of "
                f"{self.max_context}; lower rollout.max_response_tokens or data.max_prompt_tokens"
            )
        self.model.eval()  # a model in training mode with activation checkpointing would not take our cache
        try:
            if self.decoder is not None and not sampling.filters:
                from postgrad.rollout.native.paged import PagedRun

                stops = StopStrings(self.tokenizer, sampling.stop) if sampling.stop else None
                room = self.max_rows, self.cache_bytes(), self.max_context
                return PagedRun(self.decoder, requests, sampling, *room, stops).finish()
            run = Run(self, min(self.max_rows, sum(len(r.seeds) for r in requests)), longest)
            jobs = [run.add(Job(request, sampling)) for request in requests]
            run.finish()
        finally:
            self.model.train()
        return [job.done for job in jobs]

    def cache_bytes(self) -> int:
        """Memory that keys and values may take on the device."""
        if self.cache_gib:
            return int(self.cache_gib * 2**30)
        return free_memory_bytes(self.device) // 3


class Run:
    """The state of a decode loop: rows of jobs enter while there is room, and leave when they end."""

    def __init__(self, engine: NativeEngine, capacity: int, longest: int) -> None:
        self.engine, self.capacity = engine, capacity
        self.head_weight = upcast_head(engine.model.get_output_embeddings().weight)
        self.slots = Slots(self.capacity, longest)
        self.to_prefill: deque[Job] = deque()
        self.waiting: deque[_Waiting] = deque()
        self.active: list[Row] = []
        self.lengths = np.zeros(self.capacity, dtype=np.int64)  # tokens in the cache
        self.steps = np.zeros(self.capacity, dtype=np.int64)  # tokens sampled
        self.uniforms = np.zeros((self.capacity, BLOCK))
        self.next_tokens = torch.zeros(self.capacity, dtype=torch.int64, device=engine.device)

    def add(self, job: Job) -> Job:
        """Let a job wait for its turn."""
        if job.sampling.stop:
            job.stops = StopStrings(self.engine.tokenizer, job.sampling.stop)
        if job.request.seeds:
            self.to_prefill.append(job)
        return job

    def finish(self) -> None:
        """Run until every trajectory has ended."""
        self.fill()
        while self.active:
            self.step()

    def step(self) -> None:
        """One token for every active row; then rows that waited take the places of those that ended."""
        self.take(*self.sample(self.decode()))
        self.fill()

    def decode(self) -> Tensor:
        """(active, vocabulary) logits after the last token of each active row.

        The row count is rounded up to a bucket with idle slots: a kernel library that prepares code for each new shape sees few.
        """
        n = len(self.active)
        size = min(bucket(n), self.capacity)
        positions = np.zeros(size, dtype=np.int64)
        positions[:n] = self.lengths[:n]
        where = torch.from_numpy(positions).to(self.engine.device)
        self.slots.at(where)
        hidden = self.engine.model.base_model(
            input_ids=self.next_tokens[:size, None],
            position_ids=where[:, None],
            attention_mask=self.slots.mask(),
            past_key_values=self.slots,
            use_cache=True,
            **self.positions_for_window(where[:, None]),
        ).last_hidden_state[:, 0]
        self.lengths[:n] += 1
        return self.head(hidden)[:n]

    def head(self, hidden: Tensor) -> Tensor:
        """Return the model's logits for the states (rows, width)."""
        transform = self.engine.transform
        logits = upcast_logits(hidden, self.head_weight).float()
        if transform.scale != 1.0:
            logits = logits * transform.scale
        if transform.softcap is not None:
            logits = transform.softcap * torch.tanh(logits / transform.softcap)
        return logits

    def positions_for_window(self, positions: Tensor) -> dict[str, Tensor]:
        """Return the argument that attention needs where the model has a sliding window."""
        return {"token_positions": positions} if has_window(self.engine.model) else {}

    def sample(
        self, logits: Tensor, first: int = 0
    ) -> tuple[list[int], list[float], list[bool], int]:
        """Next token of the active rows from `first` on."""
        for i in range(first, first + len(logits)):
            if self.steps[i] % BLOCK == 0:
                self.uniforms[i] = self.active[i].random.block()
        u = self.uniforms[first : first + len(logits), :][
            np.arange(len(logits)), self.steps[first : first + len(logits)] % BLOCK
        ]
        rows = self.active[first : first + len(logits)]
        tokens, logprobs = pick_mixed(
            logits, torch.from_numpy(u).to(logits.device), [row.job.sampling for row in rows]
        )
        self.steps[first : first + len(logits)] += 1
        self.next_tokens[first : first + len(logits)] = tokens
        stopped = torch.isin(tokens, self.engine.stop)
        return tokens.tolist(), logprobs.tolist(), stopped.tolist(), first

    def take(
        self, tokens: list[int], logprobs: list[float], stopped: list[bool], first: int
    ) -> None:
        """Record the tokens; rows that ended leave."""
        ended: list[int] = []
        for i, (token, logprob, stop) in enumerate(
            zip(tokens, logprobs, stopped, strict=True), start=first
        ):
            row = self.active[i]
            row.tokens.append(token)
            row.logprobs.append(logprob)
            finish = row.ends(stop)
            self.took(row, finish)
            if finish:
                ended.append(i)
        self.remove(ended)

    def took(self, row: Row, finish: str) -> None:
        """A row has got a token; `finish` is not empty when it was its last."""
        if finish:
            row.job.done[row.index] = Completion(row.tokens, row.logprobs, finish)

    def remove(self, ended: list[int]) -> None:
        """Let rows go, given in rising order; of the others, the last ones move into the gaps, each at most once."""
        kept, gone = len(self.active) - len(ended), set(ended)
        last = (i for i in range(kept, len(self.active)) if i not in gone)
        for target, source in zip((i for i in ended if i < kept), last, strict=True):
            self.slots.move(source, target, int(self.lengths[source]))
            self.active[target] = self.active[source]
            for column in (self.lengths, self.steps, self.uniforms, self.next_tokens):
                column[target] = column[source]
        del self.active[kept:]

    def fill(self) -> None:
        """Let waiting rows in while there is room; each gets its first token from its prompt's prefill, all of them at once."""
        while len(self.active) < self.capacity and (self.waiting or self.to_prefill):
            if not self.waiting:
                self.prefill()
            first, logits = len(self.active), []
            while self.waiting and len(self.active) < self.capacity:
                logits.append(self.enter(self.waiting[0]))
            self.take(*self.sample(torch.cat(logits), first))

    def enter(self, prompt: _Waiting) -> Tensor:
        """(rows, vocabulary) logits of a prompt's rows that found room and are active now."""
        request, first = prompt.job.request, len(self.active)
        room = min(self.capacity - first, len(request.seeds) - prompt.next_index)
        self.slots.admit(first, room, prompt.prefill, prompt.row, len(request.prompt))
        self.lengths[first : first + room], self.steps[first : first + room] = (
            len(request.prompt),
            0,
        )
        for index in range(prompt.next_index, prompt.next_index + room):
            self.active.append(Row(prompt.job, index, RowRandom(request.seeds[index])))
        prompt.next_index += room
        if prompt.next_index == len(request.seeds):
            self.waiting.popleft()
        return prompt.logits.expand(room, -1)

    def prefill(self) -> None:
        """Run the next prompts, as many as there is use for, and remember their keys, values and last logits."""
        chosen: list[Job] = []
        room, width = self.capacity - len(self.active), 0
        while self.to_prefill and room > 0:
            request = self.to_prefill[0].request
            width = max(width, len(request.prompt))
            if chosen and width * (len(chosen) + 1) > PREFILL_TOKENS:
                break
            room -= len(request.seeds)
            chosen.append(self.to_prefill.popleft())
        lengths = torch.tensor([len(job.request.prompt) for job in chosen])
        ids = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.int64)
        for row, job in enumerate(chosen):
            ids[row, : lengths[row]] = torch.tensor(job.request.prompt)
        device = self.engine.device
        cache = Prefill()
        positions = torch.arange(ids.shape[1], device=device)[None].expand(len(chosen), -1)
        hidden = self.engine.model.base_model(
            input_ids=ids.to(device),
            position_ids=positions,
            attention_mask=prompt_mask(lengths, ids.shape[1]).to(device),
            past_key_values=cache,
            use_cache=True,
            **self.positions_for_window(positions),
        ).last_hidden_state
        logits = self.head(
            hidden[torch.arange(len(chosen), device=device), (lengths - 1).to(device)]
        )
        if not self.slots.keys:
            self.slots.allocate(cache)
        for row, job in enumerate(chosen):
            self.waiting.append(_Waiting(job, cache, row, logits[row]))
