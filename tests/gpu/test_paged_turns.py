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

LIMIT = 600  # tokens after the first prompt
SAMPLING = Sampling(1.0, LIMIT, stop_ids=tuple(range(20, 60)))  # a turn has about 50 tokens


def make_engine(folder, dtype, **settings):
    from postgrad.model.load.load import load
    from postgrad.rollout.native.engine import NativeEngine

    loaded = load(ModelConfig(path=str(folder), dtype=dtype), torch.device("cuda"), 0)
    return NativeEngine(loaded, RolloutConfig(max_rows=16, **settings))


def play(engine) -> list[tuple[Request, Completion]]:
    """Return the requests and completions of all turns of 24 conversations."""
    prompts = [
        [(7 * i * (group + 1)) % 2000 + 20 for i in range(60 * group + 3)] for group in (0, 1, 6)
    ]
    requests: dict[int, Request] = {}
    turns: list[tuple[Request, Completion]] = []
    done = dict.fromkeys(range(24), 0)
    stream = engine.open_stream(SAMPLING, 24)
    assert stream.pages is not None
    with stream:
        for group, prompt in enumerate(prompts):
            keys = list(range(8 * group, 8 * group + 8))
            request = Request(prompt, keys, LIMIT)
            requests |= dict.fromkeys(keys, request)
            stream.add(request, keys)
        while stream.busy:
            for key, completion in stream.poll():
                turns.append((requests[key], completion))
                done[key] += 1
                if done[key] < 4:
                    new = [(31 * i + key) % 2000 + 20 for i in range(10 * done[key] + 1)]
                    text = [*requests[key].prompt, *completion.tokens, *new]
                    left = LIMIT - (len(text) - len(prompts[key // 8]))
                    if left > 0:
                        requests[key] = Request(text, [100 * key + done[key]], left)
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


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 3.0), ("bfloat16", 1.0)])
@pytest.mark.parametrize("cache_gib", [None, 0.012], ids=["ample", "tight"])
def test_kept_pages_give_the_log_probs_of_a_pass_over_the_whole_text(
    tmp_path, dtype, scale, cache_gib, monkeypatch
):
    """The pass is the stock model's; bounds are those of the gap between engine and trainer."""
    engine = make_engine(make_llama(tmp_path / "llama", scale), dtype, cache_gib=cache_gib)
    sizes = count_prefilled(engine, monkeypatch)
    turns = play(engine)
    num_prefilled = sum(sizes)
    num_tokens = sum(len(request.prompt) for request, _ in turns)
    assert len(turns) > 80
    if cache_gib is None:
        assert num_prefilled < 0.2 * num_tokens, "only new tokens are computed"
    gaps: list[torch.Tensor] = []
    for request, completion in turns:
        ids = torch.tensor([[*request.prompt, *completion.tokens]], device="cuda")
        with torch.no_grad():
            logits = engine.model(input_ids=ids, use_cache=False).logits[0].float()
        start = len(request.prompt)
        own = logits[start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]
        gaps.append((own - torch.tensor(completion.logprobs, device="cuda")).abs())
    gap = torch.cat(gaps)
    assert gap.max() < (1e-3 if dtype == "float32" else 0.2), gap.max()
    assert gap.mean() < (1e-4 if dtype == "float32" else 0.02), gap.mean()
