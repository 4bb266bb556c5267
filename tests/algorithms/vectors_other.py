"""Checks of the other functions against hand-computed numbers."""

import math

import torch

from .helpers import F64, close, column, gradient, row_index, trues


def check_kl_values(a):
    new, ref = column(-1.2), column(-1.0)
    for name, value, grad in (
        ("k1", -0.2, 1),
        ("abs", 0.2, -1),
        ("k2", 0.02, -0.2),
        ("k3", 0.021403, -0.221403),
        ("k1+", -0.2, -0.2),
        ("k3+", 0.021403, -0.2),
        ("k2+", 0.02, -0.2),
        ("abs+", 0.2, -0.2),
    ):
        close(a.kl.kl_penalty(new, ref, name), [value])
        close(gradient(lambda x, name=name: a.kl.kl_penalty(x, ref, name).sum(), new), [grad])
    close(a.kl.kl_penalty(column(-30), column(0), "k3"), [10])


def check_kl_expectations(a):
    p, q = column(0.7, 0.2, 0.1), column(0.5, 0.3, 0.2)
    for name, expected in (("k1", 0.085123), ("k3", 0.085123), ("k2", 0.080088)):
        close((p * a.kl.kl_penalty(p.log(), q.log(), name)).sum(), expected)


def check_kl_gradients_in_expectation(a):
    """On-policy mean gradients: k2 and every + form KL(p||q), k3 KL(q||p), k1 0."""
    logits, q = column(0.3, -0.2, 0.7), column(0.5, 0.3, 0.2)
    p = torch.softmax(logits, 0)

    def expected_gradient(name):
        return gradient(
            lambda x: (p * a.kl.kl_penalty(torch.log_softmax(x, 0), q.log(), name)).sum(), logits
        )

    forward = gradient(
        lambda x: (torch.softmax(x, 0) * (torch.log_softmax(x, 0) - q.log())).sum(), logits
    )
    reverse = gradient(lambda x: (q * (q.log() - torch.log_softmax(x, 0))).sum(), logits)
    for name in ("k2", "k1+", "k2+", "k3+", "abs+"):
        close(expected_gradient(name), forward, digits=12)
    close(expected_gradient("k3"), reverse, digits=12)
    close(expected_gradient("k1"), [0, 0, 0], digits=12)


def check_adaptive_kl(a):
    coef = 0.001
    for kl, expected in ((0.3, 0.00102048), (0.05, 0.00099958), (0.11, 0.00100982)):
        coef = a.kl.adapt_kl_coef(coef, kl, 1024, target=0.1, horizon=10000)
        close(coef, expected, digits=8)


def check_mean_kl(a):
    """Rows of means 2 and 5; the masked row does not count."""
    mask = torch.tensor([1, 1, 0, 1, 0]).bool()
    close(a.kl.mean_kl(column(1, 3, 99, 5, 7), mask, row_index(3, 1, 1), 3), 3.5)


def check_kl_in_reward(a):
    rewards, kl = a.kl.kl_in_reward(
        column(0, 0, 1),
        column(-1.2, -1, -2),
        column(-1, -3, -3),
        torch.tensor([1, 0, 1]).bool(),
        0.5,
    )
    close(kl, [-0.2, 0, 1])
    close(rewards, [0.1, 0, 0.5])


def check_value_loss(a):
    out = a.value.value_loss(column(1, 0), column(0.2, 0.1), column(0.9, 0.5), clip=0.5)
    close(out.values.mean(), 0.0725)
    close(out.metrics["clip_fraction"].mean(), 0.5)
    close(
        a.value.value_loss(column(1, 0), column(0.2, 0.1), column(0.9, 0.5), clip=None).values,
        [0.005, 0.125],
    )


def check_explained_variance(a):
    """G = [1, 2, 3], v = [0, 1, 3]: var(G - v) = 1/3, var(G) = 1."""
    returns, mask = column(1, 2, 3, 50), torch.tensor([1, 1, 1, 0]).bool()
    close(a.value.explained_variance(column(0, 1, 3, 0), returns, mask), 1 - (1 / 3) / 1.00001)


def check_entropy(a):
    logits = column(0.7, 0.2, 0.1).log().expand(3, 3) + column(0, 5, -300).unsqueeze(1)
    close(a.entropy.entropy(logits), [0.801819] * 3)
    close(a.entropy.sum_probs_squared(logits), [0.54] * 3)
    close(1 - 2 * 0.7 + a.entropy.sum_probs_squared(logits[0]), 0.14)
    close(
        a.entropy.selective_log_softmax(logits, torch.tensor([0, 1, 2])),
        column(0.7, 0.2, 0.1).log(),
    )
    # Temperature 2 flattens: p proportional to sqrt(p).
    root = column(0.7, 0.2, 0.1).sqrt()
    close(
        a.entropy.selective_log_softmax(logits, torch.tensor([0, 1, 2]), temperature=2.0),
        (root / root.sum()).log(),
    )
    close(a.entropy.entropy(column(0, -math.inf, 0)), math.log(2))


RHO = column(1.5, 3, 0.9, 0.4, 1)
ROWS, MASK = row_index(3, 2), trues(5)
ROLLOUT = column(-1, -2, -0.5, -3, -0.1)


def weights(a, **settings):
    return a.correction.importance_weights(ROLLOUT + RHO.log(), ROLLOUT, MASK, ROWS, 2, **settings)


def check_truncated_weights(a):
    token = weights(a)
    close(token.values, [1.5, 2, 0.9, 0.4, 1])
    close(token.metrics["mean"], 1.16)
    close(token.metrics["effective_sample_size"], 0.8185, digits=4)
    close(token.metrics["fraction_high"], 0.2)
    close(token.metrics["fraction_low"], 0.2)
    sequence = weights(a, level="sequence")
    close(sequence.values, [2, 2, 2, 0.4, 0.4])
    close(sequence.metrics["mean"], 1.36)
    close(sequence.metrics["effective_sample_size"], 0.7506, digits=4)
    close(weights(a, level="geometric").values, [4.05 ** (1 / 3)] * 3 + [0.4**0.5] * 2)


def check_icepop(a):
    token = weights(a, threshold="0.5_2")
    close(token.values, [1.5, 0, 0.9, 0, 1])
    close(token.metrics["effective_sample_size"], 0.5695, digits=4)
    close(weights(a, level="sequence", threshold="0.5_5").values, [4.05, 4.05, 4.05, 0, 0])


def check_geometric_row_weights(a):
    weights = column(4, 1, 2, 8, 0, 3)
    rows = row_index(2, 2, 2)
    geometric = a.correction.geometric_row_weights(weights, trues(6), rows, 3)
    close(geometric, [2, 2, 4, 4, 0, 0])
    mask = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    close(a.correction.geometric_row_weights(weights, mask, rows, 3), [4, 4, 4, 4, 3, 3])


def check_classmate_weights(a):
    old, rollout = column(-1, -2, -0.5), column(-1.5, -2, -3)
    arguments = (old, rollout, trues(3), row_index(3), 1)
    close(
        a.correction.importance_weights(*arguments, threshold=100.0).values,
        [1.648721, 1, 12.182494],
    )
    close(a.correction.importance_weights(*arguments).values, [1.648721, 1, 2])
    close(a.correction.importance_weights(*arguments, threshold=1.2).values, [1.2, 1, 1.2])
    close(a.correction.importance_weights(*arguments, threshold="0.8_1.2").values, [0, 1, 0])


def check_rejection(a):
    def kept(**rules):
        return (
            a.correction.reject(ROLLOUT + RHO.log(), ROLLOUT, MASK, ROWS, 2, rules)
            .keep.int()
            .tolist()
        )

    for rules in ({"token_k1": 2.0}, {"token_k2": 0.3}, {"token_k3": 0.2}):
        assert kept(**rules) == [1, 0, 1, 0, 1]
    assert kept(seq_sum_k1="0.5_2") == [0] * 5
    assert kept(seq_mean_k1="0.5_2") == [1] * 5
    assert kept(seq_mean_k1="0.999_1.001") == [0] * 5
    assert kept(seq_mean_k3=0.3) == [0, 0, 0, 1, 1]
    assert kept(seq_max_k2=0.5) == [0, 0, 0, 1, 1]
    assert kept(seq_max_k3=0.5) == [0, 0, 0, 1, 1]
    assert kept(seq_sum_k2=0.5) == [0, 0, 0, 1, 1]  # sums .692 and .420
    assert kept(seq_mean_k2=0.22) == [0, 0, 0, 1, 1]  # means .231 and .210
    assert kept(seq_sum_k3=0.5) == [0, 0, 0, 1, 1]  # sums 1.001 and .316
    assert kept(token_k1=2.0, seq_mean_k3=0.3) == [0, 0, 0, 0, 1]


def check_rejection_is_about_rho(a):
    """verl keeps [1, 0] here: it applies the bounds to 1 / rho."""
    rho = column(1.5, 0.667)
    out = a.correction.reject(
        rho.log(), column(0, 0), trues(2), row_index(1, 1), 2, {"token_k1": "0.5_1.2"}
    )
    assert out.keep.int().tolist() == [0, 1]
    close(out.metrics["token_k1_rejected_fraction"], 0.5)


def check_mismatch_metrics(a):
    out = a.correction.mismatch_metrics(ROLLOUT + RHO.log(), ROLLOUT, MASK, ROWS, 2)
    close(out["chi2_token"], 1.644)
    close(out["chi2_seq"], 7.28125)
    close(out["kl"], -0.096485)
    close(out["k3_kl"], 0.263515)
    # Rows: mean rollout log-probs -7/6 and -1.55, mean log rho log(4.05)/3 and log(.4)/2.
    shift = column(math.log(4.05) / 3, math.log(0.4) / 2)
    rollout = column(3.5 / 3, 1.55)
    close(out["rollout_ppl"], rollout.exp().mean())
    close(out["training_ppl"], (rollout - shift).exp().mean())
    close(out["log_ppl_diff"], -shift.mean())
    close(out["log_ppl_abs_diff"], shift.abs().mean())
    close(out["log_ppl_diff_max"], -shift[1])
    close(out["log_ppl_diff_min"], -shift[0])
    close(out["ppl_ratio"], (-shift).exp().mean())
    p = ROLLOUT.exp()
    gap = ((RHO - 1) * p).abs()
    close(out["probs_diff_mean"], gap.mean())
    close(out["probs_diff_max"], gap.max())
    close(out["probs_diff_std"], (gap.square().mean() - gap.mean() ** 2).sqrt())


def check_overlong(a):
    close(
        a.shaping.overlong_penalty(torch.tensor([3, 16, 17, 18, 20, 25]), max_length=20, buffer=4),
        [0, 0, -0.25, -0.5, -1, -1],
    )
    close(a.shaping.overlong_penalty(column(18), max_length=20, buffer=4, factor=3.0), [-1.5])


def check_pass_at_k(a):
    close(a.passk.pass_at_k(4, 1, 2), 0.5)
    close(a.passk.pass_at_k(4, 1, 4), 1.0)
    close(a.passk.pass_at_k(10, 3, 5), 1 - 21 / 252)


def check_masked(a):
    """cs336: value 2, lengths 4 and 7 of 7: means 2 and 2, sums over 7 are 1.1429 and 2."""
    values, mask = torch.full((2, 7), 2.0, dtype=F64), torch.ones(2, 7).bool()
    mask[0, 4:] = False
    close(a.masked.masked_mean(values, mask, 1), [2, 2])
    close(a.masked.masked_normalize(values, mask, 1, 7.0), [8 / 7, 2])
    close(a.masked.masked_normalize(values, mask), 22)
    close(a.masked.masked_mean(column(1, 2, math.nan), torch.tensor([1, 1, 0]).bool()), 1.5)
    assert a.masked.masked_mean(values, mask & False, 0).isnan().all()


def check_dpo(a):
    """h = (−1 − −2) − (−1.5 − −1.8) = .7; log σ(.35) = −.533382."""
    chosen, rejected, ref_chosen, ref_rejected = column(-1), column(-2), column(-1.5), column(-1.8)
    out = a.preference.dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.5)
    close(out.values, [math.log(1 + math.exp(-0.35))])
    close(out.metrics["reward_chosen"], [0.25])
    close(out.metrics["reward_rejected"], [-0.1])
    close(out.metrics["margin"], [0.35])
    close(out.metrics["accuracy"], [1])
    close(
        a.preference.dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.5, loss="ipo").values,
        [(0.7 - 1) ** 2],
    )
    close(
        a.preference.dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.5, loss="hinge").values,
        [0.65],
    )
    close(a.preference.dpo(chosen, rejected, beta=0.5).values, [math.log(1 + math.exp(-0.5))])
    close(a.preference.dpo(chosen, chosen, ref_chosen, ref_chosen, beta=0.5).values, [math.log(2)])
    # The gradient pulls with weight beta · σ(−beta·h).
    grad = gradient(
        lambda x: a.preference.dpo(x, rejected, ref_chosen, ref_rejected, beta=0.5).values.sum(),
        chosen,
    )
    close(grad, [-0.5 / (1 + math.exp(0.35))])


def check_preference_variants(a):
    """SimPO: .5 · 1 - .2 = .3. ORPO: odds 1 and 1/3, so σ(log 3) = 3/4."""
    chosen, rejected = column(-1), column(-2)
    simpo = a.preference.dpo(chosen, rejected, beta=0.5, target_margin=0.2)
    close(simpo.values, [math.log(1 + math.exp(-0.3))])
    close(simpo.metrics["margin"], [0.5])
    half, quarter = column(math.log(0.5)), column(math.log(0.25))
    close(a.preference.log_odds(quarter), [math.log(1 / 3)])
    orpo = a.preference.dpo(half, quarter, beta=0.5, loss="odds_ratio")
    close(orpo.values, [-0.5 * math.log(0.75)])
    close(orpo.metrics["margin"], [0.5 * math.log(2)])


def check_kto(a):
    """g = 1 and −.5; with kl .2 and beta .5 they are .4 above and .35 below."""
    logprobs, reference = column(-1, -2), column(-2, -1.5)
    desirable = torch.tensor([True, False])
    out = a.preference.kto(
        logprobs,
        reference,
        desirable,
        0.2,
        beta=0.5,
        desirable_weight=2.0,
        undesirable_weight=3.0,
    )
    close(out.values, [2 / (1 + math.exp(0.4)), 3 / (1 + math.exp(0.35))])
    close(out.metrics["accuracy"], [1, 1])
    wrong = a.preference.kto(logprobs, reference, ~desirable, 0.2, beta=0.5)
    close(wrong.values, [1 / (1 + math.exp(-0.4)), 1 / (1 + math.exp(-0.35))])
    close(wrong.metrics["accuracy"], [0, 0])
    # d/dg of 1 − σ(x) is −beta · σ(x) · σ(−x): a desirable response is pushed up.
    grad = gradient(
        lambda x: a.preference.kto(x, reference, desirable, 0.2, beta=0.5).values[0], logprobs
    )
    close(grad, [-0.5 / (1 + math.exp(0.4)) / (1 + math.exp(-0.4)), 0])
    close(a.preference.mismatched_kl(column(-1, -2), column(-2, -2.5)), 0.75)
    close(a.preference.mismatched_kl(column(-2, -2.5), column(-1, -2)), 0.0)


def check_bradley_terry(a):
    """Scores 1 and .4 with margin .2: log(1 + exp(−.4)) + .1 · 1.4^2."""
    out = a.preference.bradley_terry(column(1), column(0.4), column(0.2), centering=0.1)
    close(out.values, [math.log(1 + math.exp(-0.4)) + 0.196])
    close(out.metrics["margin"], [0.6])
    close(out.metrics["accuracy"], [1])
    tie = a.preference.bradley_terry(column(1), column(1), column(0))
    close(tie.values, [math.log(2)])
    close(tie.metrics["accuracy"], [0])


def check_distillation(a):
    """p = (1/2, 1/4, 1/4) and q = (1/4, 1/4, 1/2) over two top tokens and the rest.

    Both KLs are log(2)/4; the mixture is (3/8, 1/4, 3/8).
    """
    student, teacher = column(0.5, 0.25).log()[None], column(0.25, 0.25).log()[None]
    p, q = a.distillation.with_rest(student), a.distillation.with_rest(teacher)
    close(p.exp(), [[0.5, 0.25, 0.25]])
    close(q.exp(), [[0.25, 0.25, 0.5]])
    close(a.distillation.divergence(p, q, "reverse"), [math.log(2) / 4])
    # Other numbers tell forward from reverse: q = (1/4, 5/8, 1/8).
    other = a.distillation.with_rest(column(0.25, 0.625).log()[None])
    forward = 0.25 * math.log(0.5) + 0.625 * math.log(2.5) + 0.125 * math.log(0.5)
    reverse = 0.5 * math.log(2) + 0.25 * math.log(0.4) + 0.25 * math.log(2)
    close(a.distillation.divergence(p, other, "forward"), [forward])
    close(a.distillation.divergence(p, other, "reverse"), [reverse])
    # jsd with b = .25: m = .75 p + .25 q = (7/16, 11/32, 7/32).
    m = (7 / 16, 11 / 32, 7 / 32)
    kl_q = sum(x * math.log(x / y) for x, y in zip((0.25, 0.625, 0.125), m, strict=True))
    kl_p = sum(x * math.log(x / y) for x, y in zip((0.5, 0.25, 0.25), m, strict=True))
    close(a.distillation.divergence(p, other, "jsd", 0.25), [0.25 * kl_q + 0.75 * kl_p])
    close(
        a.distillation.teacher_advantages(
            column(-1, -2), column(-1.5, -0.5), torch.tensor([True, False])
        ),
        [-0.5, 0],
    )


def check_sft_loss(a):
    """p = 1/2 and 1/8: log 2 and 3 log 2; dft: log(2)/2 and 3 log(2)/8, with the gradient of -p."""
    logprobs = column(0.5, 0.125).log()
    close(a.supervised.sft_loss(logprobs), [math.log(2), 3 * math.log(2)])
    close(a.supervised.sft_loss(logprobs, "dft"), [math.log(2) / 2, 3 * math.log(2) / 8])
    close(gradient(lambda x: a.supervised.sft_loss(x, "dft").sum(), logprobs), [-0.5, -0.125])


def check_row_logprobs(a):
    mask = torch.tensor([1, 1, 0, 1, 1]).bool()
    close(a.preference.row_logprobs(ROLLOUT, mask, ROWS, 2), [-3, -3.1])
    close(a.preference.row_logprobs(ROLLOUT, mask, ROWS, 2, average=True), [-1.5, -1.55])


def check_prefix_ratios(a):
    """LUFFY T9 with steps 1000 and peak .8; random and fixed by hand."""
    ratio = a.prefixes.prefix_ratio
    close(
        [ratio("linear", 0.5, step=step) for step in (1, 251, 501, 1001, 5000)],
        [0.8, 0.6, 0.4, 0, 0],
    )
    for name, bounds in (
        ("linear_max", {1: 0.8, 101: 0.8, 102: 0.72, 1001: 0.08, 1002: 0.08, 9999: 0.08}),
        ("reverse_linear", {1: 0.08, 101: 0.08, 102: 0.16, 1001: 0.8, 1002: 0.8}),
    ):
        close([ratio(name, 1.0, step=step) for step in bounds], list(bounds.values()))
        close(
            [ratio(name, 0.25, step=step) for step in bounds],
            [bound / 4 for bound in bounds.values()],
        )
    close([ratio("random", u, low=0.2, high=0.6) for u in (0, 0.5, 1)], [0.2, 0.4, 0.6])
    close(
        [ratio("fixed", 0.9, copy=i, num_copies=4, low=0.1, high=1.0) for i in range(4)],
        [0.1, 0.4, 0.7, 1.0],
    )
    close(ratio("fixed", 0.9, low=0.3, high=1.0), 0.3)


def check_bucket_weights(a):
    """LUFFY T12: n = 8, all of k = 1..7 there."""
    weights = [a.replay.bucket_weight("normal", k, 8) for k in range(1, 8)]
    close(
        [w / sum(weights) for w in weights],
        [0.0044, 0.0540, 0.2420, 0.3991, 0.2420, 0.0540, 0.0044],
        digits=4,
    )
    for kind, expected in (
        ("linear", [0.125, 0.25, 0.5, 0.875]),
        ("sqrt", [0.353553, 0.5, 0.707107, 0.935414]),
        ("linear_clip", [0.125, 0.25, 0.5, 0.5]),
    ):
        close([a.replay.bucket_weight(kind, k, 8) for k in (1, 2, 4, 7)], expected)


def check_bucket_draws(a):
    """Weights 1 : 3 whatever the sizes; an empty bucket leaves its share to others.

    No name twice.
    """
    numbers = iter([0.24, 0.5, 0.26, 0.0, 0.9, 0.99])
    assert a.replay.draw_from_buckets(
        {2: list("xyz"), 1: list("ab")}, {1: 1.0, 2: 3.0}, 3, lambda: next(numbers)
    ) == [
        "b",
        "x",
        "z",
    ]
    # 0.5 selects the second of three buckets, which is then empty. 0.4 selects the first of the two
    # left, the other numbers the last.
    numbers = iter([0.5, 0.0, 0.4, 0.0, 0.1, 0.9, 0.5, 0.0])
    buckets = {1: ["a"], 2: ["b"], 3: ["c", "d"]}
    assert a.replay.draw_from_buckets(
        buckets, dict.fromkeys(buckets, 1.0), 9, lambda: next(numbers)
    ) == ["b", "a", "d", "c"]


def check_pool(a):
    """Entropy and perplexity may disagree; age counts from the first success; no response twice."""
    pool = a.replay_pool.ReplayPool()

    def success(entropy, *p):
        return a.replay_pool.Experience(
            torch.arange(len(p), dtype=torch.int32) + int(10 * entropy),
            column(*p).log(),
            torch.ones(len(p), dtype=torch.bool),
            entropy,
        )

    sure, likely = success(0.1, 0.5, 0.5), success(0.4, 0.8, 0.8)
    close(sure.perplexity, 2)
    for uid, number in zip("pqrst", (1, 1, 2, 3, 4), strict=True):
        pool.add(uid, number, sure)
        pool.add(uid, number, likely)
        pool.add(uid, number, sure)
    assert len(pool) == 5 and pool.num_experiences == 10
    assert (
        pool.pick("p", "entropy", False, lambda: 0.0) is sure
        and pool.pick("p", "entropy", True, lambda: 0.0) is likely
    )
    assert (
        pool.pick("p", "perplexity", False, lambda: 0.0) is likely
        and pool.pick("p", "perplexity", True, lambda: 0.0) is sure
    )
    assert [pool.pick("p", "random", False, lambda u=u: u) for u in (0.49, 0.51)] == [sure, likely]
    for part, uids in (("all", "pqrst"), ("first_half", "pq"), ("last_half", "rst")):
        assert sorted(pool.choose(9, 8, "none", part, lambda: 0.3)) == list(uids)
    pool.set_successes("q", 4)
    pool.set_successes("p", 0)
    pool.set_successes("unknown", 3)
    assert [pool.entries[uid].successes for uid in "pqrst"] == [
        1,
        4,
        2,
        3,
        4,
    ] and "unknown" not in pool.entries
    # Buckets 1, 2, 3, 4 have normal weights .011, .135, .607, 1 (n = 8): .42 of their sum is in
    # bucket 3, .43 is past it.
    assert pool.choose(1, 8, "normal", "all", iter([0.43, 0.0]).__next__) == ["q"]
    assert pool.choose(1, 8, "normal", "all", iter([0.42, 0.0]).__next__) == ["s"]
    pool.drop("q")
    assert list(pool.entries) == list("prst")


def check_reshaped_loss(a):
    """v = 1.028571, .882353 for r = 1.2, .6.

    For A < 0 the lower bound clips, for A > 0 the upper.
    """
    new, old = column(0.6, 0.24).log(), column(0.5, 0.4).log()
    close(a.shaping.reshaped_loss(new, old, column(-1, -1), "p_div_p"), [1.028571, 0.882353])
    close(
        a.shaping.reshaped_loss(new, old, column(-1, -1), "p_div_p", clip_low=0.1, clip_high=0.02),
        [1.028571, 0.9],
    )
    close(
        a.shaping.reshaped_loss(new, old, column(1, 1), "p_div_p", clip_low=0.1, clip_high=0.02),
        [-1.02, -0.882353],
    )


def check_thought(a):
    """Classmate-CoT 8.1 and 8.2: where the thought lies, how much of it is kept."""
    assert a.thought_spans.split_cot(
        [100, 5, 6, 7, 101, 8, 9, 0], 7, [100], [101]
    ) == a.thought_spans.Span(1, 4, 5)
    assert a.thought_spans.split_cot(
        [100, 5, 6, 7, 8, 0, 0, 0], 5, [100], [101]
    ) == a.thought_spans.Span(1, 5)
    assert a.thought_spans.split_cot([5, 6, 101, 8, 0], 4, [100], [101]) == a.thought_spans.Span(
        0, 2, 3
    )
    assert a.thought_spans.split_cot([5, 6, 7, 0], 3, [100], [101]) == a.thought_spans.Span(0, 3)
    assert a.thought_spans.split_cot([5, 6, 101, 8, 0], 2, [100], [101]) == a.thought_spans.Span(
        0, 2
    ), "beyond the length nothing counts"
    kept = {
        "1": (0, 10),
        "0.55": (0, 5),
        "0.05": (0, 1),
        "first-3-tokens": (0, 3),
        "last-3-tokens": (7, 10),
        "first-100-tokens": (0, 10),
    }
    for spec, span in kept.items():
        assert a.thought_spans.keep(0, 10, spec) == span
    assert a.thought_spans.keep(4, 4, "0.5") == (4, 4), "nothing stays nothing"
    assert a.thought_spans.keep_words("Let x = 2.\n\nThen  2x = 4", 0.5) == "Let x = 2.\n\n"


def check_classmate_rewards(a):
    """Classmate-CoT 8.3: several classmates and samples into one number, and the gate."""
    scores, nan = torch.tensor([[[6.0, 8.0], [2.0, 4.0]]]), float("nan")
    assert a.classmate_rewards.combine(scores, []).tolist() == [5.0]
    for shares in ([0.75, 0.25], [3, 1]):
        assert a.classmate_rewards.combine(scores, shares).tolist() == [6.0]
    without = torch.tensor([[[6.0, nan]]])
    assert a.classmate_rewards.combine(without, []).tolist() == [3.0]
    assert a.classmate_rewards.combine(without, [], no_output_score=-11.0).tolist() == [-2.5]
    main, classmate = torch.tensor([7.0, 0.0]), torch.tensor([2.5, 2.5])
    gated = {
        c: a.classmate_rewards.gate(main, classmate, c).tolist()
        for c in a.classmate_rewards.CONDITIONS
    }
    assert gated == {
        "always": [2.5, 2.5],
        "no_classmate": [0.0, 0.0],
        "no_classmate_when_main_incorrect": [2.5, 0.0],
        "neg_classmate_when_main_incorrect": [2.5, -2.5],
    }
