"""Streams: conversations that join and continue give the same tokens as separate calls."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from postgrad.config.schema import RolloutConfig
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.stream import NativeStream
from postgrad.rollout.streams import WaveStream, open_stream

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 39,
    "pad_token_id": 38,
    "bos_token_id": None,
    "tie_word_embeddings": True,
}
SAMPLING = Sampling(max_new_tokens=12)


def make_engine(kind: str = "qwen") -> NativeEngine:
    torch.manual_seed(1)
    if kind == "qwen":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=8))
    from postgrad.model.passes.attention import register_attention

    model.set_attn_implementation(register_attention())
    tokenizer = SimpleNamespace(eos_token_id=39)
    return NativeEngine(SimpleNamespace(model=model, tokenizer=tokenizer), RolloutConfig())


def finish(stream) -> dict:
    found = {}
    while stream.busy:
        found.update(stream.poll())
    return found


def continue_rows(stream, prompts: list[list[int]], num_turns: int = 3) -> list[list]:
    """Conversations of several turns: each turn is followed by its number of tokens 5, 6, 7."""
    turns = [[] for _ in prompts]
    texts = [list(prompt) for prompt in prompts]
    with stream:
        for turn in range(num_turns):
            for key, text in enumerate(texts):
                stream.add(Request(list(text), [100 * key + turn], 12), [key])
            for key, completion in finish(stream).items():
                turns[key].append(completion)
                texts[key] += [*completion.tokens, *range(5, 6 + key % 3)]
    return turns


PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [2], [3, 1], [9] * 11]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen", "gemma"])
def test_conversations_give_the_tokens_of_separate_calls(kind):
    engine = make_engine(kind)
    stream = open_stream(engine, SAMPLING, 3)
    assert isinstance(stream, NativeStream) and stream.scheduler.store.capacity == 3
    waves = continue_rows(WaveStream(engine, SAMPLING), PROMPTS)
    streamed = continue_rows(stream, PROMPTS)
    for ours, theirs in zip(streamed, waves, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.tokens == other.tokens and one.finish == other.finish
            torch.testing.assert_close(
                torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=0
            )
    assert engine.model.training, "the engine leaves the model as it was"


def count_prefilled(stream, monkeypatch) -> list[int]:
    """The numbers of tokens of all passes with more than one token per row."""
    sizes: list[int] = []
    base_model = stream.engine.model.base_model
    forward = base_model.forward

    def counted(*args, **kwargs):
        if kwargs["input_ids"].shape[1] > 1:
            sizes.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    monkeypatch.setattr(base_model, "forward", counted)
    return sizes


def test_a_continued_row_computes_only_its_new_tokens(monkeypatch):
    stream = open_stream(make_engine(), SAMPLING, 1)
    sizes = count_prefilled(stream, monkeypatch)
    with stream:
        stream.add(Request([1] * 50, [3], 12), ["a"])
        ((_, first),) = finish(stream).items()
        longer = [*[1] * 50, *first.tokens, 5, 6, 7, 8]
        stream.add(Request(longer, [4], 12), ["a"])
        finish(stream)
        assert sizes == [49, 4], (
            "all but the last token; then the last sampled one and three new ones"
        )
        stream.forget("a")
        stream.add(Request([*longer, 9, 9], [5], 12), ["a"])
        finish(stream)
    assert sizes[2] == 50 + len(first.tokens) + 5, "nothing was saved"


def test_published_weights_drop_what_is_kept(monkeypatch):
    engine = make_engine()
    stream = open_stream(engine, SAMPLING, 1)
    sizes = count_prefilled(stream, monkeypatch)
    with stream:
        stream.add(Request([1] * 50, [3], 12), ["a"])
        ((_, first),) = finish(stream).items()
        weights = {name: 1.1 * parameter for name, parameter in engine.model.named_parameters()}
        engine.publish(weights)
        request = Request([*[1] * 50, *first.tokens, 5, 6], [4], 12)
        stream.add(request, ["a"])
        ours = finish(stream)["a"]
    assert sizes == [49, len(request.prompt) - 1], "the whole conversation"
    assert ours.tokens == engine.generate([request], SAMPLING)[0][0].tokens


def test_another_prompt_of_the_same_key_is_computed_anew():
    engine = make_engine()
    with open_stream(engine, SAMPLING, 2) as stream:
        stream.add(Request([1] * 9, [3], 5), ["a"])
        finish(stream)
        stream.add(Request([2] * 30, [4], 5), ["a"])
        ours = finish(stream)["a"]
    ((theirs,),) = engine.generate([Request([2] * 30, [4], 5)], SAMPLING)
    assert ours.tokens == theirs.tokens


def test_rows_join_while_others_decode():
    engine = make_engine()
    with open_stream(engine, SAMPLING, 4) as stream:
        stream.add(Request([1, 2], [1], 12), [0])
        stream.poll()
        stream.add(Request([3] * 40, [2], 12), [1])  # the slots grow
        found = finish(stream)
    for key, request in ((0, Request([1, 2], [1], 12)), (1, Request([3] * 40, [2], 12))):
        assert found[key].tokens == engine.generate([request], SAMPLING)[0][0].tokens
