"""Checks of losses and aggregation against hand-computed numbers.

Sources: verl T1, T5; classmate 8.7, 8.8; cs336 1-2; LUFFY T1, T3-T6.
"""

import torch

from .helpers import F64, close, column, gradient, row_index, same_group, trues

OLD = column(0.5, 0.2, 0.4, 0.5, 0.2).log()
NEW = OLD + column(1.1, 1.5, 0.7, 0.5, 4).log()
ADV = column(1, 1, 1, -1, -1)
ROWS, MASK = row_index(3, 2), trues(5)
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def aggregate(a, values, mode="token-mean", mask=MASK, rows=ROWS, num_rows=2, length=None):
    return (
        values * a.aggregation.token_weights(mode, mask, rows, num_rows, length, dtype=F64)
    ).sum()


def t5(a, name, mode="token-mean", extra=(), **settings):
    """The aggregated loss of T5 and its gradient by log-prob."""
    function = getattr(a.losses, name)

    def loss(logprobs):
        arguments = (logprobs, ADV) if name == "policy_gradient" else (logprobs, OLD, ADV, *extra)
        return aggregate(a, function(*arguments, **settings).values, mode)

    return loss(NEW), gradient(loss, NEW)


def check_ppo_clip(a):
    out = a.losses.ppo_clip(NEW, OLD, ADV)
    close(out.values, [-1.1, -1.2, -0.7, 0.8, 3.0])
    close(out.metrics["clip_fraction"].mean(), 0.4)
    close(out.metrics["dual_clip_fraction"].mean(), 0.2)
    close(out.metrics["policy_kl"].mean(), -0.167450)
    loss, grad = t5(a, "ppo_clip")
    close(loss, 0.16)
    close(grad, [-0.22, 0, -0.14, 0, 0])


def check_ppo_clip_cs336(a):
    """A = 1: .5 -> -.5, 1.5 -> -1.2; A = -1: .5 -> .8, 1.5 -> 1.5.

    Gradient -r A, or 0 if clipped.
    """
    new, advantages = column(0.5, 1.5, 0.5, 1.5).log(), column(1, 1, -1, -1)
    zeros = torch.zeros_like(new)
    close(a.losses.ppo_clip(new, zeros, advantages).values, [-0.5, -1.2, 0.8, 1.5])
    close(
        gradient(lambda x: a.losses.ppo_clip(x, zeros, advantages).values.sum(), new),
        [-0.5, 0, 0, 1.5],
    )


def check_ppo_open(a):
    out = a.losses.ppo_clip(NEW, OLD, ADV, clip_low=None, clip_high=None)
    close(out.values, [-1.1, -1.5, -0.7, 0.5, 4.0])
    close(
        a.losses.ppo_clip(NEW, OLD, ADV, clip_low=None, dual_clip=None).values,
        [-1.1, -1.2, -0.7, 0.5, 4.0],
    )
    close(
        a.losses.ppo_clip(NEW, OLD, ADV, clip_high=None, dual_clip=None).values,
        [-1.1, -1.5, -0.7, 0.8, 4.0],
    )
    # One open bound leaves the dual clip on.
    half_open = a.losses.ppo_clip(NEW, OLD, ADV, clip_low=None)
    close(half_open.values, [-1.1, -1.2, -0.7, 0.5, 3.0])


def check_aggregation(a):
    values = a.losses.ppo_clip(NEW, OLD, ADV).values
    expected = (0.16, 0.8, 0.4, 0.45, 0.133333)
    for mode, number in zip(MODES, expected, strict=True):
        close(aggregate(a, values, mode, length=3), number)


def check_aggregation_on_policy(a):
    """verl T1, group a with r = 1 and eps = 0: the modes weigh a long wrong answer differently."""
    advantages = a.advantages.grpo(column(1, 0, 0, 1), same_group(4), eps=0.0)
    rows = row_index(2, 4, 3, 1)
    expected = {
        "token-mean": 0.346410,
        "seq-mean-token-mean": 0,
        "seq-mean-token-sum": 0.866025,
        "seq-mean-token-sum-norm": 0.216506,
    }
    for mode, number in expected.items():
        close(aggregate(a, -advantages[rows], mode, trues(10), rows, 4, 4), number)


def check_aggregation_classmate(a):
    """8.8: seq-mean-token-sum-norm is 1.875.

    The original does not divide by the rows and gives 3.75.
    """
    values, rows = column(1, 2, 3, 4, 5), row_index(3, 2)
    expected = {
        "token-mean": 3,
        "seq-mean-token-sum": 7.5,
        "seq-mean-token-mean": 3.25,
        "seq-mean-token-sum-norm": 3.75 / 2,
    }
    for mode, number in expected.items():
        close(aggregate(a, values, mode, trues(5), rows, 2, 4), number)


def check_aggregation_leaves_out_masked_rows(a):
    """A fully masked row counts in no denominator, and masked tokens weigh nothing."""
    mask, rows = torch.tensor([1, 0, 1, 0, 0, 1, 1, 1]).bool(), row_index(3, 2, 3)
    weigh = a.aggregation.token_weights
    close(weigh("token-mean", mask, rows, 3), [0.2, 0, 0.2, 0, 0, 0.2, 0.2, 0.2])
    close(weigh("seq-mean-token-sum", mask, rows, 3), [0.5, 0, 0.5, 0, 0, 0.5, 0.5, 0.5])
    sixth = 1 / 6
    close(
        weigh("seq-mean-token-mean", mask, rows, 3, dtype=F64),
        [0.25, 0, 0.25, 0, 0, sixth, sixth, sixth],
    )
    close(
        weigh("seq-mean-token-sum-norm", mask, rows, 3, 10), [0.05, 0, 0.05, 0, 0, 0.05, 0.05, 0.05]
    )


def check_aggregation_by_prompt(a):
    """Rows of 2, 1 and 1 tokens; the first two are of one prompt, so each prompt weighs 1/2."""
    rows, groups = row_index(2, 1, 1), torch.tensor([9, 9, -4])
    weigh = a.aggregation.token_weights
    mode, sixth = "prompt-mean-token-mean", 1 / 6
    close(weigh(mode, trues(4), rows, 3, groups=groups), [sixth, sixth, sixth, 0.5])
    # Without the last row's token there is one prompt.
    mask = torch.tensor([1, 0, 1, 0]).bool()
    close(weigh(mode, mask, rows, 3, groups=groups), [0.5, 0, 0.5, 0])
    close(weigh(mode, trues(4), rows, 3), [sixth, sixth, 2 * sixth, 2 * sixth])


def check_gspo(a):
    extra = (MASK, ROWS, 2)
    loss, grad = t5(a, "gspo", extra=extra, clip_low=0.2, clip_high=0.2)
    close(loss, -0.063838)
    close(grad, [-0.209841] * 3 + [0.282843] * 2)
    close(
        t5(a, "gspo", "seq-mean-token-mean", extra=extra, clip_low=0.2, clip_high=0.2)[0], 0.182504
    )
    loss, grad = t5(a, "gspo", extra=extra)
    close(loss, -0.034555)
    close(grad[:3], [0, 0, 0])
    close(t5(a, "gspo", "seq-mean-token-mean", extra=extra)[0], 0.206907)


def check_cispo(a):
    loss, grad = t5(a, "cispo", clip_low=0.2, clip_high=0.2)
    close(loss, 0.348791)
    close(grad, [-0.22, -0.24, -0.16, 0.16, 0.24])


def check_policy_gradient(a):
    loss, grad = t5(a, "policy_gradient")
    close(loss, 0.293068)
    close(grad, [-0.2, -0.2, -0.2, 0.2, 0.2])


def check_sapo(a):
    loss, grad = t5(a, "sapo", "seq-mean-token-mean")
    close(loss, 0.218567)
    close(grad, [-0.182876, -0.235004, -0.114081, 0.116767, 0.157611])
    close(a.losses.sapo(column(0, 0), column(0, 0), column(1, -1)).values, [-2, 1.904762])


def check_geo_mean(a):
    """rho = [1.047296, 1.637462]; the row's loss stands on its tokens."""
    values = a.losses.geo_mean(NEW, OLD, ADV, MASK, ROWS, 2).values
    close(values, [-1.047296] * 3 + [1.637462] * 2)
    loss, grad = t5(a, "geo_mean", "seq-mean-token-mean", extra=(MASK, ROWS, 2))
    close(loss, 0.295083)
    # d/dlogp of mean_i(-A rho_i): -A rho_i / (2 L_i), 0 where d was clipped.
    close(grad, [-1.047296 / 6, 0, -1.047296 / 6, 0, 1.637462 / 4])


def check_kl_cov(a):
    selected = a.covariance.cov_selection(NEW, ADV, MASK, share=0.4)
    assert selected.tolist() == [True, False, False, True, False]
    close(t5(a, "kl_cov", extra=(selected,), coefficient=0.1)[0], 0.255769)


def check_token_covariance(a):
    """A - mean = [.8 x3, -1.2 x2]; mean log-prob of [e, 1, 1, 1, 1/e] is 0."""
    close(a.covariance.token_covariance(column(1, 0, 0, 0, -1), ADV, MASK), [0.8, 0, 0, 0, 1.2])


def check_clip_cov(a):
    selected = torch.tensor([1, 0, 0, 0, 1]).bool()
    out = a.losses.clip_cov(NEW, OLD, ADV, selected, clip_low=0.2, clip_high=0.2)
    close(out.values, [0, -1.2, -0.7, 0.8, 0])
    close(out.metrics["selected_fraction"].mean(), 0.4)
    # Candidates are the tokens with 1 < cov < 5: here the last one only.
    picked = a.covariance.cov_selection(
        column(1, 0, 0, 0, -1), ADV, MASK, share=1.0, band=(1.0, 5.0), uniforms=torch.zeros(5)
    )
    assert picked.tolist() == [False, False, False, False, True]
    flat = column(9, 9, 9, -9, -9, 9, -9)
    picked = a.covariance.cov_selection(
        flat,
        column(1, 1, 1, -1, -1, 1, -1) / 4,
        trues(7),
        share=0.3,
        band=(1.0, 5.0),
        uniforms=column(7, 6, 1, 4, 2, 3, 5),
    )
    assert picked.tolist() == [
        False,
        False,
        True,
        False,
        True,
        False,
        False,
    ]  # floor(.3 · 7) = 2, the smallest uniforms


def check_dppo(a):
    for name, bound in (("dppo_tv", 0.15), ("dppo_kl", 0.05)):
        loss, grad = t5(a, name, clip_low=bound, clip_high=bound, max_ratio=3.0)
        close(loss, 0.537045)
        close(grad, [-0.22, -0.30, -0.14, 0, 0.60])
        _, grad = t5(a, name, clip_low=0.3, clip_high=bound, max_ratio=3.0)
        close(grad, [-0.22, -0.30, -0.14, 0.10, 0.60])
        _, grad = t5(a, name, clip_low=0.001, clip_high=0.001, max_ratio=3.0)
        close(
            grad, [0, 0, -0.14, 0, 0.60]
        )  # moved too far with the advantage: dropped; moved back: kept


def check_dro(a):
    close(t5(a, "dro", beta=0.5)[0], 0.428216)


def check_classmate_gradient(a):
    """8.7: A = a·R + b·C with a = 0, b = 1 reaches the two tokens of the thought and no others."""
    old = column(-1, -1, -1, -1)
    rows, mask = row_index(4), trues(4)
    out = gradient(
        lambda x: aggregate(
            a,
            a.losses.ppo_clip(x, old, column(1, 1, 0, 0)).values,
            mask=mask,
            rows=rows,
            num_rows=1,
        ),
        old,
    )
    close(out, [-0.25, -0.25, 0, 0])


def cs336_fixture():
    """The course's snapshots: every tensor has seed 42, so the old log-probs are twice the new
    ones.
    """

    def draw(function, *shape):
        return function(*shape, generator=torch.Generator().manual_seed(42))

    policy = draw(torch.randn, 2, 10)
    advantages = draw(torch.rand, 2, 1)
    return policy, 2 * policy, draw(torch.rand, 2, 10) > 0.5, advantages - advantages.mean(0)


def check_cs336_sft_step(a):
    """Two such micro-batches per step: loss -.60078, gradient -.25; with c = 42 loss -.0143044."""
    policy, _, mask, _ = cs336_fixture()
    rows = row_index(10, 10, 10, 10)
    for constant, loss, grad in ((1.0, -0.60078, -0.25), (42.0, -0.0143044, -0.00595238)):
        weights = a.aggregation.token_weights(
            "seq-mean-token-sum-norm", mask.flatten().repeat(2), rows, 4, constant
        )[:20]
        close((-policy.flatten() * weights).sum(), loss, digits=5 if constant == 1 else 7)
        close(-weights[mask.flatten()].max(), grad, digits=8)


def check_cs336_grpo_step(a):
    policy, old, mask, advantages = cs336_fixture()
    per_token = a.losses.ppo_clip(
        policy.flatten(),
        old.flatten(),
        advantages.expand(2, 10).flatten(),
        clip_low=0.1,
        clip_high=0.1,
        dual_clip=None,
    ).values
    weights = a.aggregation.token_weights(
        "seq-mean-token-mean", mask.flatten().repeat(2), row_index(10, 10, 10, 10), 4
    )[:20]
    close((per_token * weights).sum(), 0.00440072, digits=8)


def check_luffy_shaping(a):
    """LUFFY T1: p -> f and df/dlog p."""
    p = column(0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 1)
    close(
        a.shaping.off_policy_shape(p.log()),
        [0.009901, 0.090909, 0.5, 0.75, 0.833333, 0.9, 0.909091],
    )
    grad = gradient(lambda x: a.shaping.off_policy_shape(x).sum(), p.log())
    close(grad, [0.009803, 0.082645, 0.25, 0.1875, 0.138889, 0.09, 0.082645])
    close(a.shaping.off_policy_shape(column(0.1).log(), gamma=0.3), [0.25])
    close(a.shaping.off_policy_shape(column(0.1).log(), gamma=0.5), [0.166667])
    for p, expected in (
        (0.1, [-0.225, 0.1125, 0.1125]),
        (0.9, [-0.009, 0.0045, 0.0045]),
        (0.01, [-0.081818, 0.040909, 0.040909]),
    ):
        logits = column(p, (1 - p) / 2, (1 - p) / 2).log()
        close(
            gradient(lambda x: -a.shaping.off_policy_shape(torch.log_softmax(x, 0)[0]), logits),
            expected,
        )


P = column(0.5, 0.1, 0.01, 0.9, 0.6, 0.24, 0.5, 1).log()
P_OLD = column(0.4, 0.2, 0.02, 0.9, 0.5, 0.4, 0.5, 1).log()
L_ADV = column(0.75, 0.75, 0.75, 0.75, -0.25, -0.25, -0.25, -0.25)
L_MASK = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0]).bool()
L_OFF = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]).bool()
NO_CLIP = {"clip_low": None, "clip_high": None}


def luffy(
    a,
    logprobs=P,
    shape="p_div_p",
    clip=NO_CLIP,
    on_shape=None,
    replay=False,
    mask=L_MASK,
    mode="token-sum",
    ratio=None,
    **shaping,
):
    """LUFFY's mixed loss on T3: a demonstration and a row of the policy.

    Sums are divided by L = 4.
    """
    off_ratio = ratio if ratio is not None else logprobs - P_OLD if replay else logprobs
    off = -L_ADV * a.shaping.off_policy_shape(off_ratio, shape, **shaping)
    on = a.losses.ppo_clip(logprobs, P_OLD, L_ADV, **clip).values
    if on_shape:
        on = -L_ADV * a.shaping.on_policy_reshape(logprobs, P_OLD, on_shape)
    values = torch.where(L_OFF, off, on)
    return aggregate(a, values, mode, mask, row_index(4, 4)) / (4 if mode == "token-sum" else 1)


def check_luffy_loss(a):
    close(luffy(a), -0.260795)
    close(luffy(a, clip={}), -0.248295)
    close(luffy(a, mode="token-mean"), -0.149026)
    close(luffy(a, gamma=0.3), -0.135736)
    close(luffy(a, gamma=0.5), -0.074212)
    close(luffy(a, shape="none"), -0.108125)
    close(luffy(a, shape="logp"), 0.319492)
    close(luffy(a, shape="p_logp"), 0.036367)
    close(luffy(a, shape="square_root"), -0.213503)
    close(luffy(a, shape="pow", exponent=0.5), -0.213503)
    close(luffy(a, min_value=0.2, max_value=0.8), -0.256250)
    sure = a.shaping.drop_confident(P, L_MASK, 0.8)
    close(luffy(a, mask=sure), -0.092045)
    close(luffy(a, mask=sure, mode="token-mean"), -0.061364)
    close(luffy(a, on_shape="p_div_p"), -0.253863)
    close(luffy(a, shape="none", ratio=P - torch.log(torch.tensor(0.5 + 1e-6))), -0.391249)
    close(luffy(a, replay=True), -0.481566)
    close(
        aggregate(
            a, a.losses.ppo_clip(P, P_OLD, L_ADV).values, "token-sum", L_MASK, row_index(4, 4)
        )
        / 4,
        -0.412500,
    )


def check_luffy_gradients(a):
    grad = gradient(lambda x: luffy(a, x), P)
    close(grad, [-0.026042, -0.046875, -0.015496, -0.016875, 0.075, 0.0375, 0.0625, 0])
    close(gradient(lambda x: luffy(a, x, clip={}), P)[4:], [0.075, 0, 0.0625, 0])
    close(
        gradient(lambda x: luffy(a, x, replay=True), P)[:4],
        [-0.012860, -0.026042, -0.026042, -0.015496],
    )


def check_luffy_components(a):
    off = -L_ADV * a.shaping.off_policy_shape(P)
    close(off[:4].mean(), -0.435795)
    close(a.shaping.off_policy_shape(P)[:4].mean(), 0.581061)
    on = a.losses.ppo_clip(P, P_OLD, L_ADV, **NO_CLIP).values
    close(on[4:7].mean(), 0.233333)
    kept = a.losses.ppo_clip(P, P_OLD, L_ADV)
    close(kept.values[4:7].mean(), 0.25)
    close(kept.metrics["clip_fraction"][L_MASK].sum() / 7, 2 / 7)


def check_luffy_with_sft(a):
    """T5: SFT 1.926566 + policy gradient .175."""
    sft = aggregate(a, -P, "token-mean", L_MASK & L_OFF, row_index(4, 4))
    on = a.losses.ppo_clip(P, P_OLD, L_ADV, **NO_CLIP).values
    close(sft, 1.926566)
    close(sft + aggregate(a, on, "token-sum", L_MASK & ~L_OFF, row_index(4, 4)) / 4, 2.101566)


def check_luffy_partial_prefix(a):
    p, old = column(0.5, 0.1, 0.01, 0.6, 0.24).log(), column(1, 1, 1, 0.5, 0.4).log()
    advantages = column(0.5, 0.5, 0.5, 0.5, 0.5)
    off = -advantages * a.shaping.off_policy_shape(p)
    on = a.losses.ppo_clip(p, old, advantages, **NO_CLIP).values
    close(off[:3].mean(), -0.237374)
    close(on[3:].mean(), -0.45)
    close(torch.where(torch.tensor([1, 1, 1, 0, 0]).bool(), off, on).sum() / 5, -0.322424)


def check_on_policy_reshape(a):
    """r = 1.2, then .6; p = .6 and .24, p_old = .5 and .4."""
    new, old = column(0.6, 0.24).log(), column(0.5, 0.4).log()
    reshape = a.shaping.on_policy_reshape
    close(reshape(new, old), [1.2, 0.6])
    close(reshape(new, old, "p_div_p"), [0.6 / 0.7 / (0.5 / 0.6), 0.24 / 0.34 / (0.4 / 0.5)])
    close(reshape(new, old, "logp"), [0.182322, -0.510826])
    close(reshape(new, old, "p_logp"), [1.218232, 0.548917])
    close(reshape(new, old, "square_root"), [1.095445, 0.774597])
    close(reshape(new, old, "pow", exponent=2), [1.44, 0.36])
