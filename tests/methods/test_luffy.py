"""LUFFY: content of a group, losses of its rows (specification T3 to T9)."""

import math
from functools import cache

import pytest
import torch
from given_logprobs import Row, priced
from letter_tokenizer import letters_tokenizer
from luffy_settings import CLIP, MEAN
from method_runs import LIMIT, SMALL, bound, build_tokenizer
from spies import Spy
from tiny_runs import END, config_of
from tokenizers.decoders import Fuse

from postgrad.data.encode.encoder import Encoder
from postgrad.errors import RunError
from postgrad.methods.luffy import Luffy
from postgrad.methods.method import Ports, Step
from postgrad.types import DEMONSTRATION, POLICY, Problem

# T3: a demonstration, and a row of the policy's own whose last token is masked. L = 4.
A = Row(DEMONSTRATION, [0.5, 0.1, 0.01, 0.9], [0.4, 0.2, 0.02, 0.9], 0.75)


B = Row(POLICY, [0.6, 0.24, 0.5, 1.0], [0.5, 0.4, 0.5, 1.0], -0.25, mask=[1, 1, 1, 0])


T3 = {
    "as published": ((), -0.260795),
    "clip kept": (CLIP, -0.248295),
    "token mean": ((MEAN,), -0.149026),
    "gamma 0.3": (("method.off_options.gamma=0.3",), -0.135736),
    "gamma 0.5": (("method.off_options.gamma=0.5",), -0.074212),
    "bare": (("method.off_shape=none",), -0.108125),
    "log p": (("method.off_shape=logp",), 0.319492),
    "p and log p": (("method.off_shape=p_logp",), 0.036367),
    "square root": (("method.off_shape=square_root",), -0.213503),
    "power": (("method.off_shape=pow", "method.off_options.exponent=0.5"), -0.213503),
    "clamped": (
        ("method.off_options.min_value=0.2", "method.off_options.max_value=0.8"),
        -0.256250,
    ),
    "without sure tokens": (("method.max_probability=0.8",), -0.092045),
    "without sure tokens, token mean": (("method.max_probability=0.8", MEAN), -0.061364),
    "reshaped on-policy": (("method.on_shape=p_div_p",), -0.253863),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", T3)
def test_the_loss_of_the_specification(name, tiny):
    """The table sums over the two rows where ours is a mean; token means are the same."""
    overrides, expected = T3[name]
    loss = priced(tiny, "luffy", [A, B], *overrides).loss
    assert loss * (1 if MEAN in overrides else 2) == pytest.approx(expected, abs=1e-6)


def test_the_gradient_of_the_specification(tiny):
    a, b = [-0.026042, -0.046875, -0.015496, -0.016875], [0.075, 0.0375, 0.0625, 0]
    assert (priced(tiny, "luffy", [A, B]).gradient * 2).tolist() == pytest.approx(
        [*a, *b], abs=1e-6
    )
    assert (priced(tiny, "luffy", [A, B], *CLIP).gradient * 2)[4:].tolist() == pytest.approx(
        [0.075, 0, 0.0625, 0], abs=1e-6
    )


def test_a_clip_on_the_reshaped_ratio(tiny):
    """By hand: v = (.6/.7)/(.5/.6) = 1.028571, (.24/.34)/(.4/.5) = .882353, 1; A = -.25."""
    off = priced(tiny, "luffy", [A]).loss
    kept = (
        priced(
            tiny,
            "luffy",
            [A, B],
            "method.on_shape=p_div_p",
            "method.clip_low=0.1",
            "method.clip_high=0.1",
        ).loss
        * 2
        - off
    )
    assert kept == pytest.approx(0.25 * (1.028571 + 0.9 + 1) / 4, abs=1e-6)


def test_the_parts_are_logged_as_they_are_optimized_and_as_counts(tiny):
    metrics = priced(tiny, "luffy", [A, B], *CLIP).metrics
    assert metrics["off_policy/loss"] == pytest.approx(
        -0.435795 * 4 / 8, abs=1e-6
    )  # token mean x tokens / (L rows)
    assert metrics["on_policy/loss"] == pytest.approx(0.25 * 3 / 8, abs=1e-6)
    assert (metrics["off_policy/tokens"], metrics["on_policy/tokens"]) == (4, 3)
    assert metrics["off_policy/ratio"] == pytest.approx(0.581061, abs=1e-6)
    assert metrics["policy/clip_fraction"] == pytest.approx(1 / 3), "of the policy's own tokens"
    alone = priced(tiny, "luffy", [B]).metrics
    assert "off_policy/ratio" not in alone and alone["off_policy/loss"] == 0.0
    assert all(
        math.isfinite(value)
        for value in [
            *metrics.values(),
            *alone.values(),
            *priced(tiny, "luffy", [A]).metrics.values(),
        ]
    )


def test_recorded_probabilities_of_the_author_stand_in_the_ratio(tiny):
    """T3: each token had probability .5 with its author; the bare ratio, no shape."""
    recorded = Row(DEMONSTRATION, A.p, A.old, A.advantage, author=0.5 + 1e-6)
    loss = priced(tiny, "luffy", [recorded, B], "method.demonstration_probs=target_probs").loss
    assert loss * 2 == pytest.approx(-0.391249, abs=1e-6)


def test_without_tokens_of_others_it_is_ppo_and_their_old_logprobs_never_matter(tiny):
    """T4, exactly; T3 has the number of the clipped case."""
    own = [Row(POLICY, A.p, A.old, A.advantage), B]
    shape = (
        "method.normalize_by_std=false",
        "method.aggregation=seq-mean-token-sum-norm",
        "method.dual_clip=inf",
    )
    for overrides in (CLIP, ("method.clip_low=inf", "method.clip_high=inf")):
        mixed, plain = (
            priced(tiny, "luffy", own, *overrides),
            priced(tiny, "grpo", own, *shape, *overrides),
        )
        assert mixed.loss == plain.loss and torch.equal(mixed.gradient, plain.gradient)
    assert priced(tiny, "luffy", own, *CLIP).loss * 2 == pytest.approx(-0.4125, abs=1e-6)
    other = Row(DEMONSTRATION, A.p, [0.9, 0.9, 0.9, 0.1], A.advantage)
    one, two = (priced(tiny, "luffy", [row, B]) for row in (A, other))
    assert one.loss == two.loss and torch.equal(one.gradient, two.gradient)


def test_rl_with_sft_loss(tiny):
    """T5: 1.926566 is the token mean of the demonstration, .175 the policy row's sum by L."""
    sft = Row(DEMONSTRATION, A.p, A.old, 1.0)
    done = priced(tiny, "luffy_rl_sft", [sft, B], "method.sft_coef=1")
    assert done.metrics["off_policy/loss"] == pytest.approx(1.926566, abs=1e-6)
    assert done.metrics["on_policy/loss"] == pytest.approx(0.175, abs=1e-6)
    assert done.loss == pytest.approx(2.101566, abs=1e-6)
    short = Row(
        DEMONSTRATION, [0.5, 0.25], [1.0, 1.0], 1.0
    )  # the mean is over tokens of all demonstrations: (4 x 1.926566 + log 8) / 6
    assert priced(tiny, "luffy_rl_sft", [sft, B, short], "method.sft_coef=1").metrics[
        "off_policy/loss"
    ] == pytest.approx(1.630951, abs=1e-6)
    assert (
        priced(tiny, "luffy_rl_sft", [sft], "method.sft_coef=1").gradient + 1 / 4
    ).abs().max() < 1e-12, "no own rows: no NaN"
    assert priced(tiny, "luffy_rl_sft", [B], "method.sft_coef=1").loss == pytest.approx(
        0.175, abs=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["luffy", "luffy_rl_sft"])
def test_the_entropy_bonus_is_a_mean_over_all_tokens_whatever_the_loss_divides_by(recipe, tiny):
    plain, bonus = (
        priced(tiny, recipe, [A, B], f"method.entropy_coef={c}", entropy=2.0).loss
        for c in (0.0, 0.3)
    )
    assert plain - bonus == pytest.approx(0.3 * 2.0, abs=1e-6)


def test_a_row_that_somebody_began_is_priced_in_two_parts(tiny):
    """T6, L = 5."""
    sources = [DEMONSTRATION] * 3 + [POLICY] * 2
    row = Row(sources, [0.5, 0.1, 0.01, 0.6, 0.24], [1.0, 1.0, 1.0, 0.5, 0.4], 0.5)  # type: ignore[arg-type]
    done = priced(tiny, "luffy", [row])
    assert done.loss == pytest.approx(-0.322424, abs=1e-6)
    assert done.metrics["off_policy/loss"] == pytest.approx(-0.237374 * 3 / 5, abs=1e-6)
    assert done.metrics["on_policy/loss"] == pytest.approx(-0.45 * 2 / 5, abs=1e-6)


# ---- what a group holds


def problem(demonstration: str = "1" * 10, uid: str = "p", **extra) -> Problem:
    return Problem(
        uid,
        ({"role": "user", "content": "1+1="},),
        "20",
        "arithmetic/digits",
        (demonstration,),
        extra,
    )


@cache
def method_of(model, *overrides: str) -> Luffy:
    """The method with a tokenizer and nothing else: what composing needs."""
    config = config_of("luffy", model, *SMALL, "rollout.max_response_tokens=16", *overrides)
    method = Luffy(config)
    method.check()
    method.bind(Ports(None, None, None, Encoder(build_tokenizer(config), "plain"), {}))  # type: ignore[arg-type]
    return method


def composed(model, *overrides: str, problems: list[Problem] | None = None, number: int = 1):
    """The groups of one step; demonstrations have ten tokens and the end token by default."""
    step = Step(number)
    return method_of(model, *overrides).compose(problems or [problem()], step), step


def starts(model, *overrides: str, **options) -> list[int]:
    groups, _ = composed(model, *overrides, **options)
    return [len(start) for start in groups[0].prefixes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "share", "given"), [(11, 0.5, 5), (11, 0.99, 10), (11, 1.0, 11), (100, 0.29, 28)]
)
def test_the_cut_counts_the_end_and_rounds_down(size, share, given, tiny):
    """T7."""
    overrides = (
        f"method.prefix_min={share}",
        f"method.prefix_max={share}",
        "rollout.max_response_tokens=128",
    )
    (group,), _ = composed(tiny, *overrides, problems=[problem("1" * (size - 1))])
    if given == size:
        (row,) = group.given_rows
        assert (
            len(row.response) == size
            and row.response[-1] == END
            and not group.prefixes
            and group.num_samples == 3
        )
    else:
        assert (
            [len(start) for start in group.prefixes] == [given]
            and group.num_samples == 4
            and END not in group.prefixes[0]
        )


def test_demonstration_is_the_first_row_and_is_not_sampled(tiny):
    """T8: n - 1 rows are sampled; every token of the demonstration, also its end, is off-policy."""
    b = bound("luffy", tiny, "training.problems_per_step=2")
    b.method.ports.engine = spy = Spy(b.host.engine)
    batch = b.until("sample")
    (_, (requests, _)) = spy.calls[0]
    assert [(request.prompt, len(request.seeds)) for request in requests] == [
        (b.prompts.prompt(p), 3) for p in b.problems[:2]
    ]
    assert batch.rows["source"].tolist() == [DEMONSTRATION, POLICY, POLICY, POLICY] * 2
    rows = batch.response.split()
    sources = torch.split(batch.tokens["token_source"], batch.response.lengths.tolist())
    for first in (0, 4):
        assert rows[first].tolist() == b.prompts.encode_response(
            b.problems[first // 4].demonstrations[0]
        )
        assert rows[first][-1] == END and set(sources[first].tolist()) == {DEMONSTRATION}
        assert all(set(sources[first + i].tolist()) == {POLICY} for i in (1, 2, 3))


def test_a_continued_row_starts_with_the_demonstration_and_fits_the_limit(tiny):
    b = bound(
        "luffy",
        tiny,
        "method.prefix_min=0.5",
        "method.prefix_max=0.5",
        "method.num_demonstrations=2",
    )
    batch = b.until("sample")
    for number, (tokens, source) in enumerate(
        zip(
            batch.response.split(),
            torch.split(batch.tokens["token_source"], batch.response.lengths.tolist()),
            strict=True,
        )
    ):
        trace = b.prompts.encode_response(
            b.problems[number // 4].demonstrations[0]
        )  # two digits and the end
        given = int(len(trace) * 0.5) if number % 4 < 2 else 0
        assert tokens[:given].tolist() == trace[:given] and len(tokens) <= LIMIT
        assert source.tolist() == [DEMONSTRATION] * given + [POLICY] * (len(tokens) - given)


def test_a_trace_ends_at_its_first_end(tiny):
    """T8: what follows an end inside the text is not part of the response."""
    (group,), _ = composed(tiny, problems=[problem("12<end>34")])
    assert group.given_rows[0].response == [1, 2, END]


@pytest.mark.slow
def test_the_strategies_draw_as_they_should(tiny):
    """The method's settings reach the schedules; tests/algorithms checks their numbers (T9)."""
    apart = ("method.num_demonstrations=-1", "method.prefix_min=0.1", "method.prefix_max=0.9")
    first = starts(tiny, *apart)
    assert first == starts(tiny, *apart) and len(set(first)) > 1 and all(1 <= n <= 9 for n in first)
    assert first != starts(tiny, *apart, number=2) != starts(tiny, *apart, "seed=1", number=2)
    assert first != starts(tiny, *apart, problems=[problem(uid="q")])
    assert len(set(starts(tiny, *apart, "method.prefix_shared=true"))) == 1
    fixed = (
        "method.num_demonstrations=3",
        "method.prefix_strategy=fixed",
        "method.prefix_min=0.2",
        "method.prefix_max=0.8",
    )
    assert starts(tiny, *fixed) == [2, 5, 8]
    linear = ("method.prefix_strategy=linear", "method.prefix_steps=1000")
    assert [starts(tiny, *linear, number=n) for n in (1, 251, 501, 1001)] == [[8], [6], [4], []]
    for name, bounds in (
        ("linear_max", {1: 0.8, 1002: 0.08}),
        ("reverse_linear", {1: 0.08, 1002: 0.8}),
    ):
        overrides = (
            f"method.prefix_strategy={name}",
            "method.num_demonstrations=-1",
            "rollout.samples=40",
            "rollout.max_response_tokens=100",
        )
        for number, most in bounds.items():
            drawn = starts(tiny, *overrides, number=number, problems=[problem("1" * 99)])
            assert 0.8 * most < max(drawn) / 100 <= most and min(drawn) < 0.4 * 100 * most, (
                name,
                number,
                drawn,
            )


def test_no_demonstration_means_a_group_of_the_policy_s_own(tiny):
    bare = Problem("bare", ({"role": "user", "content": "1+1="},), "20", "arithmetic/digits")
    long = problem("1" * 40, uid="long")
    groups, step = composed(tiny, problems=[bare, problem(), long])
    assert [(len(g.given_rows), g.num_samples) for g in groups] == [(0, 4), (1, 3), (0, 4)]
    assert step.metrics["demonstration/dropped"] == 1
    shown = [
        len(composed(tiny, "method.demonstration_share=0.5", number=n)[0][0].given_rows)
        for n in range(1, 41)
    ]
    assert 8 < sum(shown) < 32


def test_probabilities_of_the_author_come_from_the_data(tiny):
    overrides = ("method.demonstration_probs=probs",)
    (group,), _ = composed(tiny, *overrides, problems=[problem("12", probs=[0.5, 0.25, 1.0])])
    assert group.given_rows[0].behavior_logprobs == pytest.approx(
        [math.log(0.5 + 1e-6), math.log(0.25 + 1e-6), math.log(1 + 1e-6)]
    )
    with pytest.raises(RunError, match=r"method\.demonstration_probs"):
        composed(tiny, *overrides, problems=[problem("12", probs=[0.5, 0.25])])


def test_the_prompt_s_opening_of_the_thought_is_not_doubled():
    """T13: one opening in the whole row, whether or not the demonstration brings its own."""
    tokenizer = letters_tokenizer()
    tokenizer.backend_tokenizer.decoder = Fuse()  # type: ignore[assignment]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<think>\n{% endif %}"
    )
    for text in ("<think>\nso</think>2", "so</think>2"):
        row = Problem("p", ({"role": "user", "content": "1+1="},), "2", "", (text,))
        prompts = Encoder(tokenizer, "chat")
        (ids,) = prompts.demonstrations(row)
        assert (
            prompts.decode(prompts.prompt(row)) + prompts.decode(ids) == "1+1=<think>\nso</think>2"
        )
        (ids,) = Encoder(tokenizer, "plain").demonstrations(row)
        assert prompts.decode(ids) == text, (
            "a prompt that opens nothing keeps the demonstration's opening"
        )
