"""Conversations whose pages are kept between turns, on a GPU."""

import pytest
import torch
from llama import make_llama

from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.rollout.engine import Completion, Request, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SAMPLING = Sampling(1.0, 400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama") / "llama")


def make_engine(folder, dtype, **settings):
    from postgrad.model.load import load
    from postgrad.rollout.native.stream import StreamingNativeEngine

    loaded = load(ModelConfig(path=str(folder), dtype=dtype), torch.device("cuda"), 0)
    return StreamingNativeEngine(loaded, RolloutConfig(max_rows=16, **settings))


def play(engine) -> list[tuple[Request, int, Completion]]:
    """Return (request, index of the seed, completion) of all turns of 24 conversations."""
    from postgrad.rollout.native.paged_stream import PagedStream

    prompts = [
        [(7 * i * (group + 1)) % 2000 + 20 for i in range(60 * group + 3)] for group in (0, 1, 6)
    ]
    requests: dict[int, Request] = {}
    turns: list[tuple[Request, int, Completion]] = []
    done = dict.fromkeys(range(24), 0)
    stream = engine.open_stream(SAMPLING, 24)
    assert isinstance(stream, PagedStream)
    with stream:
        for group, prompt in enumerate(prompts):
            keys = list(range(8 * group, 8 * group + 8))
            request = Request(prompt, keys, 100)
            requests |= dict.fromkeys(keys, request)
            stream.add(request, keys)
        while stream.busy:
            for key, completion in stream.poll():
                turns.append((requests[key], 0 if done[key] else key % 8, completion))
                done[key] += 1
                if done[key] < 4:
                    new = [(31 * i + key) % 2000 + 20 for i in range(10 * done[key] + 1)]
                    text = [*requests[key].prompt, *completion.tokens, *new]
                    requests[key] = Request(text, [100 * key + done[key]], 40 + 3 * key)
                    stream.add(requests[key], [key])
    return turns


def count_prefilled(engine, monkeypatch) -> list[int]:
    sizes: list[int] = []
    base_model = engine.model.base_model
    forward = base_model.forward

    def counted(*args, **kwargs):
        sizes.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    monkeypatch.setattr(base_model, "forward", counted)
    return sizes


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.05)])
@pytest.mark.parametrize("cache_gib", [None, 0.012], ids=["ample", "tight"])
def test_kept_pages_give_the_tokens_of_prompts_that_are_computed_again(
    folder, dtype, bound, cache_gib, monkeypatch
):
    """After a token that differs by rounding, a row is not compared further."""
    engine = make_engine(folder, dtype, cache_gib=cache_gib)
    sizes = count_prefilled(engine, monkeypatch)
    turns = play(engine)
    num_prefilled = sum(sizes)
    num_tokens = sum(len(request.prompt) for request, _, _ in turns)
    if cache_gib is None:
        assert num_prefilled < 0.2 * num_tokens
    num_equal = 0
    fresh = engine.generate([request for request, _, _ in turns], SAMPLING)
    for (_, index, ours), group in zip(turns, fresh, strict=True):
        theirs = group[index]
        num_equal += ours.tokens == theirs.tokens
        pairs = zip(ours.tokens, theirs.tokens, ours.logprobs, theirs.logprobs, strict=False)
        for token, other, logprob, other_logprob in pairs:
            if token != other:
                break
            assert abs(logprob - other_logprob) < bound
    assert num_equal >= (0.98 if dtype == "float32" else 0.5) * len(turns)
