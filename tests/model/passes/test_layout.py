"""Micro-batches and bundles change how much is computed, never the results."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import config_of, random_batch, rows_of, stock_model, stock_outputs

from postgrad.cluster.host import build_host
from postgrad.config.schema import ModelConfig
from postgrad.model.load.load import load
from postgrad.model.passes.layout import make_padded_micro_batches
from postgrad.model.policy import LocalPolicy
from postgrad.types import Batch, Trajectory

WIDE = 10**6  # at this width sharing a prompt always costs less


def tiny_llama(folder, kind: str, tied: bool):
    """Write a random Llama or Qwen2 with grouped heads and the tiny tokenizer."""
    import transformers

    from postgrad.model.load.tiny import tiny_tokenizer

    torch.manual_seed(3)
    shape = {"vocab_size": 18, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    names = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }
    make_config, make_model = names[kind]
    config = make_config(
        **shape,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=17,
        pad_token_id=16,
    )
    model = make_model(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.2)  # they start at zero, which would hide a missing bias
            elif p.dim() == 2:
                p.mul_(8)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module", params=["qwen3", "qwen3-untied", "llama", "llama-tied", "qwen2", "qwen2-tied"]
)
def model_folder(request, tiny, tiny_untied, tmp_path_factory):
    kind, _, tied = request.param.partition("-")
    if kind == "qwen3":
        return tiny_untied if tied else tiny
    return tiny_llama(tmp_path_factory.mktemp("models") / request.param, kind, bool(tied))


def policy_of(folder, *overrides) -> LocalPolicy:
    return build_host(config_of("grpo", folder, *overrides)).policy


def test_log_probs_and_entropy_equal_those_of_the_stock_model(model_folder):
    batch = random_batch(5, groups=5, samples=4)
    ours = policy_of(model_folder, "rollout.temperature=0.8").logprobs(batch)
    logprobs, entropy = stock_outputs(stock_model(model_folder), batch, 0.8)
    torch.testing.assert_close(ours["logprobs"].double(), logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours["entropy"].double(), entropy, rtol=1e-5, atol=1e-5)
    micro_batches = make_padded_micro_batches(batch, 8192, 32)
    assert any(micro.mask is not None for micro in micro_batches), "some rows share a prompt"


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 9, 23, 64, 10**6])
def test_any_token_budget_gives_the_same_log_probs(tiny, budget):
    batch = random_batch(7, groups=5, samples=4)
    alone = [policy_logprobs(tiny, batch.select([i])) for i in range(len(batch))]
    batched = policy_logprobs(tiny, batch, f"training.token_budget={budget}")
    torch.testing.assert_close(batched, torch.cat(alone), rtol=1e-5, atol=1e-5)


CACHE: dict = {}


def policy_logprobs(folder, batch, *overrides):
    key = (folder, *overrides)
    if key not in CACHE:
        CACHE[key] = policy_of(folder, *overrides)
    return CACHE[key].logprobs(batch)["logprobs"]


def test_responses_of_one_bundle_do_not_attend_to_each_other(tiny):
    prompt = [1, 2, 3, 4, 5, 6]
    first = Trajectory("a", prompt, [7, 8, 9, 10])
    with_one = Batch.of(
        [first, Trajectory("a", prompt, [0, 0, 0, 0, 0], index=1), Trajectory("b", [5], [1, 2])]
    )
    with_another = Batch.of(
        [first, Trajectory("a", prompt, [15, 14, 13], index=1), Trajectory("b", [9, 9, 9], [3])]
    )
    micro = make_padded_micro_batches(with_one, 8192, 32)
    assert any(m.mask is not None for m in micro)
    torch.testing.assert_close(
        policy_logprobs(tiny, with_one)[:4],
        policy_logprobs(tiny, with_another)[:4],
        rtol=0,
        atol=1e-6,
    )


def test_later_tokens_do_not_change_earlier_log_probs(tiny):
    rows = [Trajectory("a", [1, 2, 3], [4, 5, 6, tail]) for tail in (7, 8)]
    long = Trajectory("a", [1, 2, 3], [4, 5, 6, 9, 10, 11])
    values = [policy_logprobs(tiny, Batch.of([row]))[:3] for row in (*rows, long)]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(values[0], values[2], rtol=0, atol=1e-6)


def test_rows_with_empty_responses_are_left_out(tiny):
    batch = Batch.of(
        [Trajectory("a", [1, 2], []), Trajectory("b", [1, 2], [3, 4]), Trajectory("c", [5], [])]
    )
    assert policy_logprobs(tiny, batch).shape == (2,)
    assert [m.rows for m in make_padded_micro_batches(batch, 100, 32)] == [[1]]
    assert make_padded_micro_batches(batch.select([0, 2]), 100, 32) == []


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 80), st.sampled_from([1, 32, WIDE]), st.booleans())
def test_each_row_is_computed_once_within_the_budget_and_row_groups_stay_together(
    seed, budget, width, paired
):
    batch = random_batch(seed, groups=5, samples=4)
    draw = random.Random(seed)
    row_groups = [draw.randrange(4) for _ in range(len(batch))] if paired else None
    micros = make_padded_micro_batches(batch, budget, width, row_groups)
    assert sorted(row for m in micros for row in m.rows) == list(range(len(batch)))
    for micro in micros:
        if row_groups is None:
            assert micro.num_tokens <= budget or len(micro.ids) == 1
            continue
        num_joined = len(joined_groups(batch, micro.rows, row_groups))
        assert micro.num_tokens <= budget or num_joined == 1
        for group in {row_groups[row] for row in micro.rows}:
            rows_of_group = {row for row in range(len(batch)) if row_groups[row] == group}
            assert rows_of_group <= set(micro.rows)
    if row_groups is None and budget >= 80 and width == WIDE:
        prompts = {tuple(prompt) for prompt, _ in rows_of(batch)}
        assert sum(len(m.ids) for m in micros) == len(prompts)  # every prompt once


def joined_groups(batch, rows, row_groups):
    """Return the row groups of a micro-batch; those that share a bundle count as one."""
    groups = {row: {row_groups[row]} for row in rows}
    prompts = [tuple(p.tolist()) for p in batch.prompt.split()]
    changed = True
    while changed:
        changed = False
        for a in rows:
            for b in rows:
                if (prompts[a] == prompts[b] or groups[a] & groups[b]) and groups[a] != groups[b]:
                    groups[a] = groups[b] = groups[a] | groups[b]
                    changed = True
    return {frozenset(units) for units in groups.values()}


def test_a_prompt_is_shared_only_where_that_costs_less():
    short_prompt = Batch.of([Trajectory("a", [1], list(range(1, 400)), index=i) for i in range(3)])
    long_prompt = Batch.of(
        [Trajectory("a", list(range(400)), [1, 2, 3], index=i) for i in range(3)]
    )
    assert sum(len(m.ids) for m in make_padded_micro_batches(short_prompt, 10**6, 8)) == 3
    assert sum(len(m.ids) for m in make_padded_micro_batches(long_prompt, 10**6, 8)) == 1


def test_activation_checkpointing_changes_neither_log_probs_nor_gradients(tiny):
    from postgrad.model.metrics import MetricAccumulator
    from postgrad.model.port import FULL

    batch = random_batch(11)
    results = []
    for flag in ("false", "true"):
        policy = policy_of(tiny, f"model.activation_checkpointing={flag}")
        policy.accumulate(
            policy.objective.prepare(batch.select(range(len(batch)))), FULL, MetricAccumulator()
        )
        results.append(
            (
                policy.logprobs(batch)["logprobs"],
                {n: p.grad for n, p in policy.model.named_parameters()},
            )
        )
    torch.testing.assert_close(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name])


def test_the_models_own_head_is_never_called(tiny_untied):
    """It would compute the full logits of all tokens at once."""
    from postgrad.model.metrics import MetricAccumulator
    from postgrad.model.port import FULL
    from postgrad.rollout.engine import Request, Sampling

    host = build_host(config_of("grpo", tiny_untied))
    calls = []
    host.policy.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    batch = random_batch(2)
    host.policy.logprobs(batch)
    host.policy.accumulate(host.policy.objective.prepare(batch), FULL, MetricAccumulator())
    host.engine.generate([Request([1, 2], [3])], Sampling(max_new_tokens=3))
    assert calls == []


def test_a_loaded_model_uses_our_attention(tiny):
    loaded = load(ModelConfig(path=str(tiny), dtype="float32"), torch.device("cpu"))
    assert loaded.model.config._attn_implementation == "postgrad"
