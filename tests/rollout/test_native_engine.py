"""The native engine: exact, independent of its neighbors, one prefill a prompt."""

import pytest
import torch
from tiny_runs import END, config_of, random_batch, stock_model, stock_row

from postgrad.cluster.host import build_host
from postgrad.cluster.ports import RunModels
from postgrad.rollout.engine import Request, Sampling, trajectory_seed
from postgrad.rollout.native import engine as engine_module
from postgrad.rollout.native.sampling import SeededRandom
from postgrad.rollout.native.store_slots import SlotStore, bucket
from postgrad.types import Batch, Trajectory

PROMPTS = [
    [1, 10, 2, 15],
    [3, 4, 10, 5, 6, 15],
    [7, 15, 15],
    [0, 1, 2, 3, 4, 5, 6, 7, 8],
    [9, 12, 9, 12, 15],
    [8, 8, 8],
]
SAMPLING = Sampling(temperature=1.3, max_new_tokens=12)


def requests(samples: int = 3) -> list[Request]:
    return [
        Request(prompt, [trajectory_seed(0, 1, str(i), j) for j in range(samples)])
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def host(tiny) -> RunModels:
    return build_host(config_of("grpo", tiny, "rollout.temperature=1.3"))


def with_rows(host: RunModels, max_rows: int):
    host.engine.max_rows = max_rows
    return host.engine


@pytest.fixture(autouse=True)
def plenty_of_rows(host):
    host.engine.max_rows = 64


def assert_same(one, two):
    assert [c.tokens for c in one] == [c.tokens for c in two]
    assert [c.finish for c in one] == [c.finish for c in two]
    for a, b in zip(one, two, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


@pytest.mark.parametrize("folder", ["tiny", "tiny_untied"])
def test_greedy_equals_transformers_generate(folder, request):
    source = request.getfixturevalue(folder)
    engine = build_host(config_of("grpo", source)).engine
    model = stock_model(source, torch.float32)
    greedy = Sampling(temperature=0.0, max_new_tokens=12)
    ours = engine.generate([Request(prompt, [0]) for prompt in PROMPTS], greedy)
    seen = set()
    for prompt, (done,) in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=END,
            pad_token_id=16,
        )
        assert done.tokens == theirs[0, len(prompt) :].tolist()
        exact = stock_row(model, prompt, done.tokens)[0]
        assert done.logprobs == pytest.approx(
            exact.tolist(), abs=1e-4
        )  # greedy log-probs are at temperature 1
        seen.update(done.tokens)
    assert len(seen) > 4, "the model must say different things"


def test_rows_that_do_not_fit_into_device_memory_wait(host, monkeypatch):
    """The tiny model keeps 2 x 2 layers x 2 key heads x 8 numbers of 4 bytes per token."""
    config = host.engine.model.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (2, 2, 8)
    loops = []

    class NotedStore(SlotStore):
        def __init__(self, engine, capacity, longest):
            loops.append((capacity, longest))
            super().__init__(engine, capacity, longest)

    monkeypatch.setattr(engine_module, "SlotStore", NotedStore)
    expected = host.engine.generate(requests(), SAMPLING)
    capacity, longest = loops.pop()
    monkeypatch.setattr(engine_module, "has_own_memory", lambda device: True)
    free = 2 * 3 * longest * 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr(engine_module, "free_memory_bytes", lambda device: free)
    for one, two in zip(expected, host.engine.generate(requests(), SAMPLING), strict=True):
        assert_same(one, two)
    assert capacity == 18 and loops == [(3, longest)]


def test_in_bfloat16_engine_and_trainer_stay_close(tiny):
    """Different shapes of the same sum round differently; a run is stopped at a mean gap of 0.2."""
    host = build_host(config_of("grpo", tiny, "rollout.temperature=1.3", "model.dtype=bfloat16"))
    out = host.engine.generate(requests(4), SAMPLING)
    batch = Batch.of(
        [
            Trajectory(str(i), PROMPTS[i], c.tokens, behavior_logprobs=c.logprobs)
            for i, group in enumerate(out)
            for c in group
        ]
    )
    gap = (batch.tokens["behavior_logprobs"] - host.policy.logprobs(batch)["logprobs"]).abs()
    assert gap.mean() < 0.03 and gap.max() < 0.3, (gap.mean(), gap.max())


def test_every_stop_token_of_the_generation_settings_counts(host):
    engine = host.engine
    before = engine.stop_ids
    engine.stop_ids = torch.tensor([3, END])
    try:
        done = [c for group in engine.generate(requests(12), SAMPLING) for c in group]
    finally:
        engine.stop_ids = before
    assert any(c.tokens[-1] == 3 for c in done)
    assert all(3 not in c.tokens[:-1] and END not in c.tokens[:-1] for c in done)
    assert any(c.tokens[-1] == END for c in done)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_tokens_follow_the_exact_distribution(host, tiny, temperature):
    """Chi-square over 18 tokens: 99.99% of correct samplers stay below 48; seeds are fixed."""
    n, prompt = 4000, PROMPTS[1]
    out = host.engine.generate(
        [Request(prompt, [trajectory_seed(5, 1, "x", i) for i in range(n)])],
        Sampling(temperature, max_new_tokens=1),
    )
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in out[0]]), minlength=18).double()
    exact = exact_distribution(tiny, prompt, temperature)
    assert chi_square(counts, exact * n) < 48
    other = exact_distribution(tiny, prompt, temperature * 1.3)
    assert chi_square(counts, other * n) > 60, "the test must tell temperatures apart"
    logprobs = torch.tensor([c.logprobs[0] for c in out[0]]).double()
    torch.testing.assert_close(
        logprobs, exact.log()[[c.tokens[0] for c in out[0]]], rtol=0, atol=1e-4
    )


def exact_distribution(folder, prompt, temperature) -> torch.Tensor:
    with torch.no_grad():
        return (
            stock_model(folder)(input_ids=torch.tensor([prompt])).logits[0, -1] / temperature
        ).softmax(-1)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Rare cells are put together, so that the statistic is chi-square distributed."""
    rare = expected < 5
    parts = (counts[~rare] - expected[~rare]).square() / expected[~rare]
    rest = (counts[rare].sum() - expected[rare].sum()).square() / expected[rare].sum().clamp(
        min=1.0
    )
    return float(parts.sum() + rest)


@pytest.mark.slow
def test_the_nth_token_gets_the_nth_number_of_its_seed_across_blocks(host, monkeypatch):
    """Uniform numbers come in blocks; a row that crosses blocks must not repeat one."""
    import postgrad.rollout.native.store_slots as native

    monkeypatch.setattr(native, "DRAW", 32)
    seen: list[list[float]] = []
    real = native.sample_mixed_tokens
    monkeypatch.setattr(
        native,
        "sample_mixed_tokens",
        lambda logits, uniforms, sampling: (
            seen.append(uniforms.tolist()) or real(logits, uniforms, sampling)
        ),
    )
    monkeypatch.setattr(
        host.engine, "stop_ids", torch.tensor([99])
    )  # never: every row runs to the limit
    long = Sampling(3.0, max_new_tokens=100)
    host.engine.generate([Request(PROMPTS[0], [7])], long)
    expected = SeededRandom().draw(7, 0, 100).tolist()
    assert [u for (u,) in seen] == expected and len(set(expected)) == 100
    whole = with_rows(host, 64).generate(requests(2), long)
    for one, two in zip(whole, with_rows(host, 5).generate(requests(2), long), strict=True):
        assert_same(one, two)


def test_seeds_name_a_trajectory():
    assert (
        trajectory_seed(0, 1, "a", 0) == 6762731545921899819
    )  # a run's randomness must never change with a version
    seeds = {
        trajectory_seed(run, step, uid, i)
        for run in (0, 1)
        for step in (1, 11)
        for uid in ("a", "1a")
        for i in (0, 1)
    }
    assert len(seeds) == 16


@pytest.mark.slow
@pytest.mark.parametrize("max_rows", [3, 64])
def test_one_prefill_a_prompt_and_no_row_decoded_after_its_end(host, max_rows):
    shapes: list[tuple[int, int]] = []
    hook = host.engine.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        out = with_rows(host, max_rows).generate(requests(5), SAMPLING)
    finally:
        hook.remove()
    prefills, decodes = [s for s in shapes if s[1] > 1], [s for s in shapes if s[1] == 1]
    assert sum(rows for rows, _ in prefills) == len(PROMPTS)
    sampled = sum(len(c.tokens) for group in out for c in group)
    decoded = sum(rows for rows, _ in decodes)
    assert sampled <= decoded < 1.5 * sampled  # the row count is rounded up to a bucket
    assert max(rows for rows, _ in decodes) == min(max_rows, 5 * len(PROMPTS))


def test_buckets_are_few_and_never_more_than_half_too_large():
    sizes = [bucket(count) for count in range(1, 1025)]
    assert sizes[:8] == [1, 2, 3, 4, 6, 6, 8, 8] and len(set(sizes)) == 20
    assert all(count <= size < 1.5 * count + 1 for count, size in enumerate(sizes, start=1))


def test_the_engine_samples_from_the_weights_as_they_are_now(tiny):
    host = build_host(config_of("grpo", tiny, "optimizer.lr=3e-2"))
    before = host.engine.generate(requests(), SAMPLING)
    assert host.engine.shares_weights
    host.policy.update(random_batch(1), 1)
    after = host.engine.generate(requests(), SAMPLING)
    assert before != after
    batch = Batch.of([Trajectory("a", PROMPTS[0], after[0][0].tokens)])
    host.policy.config.rollout.temperature = 1.3
    assert after[0][0].logprobs == pytest.approx(
        host.policy.logprobs(batch)["logprobs"].tolist(), abs=1e-4
    )


@pytest.mark.slow
def test_publish_copies_weights_into_the_engine(tiny):
    trainer, apart = (build_host(config_of("grpo", tiny, "optimizer.lr=3e-2")) for _ in range(2))
    trainer.policy.update(random_batch(1), 1)
    assert trainer.engine.generate(requests(), SAMPLING) != apart.engine.generate(
        requests(), SAMPLING
    )
    apart.engine.publish(trainer.policy.weights())
    assert trainer.engine.generate(requests(), SAMPLING) == apart.engine.generate(
        requests(), SAMPLING
    )


def test_activation_checkpointing_does_not_change_what_is_sampled(tiny, host):
    other = build_host(config_of("grpo", tiny, "model.activation_checkpointing=true"))
    for one, two in zip(
        host.engine.generate(requests(), SAMPLING),
        other.engine.generate(requests(), SAMPLING),
        strict=True,
    ):
        assert_same(one, two)


def test_generating_leaves_no_gradient_and_the_model_in_its_mode(host):
    host.engine.generate(requests(1), SAMPLING)
    assert (
        all(p.grad is None for p in host.engine.model.parameters()) and host.engine.model.training
    )
