"""A prompt that is too long for one prefill pass takes several, with the same numbers."""

import importlib.util
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import make_family
from interpreted import run_interpreted

from postgrad.model.passes.attention import NAME, register_attention
from postgrad.model.passes.support import support_of
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.rollout.native import store_slots
from postgrad.rollout.native.engine import NativeStream
from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.native.store_slots import SlotStore

PROMPT = [i * 7 % 16 for i in range(30)]

# ---- over slots


def make_engine(family: str) -> Any:
    register_attention()
    model = make_family(family).eval()
    model.set_attn_implementation(NAME)
    return SimpleNamespace(
        model=model,
        tokenizer=None,
        device=torch.device("cpu"),
        stop_ids=torch.tensor([17]),
        logit_transform=support_of(model).transform,
        max_context=512,
        weights_version=0,
        step=Scheduler.step,
    )


def count_passes(engine: Any) -> list[int]:
    """Return a list that gets the number of tokens per row of each pass with several."""
    sizes: list[int] = []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            sizes.append(kwargs["input_ids"].shape[1])

    engine.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return sizes


@torch.no_grad()
def decode(engine: Any) -> list[Job]:
    """Return jobs that have ended: a long prompt that is scored, and two short ones."""
    loop = Scheduler(SlotStore(engine, 8, 64))
    jobs = [
        Job(Request(PROMPT, [1, 2], 4), Sampling(), num_top=2, scores_prompt=True),
        Job(Request([3, 5], [4], 4), Sampling(0.0, 99)),
        Job(Request([3, 5, 7], [4], 4), Sampling()),
    ]
    for job in jobs:
        loop.add(job)
    while loop.busy:
        loop.step()
    return jobs


@torch.no_grad()
def test_a_long_prompt_does_not_hold_up_the_rows_of_a_server():
    """The other rows get a token between two passes, and a request can leave between them."""
    engine = make_engine("qwen3")
    engine.stop_ids = torch.tensor([-1])
    sizes = count_passes(engine)
    scheduler = Scheduler(SlotStore(engine, 8, 64, chunk=8))
    (short,) = scheduler.add(Job(Request([3, 5], [4], 9), Sampling())).sequences
    scheduler.step()
    sizes.clear()
    (long,) = scheduler.add(Job(Request(PROMPT, [1], 4), Sampling())).sequences
    (shortest,) = scheduler.add(Job(Request([2], [1], 4), Sampling())).sequences
    for number in range(4):
        assert long.num_tokens == 0 and short.num_tokens == number + 1
        assert shortest.num_tokens == number, "it does not wait for the long one"
        scheduler.step()
    assert sizes == [8, 8, 8, 5] and long.num_tokens == 1
    leaving = scheduler.add(Job(Request(PROMPT, [1], 4), Sampling()))
    scheduler.step()
    assert scheduler.starting == leaving.sequences
    scheduler.cancel({leaving})
    sizes.clear()
    while scheduler.busy:
        scheduler.step()
    assert not sizes and not leaving.sequences[0].tokens


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_slots_hold_what_one_pass_gives(family, monkeypatch):
    """Also with a sliding window of 8 tokens, and with attention sinks."""
    engine = make_engine(family)
    sizes = count_passes(engine)
    whole = decode(engine)
    assert sizes == [29]
    sizes.clear()
    monkeypatch.setattr(store_slots, "PREFILL_TOKENS", 18)
    parts = decode(engine)
    assert sizes == [11, 11, 7, 2], "18 * 18 // 29 tokens attend to 29 keys"
    for one, two in zip(whole, parts, strict=True):
        assert one.prompt_logprobs == pytest.approx(two.prompt_logprobs, abs=1e-5)
        assert (
            len(one.prompt_logprobs)
            == len(one.prompt_top_tokens)
            == (len(PROMPT) - 1) * (one is whole[0])
        )
        for mine, other in zip(one.prompt_top_tokens, two.prompt_top_tokens, strict=True):
            assert [token for token, _ in mine] == [token for token, _ in other]
        for mine, other in zip(one.completions, two.completions, strict=True):
            assert mine.tokens == other.tokens
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_long_turn_of_a_conversation_is_computed_in_parts(monkeypatch):
    """Its earlier turns are not computed again."""
    engine = make_engine("qwen3")
    sizes = count_passes(engine)

    def second_turn() -> Any:
        with NativeStream(engine, Sampling(), SlotStore(engine, 2)) as stream:
            found: list[Any] = []
            texts = [[1, 2, 3], [1, 2, 3, 4, 5, *PROMPT]]
            for text in texts:  # the first turn is saved as [1, 2, 3]: its token is not computed
                stream.add(Request(text, [1], 1), ["key"])
                while stream.busy:
                    found += [completion for _, completion in stream.poll()]
        return found[1]

    whole = second_turn()
    assert sizes == [2, 31]
    sizes.clear()
    monkeypatch.setattr(store_slots, "PREFILL_TOKENS", 20)
    parts = second_turn()
    assert sizes == [2, 11, 11, 9]
    assert whole.tokens == parts.tokens
    assert whole.logprobs == pytest.approx(parts.logprobs, abs=1e-5)


def test_passes_that_continue_conversations_are_bounded(monkeypatch):
    """Two rows of 2 new tokens that attend to 22 keys have a larger mask than 9 * 9."""
    engine = make_engine("qwen3")
    monkeypatch.setattr(store_slots, "PREFILL_TOKENS", 9)
    shapes: list[tuple[int, int]] = []
    with NativeStream(engine, Sampling(), SlotStore(engine, 2)) as stream:
        for text in (PROMPT[:20], PROMPT[:23]):
            for key in "ab":
                stream.add(Request([*text], [1], 1), [key])
            if len(text) == 23:
                engine.model.base_model.register_forward_pre_hook(
                    lambda _module, _args, kwargs: shapes.append(kwargs["input_ids"].shape),
                    with_kwargs=True,
                )
            while stream.busy:
                stream.poll()
    assert shapes == [(1, 2), (1, 2), (2, 1)]


# ---- over pages, with a decoder that records what each token sees

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def prompt_logprobs(prompt: list[int]) -> list[float]:
    """Return what RecordingDecoder's logits give the prompt's tokens from the second on."""
    from recording_decoder import add_digest, logits_after

    logprobs: list[float] = []
    digest = 0
    for token, target in pairwise(prompt):
        digest = add_digest(digest, token)
        logprobs.append(float(logits_after(digest).log_softmax(0)[target]))
    return logprobs


@needs_triton
@pytest.mark.parametrize("num_pages", [60, 8], ids=["ample", "tight"])
def test_passes_over_pages_are_bounded(num_pages, monkeypatch):
    """With few pages, rows are preempted, and their prompts are computed again."""
    from recording_decoder import RecordingEngine, expected, long_seeds

    from postgrad.rollout.native import prefill

    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 64)
    engine = RecordingEngine(num_pages)
    loop = engine.open_server(4, 320, num_pages)
    prompt = [5 + i % 50 for i in range(150)]
    seeds = long_seeds(prompt, 150, 2)
    scored = Job(Request(prompt, seeds, 150), Sampling(1.0, 150), scores_prompt=True)
    jobs = [scored, Job(Request(prompt, [6], 90), Sampling(0.0, 90))]
    for job in jobs:
        job.is_watched = True
        loop.add(job)
    loop.step()
    prefilled = engine.num_prefilled
    assert prefilled[:3] == [64, 64, 21], "149 tokens of the prompt, for both of its rows"
    while loop.busy:
        loop.step()
    assert max(prefilled) == 64
    assert (sum(prefilled) > 2 * 149) == (num_pages == 8)
    for job in jobs:
        for index in range(len(job.request.seeds)):
            assert (
                job.completions[index].tokens == expected(job.request, index, job.sampling).tokens
            )
    assert scored.prompt_logprobs == pytest.approx(prompt_logprobs(prompt))
    assert len(scored.prompt_top_tokens) == 149


@needs_triton
def test_a_turn_over_pages_is_bounded(monkeypatch):
    """The new tokens of a turn continue in the pages of the turns before."""
    from recording_decoder import RecordingEngine, expected

    from postgrad.rollout.native import prefill

    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 64)
    engine = RecordingEngine(60)
    sampling = Sampling(1.0, 300)
    text = [5 + i % 50 for i in range(70)]
    with engine.open_stream(sampling, 2) as stream:
        for num_passes in (2, 3):
            request = Request(text, [3], 20)
            stream.add(request, ["key"])
            found: list[Completion] = []
            while stream.busy:
                found += [completion for _, completion in stream.poll()]
            (completion,) = found
            assert completion.tokens == expected(request, 0, sampling).tokens
            assert len(engine.num_prefilled) == num_passes and max(engine.num_prefilled) <= 64
            engine.num_prefilled.clear()
            text = [*text, *completion.tokens, *[5 + i % 50 for i in range(130)]]


@needs_triton
def test_the_samples_of_an_echoed_prompt_share_its_pages():
    """Another request for the same log-probs has its own, and so has one without log-probs."""
    from recording_decoder import RecordingEngine

    engine = RecordingEngine(60)
    loop = engine.open_server(4, 320, 60)
    prompt = [3, 4] * 35
    jobs = [Job(Request(prompt, [1], 5), Sampling(), is_watched=True)]
    for _ in "ab":
        request = Request(prompt, [1, 2, 3], 5)
        jobs.append(Job(request, Sampling(), scores_prompt=True, is_watched=True))
    for job in jobs:
        loop.add(job)
    while loop.busy:
        loop.step()
    assert sum(engine.num_prefilled) == 3 * 69
    for job in jobs[1:]:
        assert job.prompt_logprobs == pytest.approx(prompt_logprobs(prompt))


# ---- over pages, with the kernels

PROGRAM = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from postgrad.model.passes import packing
packing.BLOCK_M = packing.BLOCK_N = 16  # also the tokens of a page; the other modules copy it
from families import make_family
from postgrad.model.passes.attention import NAME, register_attention
from postgrad.model.kernels.install import install_kernels
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native import prefill
from postgrad.rollout.native.decoder import Decoder
from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.native.store_pages import PageStore

register_attention()
SIZES = {"sliding_window": 18, "num_hidden_layers": 1, "num_attention_heads": 2}
model, stock = (make_family("mistral", **SIZES, num_key_value_heads=1).eval() for _ in range(2))
model.set_attn_implementation(NAME)
install_kernels(model)
sizes = []
model.base_model.register_forward_pre_hook(
    lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
)
prompt = [i * 7 % 16 for i in range(37)]

@torch.no_grad()
def decode(limit):
    prefill.PREFILL_TOKENS = limit
    decoder = Decoder(model, torch.tensor([17]))
    store = PageStore(decoder, 8, lambda: 20 * decoder.page_bytes(), 128, True, 128)
    loop = Scheduler(store)
    job = Job(Request(prompt, [1, 2], 1), Sampling(0.9, 9), scores_prompt=True, is_watched=True)
    loop.add(job)
    loop.step()
    return job

a, b = decode(16384), decode(16)
assert sizes == [36, 16, 16, 4], sizes
for x, y in zip(a.completions, b.completions, strict=True):
    assert x.tokens == y.tokens and len(x.tokens) == 1
    assert abs(x.logprobs[0] - y.logprobs[0]) < 1e-5
assert len(a.prompt_logprobs) == 36
assert max(abs(p - q) for p, q in zip(a.prompt_logprobs, b.prompt_logprobs, strict=True)) < 1e-5
with torch.no_grad():
    logits = stock(input_ids=torch.tensor([prompt])).logits[0, :-1] / 0.9
exact = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
torch.testing.assert_close(torch.tensor(b.prompt_logprobs), exact, rtol=0, atol=1e-4)
print("same")
"""


@pytest.mark.slow
def test_log_probs_of_a_windowed_model_are_those_of_one_pass():
    """In Triton's interpreter: tokens, log-probs and those of the prompt."""
    run_interpreted(PROGRAM, Path(__file__).parents[1])
