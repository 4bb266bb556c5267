"""A decoder that records what each token sees, for tests of page tables.

The memory of this decoder has, for each line of each page, a token and a digest of all tokens that
were visible when the line was written. So a wrong page, position or segment makes a test fail.
"""

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config

from postgrad.model.passes.packing import BLOCK_N as PAGE
from postgrad.rollout.engine import Completion, Request, Sampling, token_limit
from postgrad.rollout.native import tables as state_lines
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.pages import PagePool
from postgrad.rollout.native.sampling import SeededRandom
from postgrad.rollout.native.tables import FIELDS, SAMPLING_FIELDS, BufferSizes

VOCABULARY = 97
STOP_ID = 96


def add_digest(digest: int, token: int) -> int:
    """Return the digest of some tokens and one more; their order counts."""
    return (digest * 31 + token + 1) % 1_000_003


def next_token(digest: int, uniform: float) -> int:
    """Return the token after a context with this digest."""
    return int(digest + float(uniform) * 1000) % VOCABULARY


def logits_after(digest: int) -> Tensor:
    """Return the logits (vocabulary,) after a context with this digest."""
    return (digest + 7 * torch.arange(VOCABULARY)) % VOCABULARY / 50


class Tokenizer:
    eos_token_id = STOP_ID

    def decode(self, ids, **_):
        return "".join(chr(33 + token) for token in ids)


class RecordingDecoder:
    """See the docstring of this file. Its model is itself."""

    device = torch.device("cpu")
    stop_ids = torch.tensor([STOP_ID], dtype=torch.int32)

    def __init__(self, captures: bool = False) -> None:
        self.captures = captures
        self.sizes = BufferSizes(0, 0, 0, 0, 0, 0)
        self.model = self
        self.num_prefilled: list[int] = []  # tokens of each pass

    def page_bytes(self) -> int:
        return 1

    def detach_cache(self) -> None:
        pass

    def drop_pages(self) -> None:
        self.sizes = self.sizes._replace(pages=0)

    def reserve(self, sizes: BufferSizes) -> None:
        self.sizes = BufferSizes(*map(max, self.sizes, sizes))
        sizes = self.sizes
        self.state = torch.zeros(FIELDS, sizes.rows, dtype=torch.int32)
        self.table = torch.zeros(sizes.rows, sizes.row_pages, dtype=torch.int32)
        self.uniforms = torch.zeros(sizes.slots, sizes.length)
        self.tokens = torch.zeros(sizes.slots, sizes.length, dtype=torch.int32)
        self.logprobs = torch.zeros(sizes.slots, sizes.length)
        self.sampling = torch.zeros(sizes.slots, SAMPLING_FIELDS)
        self.keys = self.values = torch.zeros(1, sizes.pages, PAGE, 1, 1)
        self.memory: dict[int, tuple[int, int]] = {}

    def get_decoder(self):
        return self.base_model

    def base_model(self, input_ids, position_ids, past_key_values, packing, **_) -> SimpleNamespace:
        """Write the tokens of a pass; the last hidden state of each is its digest."""
        tokens = input_ids[0].tolist()
        num_tokens = len(tokens)
        self.num_prefilled.append(num_tokens)
        earlier = past_key_values.earlier.tolist()
        # In the order of tokens: a row's prompt may be computed in the pass that continues the row.
        tiles = sorted(packing.query_tiles.tolist())
        for first, end, own_start, shared_start, shared_end in tiles:
            lines = earlier[shared_start - num_tokens : shared_end - num_tokens]
            digest = self.read(lines)
            for number in range(own_start, end):
                digest = add_digest(digest, tokens[number])
                if number >= first:
                    position = len(lines) + number - own_start
                    assert position_ids[0, number] == packing.positions[number] == position
                    self.memory[int(past_key_values.lines[number])] = (tokens[number], digest)
        states = [float(self.memory[line][1]) for line in past_key_values.lines.tolist()]
        for tile in packing.query_tiles.tolist():  # windows read the positions of earlier keys
            positions = packing.positions[tile[3] : tile[4]].tolist()
            assert positions == list(range(tile[4] - tile[3]))
        return SimpleNamespace(last_hidden_state=torch.tensor(states)[None, :, None])

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return logits (tokens, vocabulary) that differ for each digest and token."""
        return torch.stack([logits_after(int(digest)) for digest in states[:, 0]])

    def read(self, lines: list[int]) -> int:
        """Return the digest of the tokens of these lines; each was computed after the others."""
        digest = 0
        for line in lines:
            token, seen = self.memory[line]
            digest = add_digest(digest, token)
            assert digest == seen
        return digest

    def run(self, rows: int, steps: int, *extras: bool) -> None:
        for _ in range(steps):
            for row in range(rows):
                if self.state[state_lines.ALIVE, row]:
                    self.step(row)

    def capture(self, rows: int) -> None:
        pass

    def capture_prefill(self) -> None:
        pass

    def run_prefill(self) -> None:
        alive = self.state[state_lines.ALIVE].nonzero()[:, 0].tolist()
        assert max(alive) < state_lines.PREFILL_ROWS
        self.num_prefilled.append(len(alive))
        for row in alive:
            self.write(row)

    def write(self, row: int) -> tuple[int, int]:
        """Write a row's token to its line; returns its digest and the number of visible tokens."""
        state = [int(number) for number in self.state[:, row]]
        own = state[state_lines.NUM_EARLIER] + state[state_lines.NUM_OWN]
        num_shared_pages = state[state_lines.SHARED_PAGES]
        lines = self.lines(row, 0, state[state_lines.NUM_SHARED])
        lines += self.lines(row, num_shared_pages, own + 1)
        digest = add_digest(self.read(lines[:-1]), state[state_lines.TOKEN])
        self.memory[lines[-1]] = (state[state_lines.TOKEN], digest)
        return digest, len(lines)

    def step(self, row: int) -> None:
        state = [int(number) for number in self.state[:, row]]
        num_sampled = state[state_lines.NUM_OWN]
        digest, num_visible = self.write(row)
        slot = state[state_lines.SLOT]
        place = num_sampled % self.sizes.length
        is_greedy = self.sampling[slot, state_lines.INVERSE_TEMPERATURE] == 0
        uniform = 0.0 if is_greedy else float(self.uniforms[slot, place])
        token = next_token(digest, uniform)
        self.tokens[slot, place] = token
        self.logprobs[slot, place] = -float(num_visible)
        ended = token == STOP_ID or num_sampled + 1 >= state[state_lines.LIMIT]
        self.state[state_lines.TOKEN, row] = token
        self.state[state_lines.NUM_OWN, row] = num_sampled + 1
        self.state[state_lines.ALIVE, row] = 0 if ended else 1

    def lines(self, row: int, first_page: int, num_tokens: int) -> list[int]:
        pages = self.table[row, first_page:].tolist()
        return [pages[i // PAGE] * PAGE + i % PAGE for i in range(num_tokens)]


class RecordingEngine(NativeEngine):
    """A native engine over pages of a decoder that records; each page takes one byte."""

    def __init__(self, num_pages: int, max_rows: int = 16, captures: bool = False) -> None:
        self.model = SimpleNamespace(training=True, config=Qwen3Config())
        self.model.train = lambda mode=True: setattr(self.model, "training", mode)
        self.model.eval = lambda: self.model.train(False)
        self.decoder = RecordingDecoder(captures)  # type: ignore[assignment]
        self.tokenizer = Tokenizer()
        self.device = torch.device("cpu")
        self.stop_ids = torch.tensor([STOP_ID])
        self.max_rows = max_rows
        self.max_context = 4096
        self.cache_gib = num_pages / 2**30
        self.stock_engine = self.stream = None
        self.weights_version = 0

    @property
    def num_prefilled(self) -> list[int]:
        """The number of tokens of each prefill pass."""
        return self.decoder.num_prefilled  # type: ignore[union-attr]


def nothing_is_lost(pool: PagePool) -> bool:
    """Whether all pages are free or saved, if no text uses any."""
    pool.make_free(pool.num_pages)
    return sorted(pool.free) == list(range(pool.num_pages))


def expected(request: Request, index: int, sampling: Sampling) -> Completion:
    """The completion of one row, token by token."""
    limit = token_limit(request, sampling)
    uniforms = SeededRandom().draw(request.seeds[index], 0, limit).astype(np.float32)
    if sampling.temperature == 0:
        uniforms[:] = 0.0
    digest = 0
    for token in request.prompt:
        digest = add_digest(digest, token)
    tokens: list[int] = []
    finish = "length"
    while len(tokens) < limit and finish == "length":
        tokens.append(next_token(digest, uniforms[len(tokens)]))
        digest = add_digest(digest, tokens[-1])
        text = Tokenizer().decode(tokens)
        if tokens[-1] in (STOP_ID, *sampling.stop_ids) or any(
            stop in text for stop in sampling.stop
        ):
            finish = "stop"
    return Completion(tokens, [], finish)


def long_seeds(prompt: list[int], limit: int, count: int) -> list[int]:
    """Return seeds whose responses have `limit` tokens."""
    seeds: list[int] = []
    for seed in range(1000):
        if len(expected(Request(prompt, [seed], limit), 0, Sampling()).tokens) == limit:
            seeds.append(seed)
        if len(seeds) == count:
            return seeds
    raise AssertionError("too few seeds give long responses")
