"""Rows that go on while weights change: each token has the version that sampled it."""

from types import SimpleNamespace

import torch
from fake_engine import FakeEngine
from fake_stream import FakeStreamingEngine
from refused import refused
from transformers import Qwen3Config, Qwen3ForCausalLM

from postgrad.config.schema import RolloutConfig
from postgrad.rollout.continuous import ContinuousEngine
from postgrad.rollout.engine import Request

VOCABULARY = 12


def one_token_per_poll(engine, **settings) -> ContinuousEngine:
    return ContinuousEngine(engine, RolloutConfig(**settings), poll_s=0.0)


def rows_of(result) -> dict:
    return {(name, index): completion for name, index, completion in result["finished"]}


def test_each_token_has_the_version_of_the_weights_that_sampled_it():
    engine = FakeStreamingEngine(lambda prompt, seed: seed)
    continuous = one_token_per_poll(engine)
    names = ["a", "b"]
    finished = {}
    added = {"a": Request([1], [3, 9]), "b": Request([1], [6])}
    for version in (0, 0, 1, 3, 3, 3, 4, 4, 4, 4):
        engine.publish({"version": torch.tensor(version)})
        result = continuous.poll(version, names, added)
        assert result["missing"] == []
        finished |= rows_of(result)
        names = [name for name in names if name in continuous.unfinished]
        added = {"c": Request([2], [2])} if version == 1 else {}
        names += list(added)
    assert finished["a", 0].versions == [0, 0, 1]
    assert finished["a", 1].versions == [0, 0, 1, 3, 3, 3, 4, 4, 4]
    assert finished["b", 0].versions == [0, 0, 1, 3, 3, 3]
    assert finished["c", 0].versions == [3, 3]
    for completion in finished.values():
        assert [-logprob for logprob in completion.logprobs] == completion.versions
    assert not continuous.unfinished


def test_groups_that_are_no_longer_wanted_are_canceled_and_unknown_ones_are_missing():
    engine = FakeStreamingEngine(lambda prompt, seed: 3)
    continuous = one_token_per_poll(engine)
    continuous.poll(0, ["a", "b"], {"a": Request([1], [1, 2]), "b": Request([1], [3])})
    result = continuous.poll(0, ["b", "lost"], {})
    assert result["missing"] == ["lost"]
    assert set(continuous.stream.rows) == {("b", 0)}  # type: ignore[attr-defined]
    assert set(rows_of(continuous.poll(0, ["b"], {}))) == {("b", 0)}


def make_native_engine(max_rows: int):
    """A native engine on a model with an untied head, and the folded heads of two versions."""
    from postgrad.model.passes.attention import register_attention
    from postgrad.rollout.native.engine import NativeEngine

    torch.manual_seed(3)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=64,
            eos_token_id=VOCABULARY - 1,
            pad_token_id=None,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )
    model.set_attn_implementation(register_attention())
    tokenizer = SimpleNamespace(eos_token_id=VOCABULARY - 1)
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer)
    return NativeEngine(loaded, RolloutConfig(max_rows=max_rows))  # type: ignore[arg-type]


def reference_logprobs(model, head, prompt, tokens) -> torch.Tensor:
    """(tokens,) the log-probs of a response with this head, in one pass over the whole row."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    logits = hidden[len(prompt) - 1 : -1] @ head.T
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_native_rows_go_on_with_new_weights_and_so_do_prompts_that_wait_for_a_slot():
    """Only the head changes, so that keys and values of earlier tokens are those of every version.

    Two slots for four rows of one prompt: two rows wait with the logits of their prompt when the
    weights change.
    """
    engine = make_native_engine(max_rows=2)
    continuous = one_token_per_poll(engine, max_rows=2, max_response_tokens=10)
    heads = []
    for version in range(3):
        torch.manual_seed(version)
        heads.append(torch.randn(VOCABULARY, 16))
    prompt = [1, 2, 3]
    added = {"a": Request(prompt, [11, 12, 13, 14])}
    rows = {}
    for number in range(40):
        version = min(number // 4, 2)
        weights = dict(engine.model.named_parameters())
        continuous.publish({**weights, "lm_head.weight": heads[version]})
        rows |= rows_of(continuous.poll(version, ["a"] if len(rows) < 4 else [], added))
        added = {}
    assert len(rows) == 4
    assert len({tuple(row.versions) for row in rows.values()}) > 1
    assert any(len(set(row.versions)) > 1 for row in rows.values())
    for row in rows.values():
        expected = torch.stack(
            [reference_logprobs(engine.model, head, prompt, row.tokens) for head in heads]
        )
        own = expected[torch.tensor(row.versions), torch.arange(len(row.tokens))]
        torch.testing.assert_close(torch.tensor(row.logprobs), own, atol=1e-5, rtol=0)
        assert (expected[0] - expected[1]).abs().min() > 1e-3, "the versions can be told apart"


def test_an_engine_without_such_streams_is_refused():
    with refused("unsupported", "rollout.stream"):
        ContinuousEngine(FakeEngine(lambda prompt, seed: [1]), RolloutConfig())
