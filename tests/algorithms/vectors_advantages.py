"""Checks of advantages against hand-computed numbers.

Each check takes the modules `a`, so that test_mutations can pass mutated ones.
"""

import torch

from .helpers import close, column, exactly, row_index, same_group, trues

# verl T1: R = [1,0,0,1 | 1,1], lengths [2,4,3,1 | 2,2]; the group ids are unsorted and large.
REWARDS = column(1, 0, 0, 1, 1, 1)
GROUPS = torch.tensor([70, 70, 70, 70, -3, -3])
LENGTHS = torch.tensor([2, 4, 3, 1, 2, 2])
ROWS = row_index(2, 4, 3, 1, 2, 2)
MASK = trues(14)

# classmate 8.4
MAIN = column(1, 0, 1, 0, 7, 3, 5, 5)
CLASSMATE = column(1, 1, 0, 0, 6, 2, 2, 6)
PAIR = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
CM_ROWS = row_index(4, 3, 4, 4, 4, 4, 4, 4)
CM_COT = torch.tensor([1, 1, 0, 0] + [1, 0, 0] + [1, 1, 0, 0] * 6).bool()
CM_MASK = trues(31)
FIRST = torch.tensor([0, 4, 7, 11, 15, 19, 23, 27])  # first token of each row, in the thought
LAST = torch.tensor([3, 6, 10, 14, 18, 22, 26, 30])  # last token of each row, in the answer


def check_grpo(a):
    close(a.advantages.grpo(REWARDS, GROUPS), [0.866024, -0.866024, -0.866024, 0.866024, 0, 0])
    close(a.advantages.grpo(column(1), same_group(1)), [0.999999])
    close(a.advantages.grpo(column(3), same_group(1)), [2.999997])


def check_grpo_cs336(a):
    rewards = column(0.2, 0.5, 0, 0.4, 0.9, 0.7, 0.2, 0)
    expected = [-0.33824, 1.01472, -1.24021, 0.56373, 1.07062, 0.59479, -0.59479, -1.07062]
    close(a.advantages.grpo(rewards, PAIR), expected, digits=5)
    exactly(a.advantages.grpo(column(0.1, 0.1, 0.1), same_group(3)), [0, 0, 0])


def check_drgrpo(a):
    close(a.advantages.drgrpo(REWARDS, GROUPS), [0.5, -0.5, -0.5, 0.5, 0, 0])
    close(a.advantages.drgrpo(column(3), same_group(1)), [3])


def check_lite_ppo(a):
    """The batch's variance is (4 · 1/9 + 2 · 4/9) / 5, its std 0.516398; 0.5 / 0.516399."""
    close(a.advantages.lite_ppo(REWARDS, GROUPS), [0.968244, -0.968244, -0.968244, 0.968244, 0, 0])
    # A group of one keeps its reward: 3 / sqrt(7/3), and 0.5 / sqrt(7/3).
    rewards, groups = column(3, 0, 1), torch.tensor([4, 8, 8])
    close(a.advantages.lite_ppo(rewards, groups), [1.96396, -0.32733, 0.32733], digits=5)
    exactly(a.advantages.lite_ppo(column(3), same_group(1)), [3])
    exactly(a.advantages.lite_ppo(column(0.1, 0.1, 0.1), same_group(3)), [0, 0, 0])


def check_no_baseline(a):
    exactly(a.advantages.no_baseline(column(1, 0, 0.5)), [1, 0, 0.5])


def check_rloo(a):
    close(a.advantages.rloo(REWARDS, GROUPS), [0.666667, -0.666667, -0.666667, 0.666667, 0, 0])
    close(a.advantages.rloo(column(1), same_group(1)), [1])


def check_opo(a):
    close(a.advantages.opo(REWARDS, GROUPS, LENGTHS), [0.7, -0.3, -0.3, 0.7, 0, 0])
    close(a.advantages.opo(column(1), same_group(1), torch.tensor([7])), [1])


def check_gpg(a):
    close(a.advantages.gpg(REWARDS, GROUPS), [0.75, -0.75, -0.75, 0.75, 0, 0])


def check_grpo_passk(a):
    exactly(a.advantages.grpo_passk(REWARDS, GROUPS), [0] * 6)  # a tie at the top
    close(
        a.advantages.grpo_passk(column(0.9, 0.2, 0.5, 0.1), same_group(4)),
        [1.11297, 0, 0, 0],
        digits=5,
    )
    close(
        a.advantages.grpo_passk(column(0.9, 0.2, 0.5, 0.1), same_group(4), normalize_by_std=False),
        [0.4, 0, 0, 0],
    )
    close(a.advantages.grpo_passk(column(2), same_group(1)), [1.999998])


def check_reinforce_pp_baseline(a):
    expected = [1.557648, -0.865360, -0.865360, 1.557648, 0.346144, 0.346144]
    close(a.advantages.reinforce_pp_baseline(REWARDS, GROUPS, LENGTHS), expected)


def check_gdpo_verl(a):
    rewards = {"accuracy": column(1, 0, 0, 1), "format": column(1, 1, 0, 0)}
    close(
        a.advantages.gdpo(rewards, same_group(4), whiten_over="none"), [1.732048, 0, -1.732048, 0]
    )
    whitened = a.advantages.gdpo(rewards, same_group(4), lengths=torch.tensor([2, 2, 1, 2]))
    close(whitened, [1.242118, -0.207020, -1.656157, -0.207020])


def check_gdpo_rows(a):
    rewards = {"main": MAIN, "classmate": CLASSMATE}
    z = a.advantages.gdpo(rewards, PAIR, whiten_over="rows")
    close(z, [1.137053, 0, 0, -1.137053, 1.372546, -1.372546, -0.568527, 0.568527])
    z = a.advantages.gdpo(rewards, PAIR, {"classmate": 0.1}, whiten_over="rows")
    close(z, [0.9898, -0.8098, 0.8098, -0.9898, 1.3625, -1.3625, -0.09, 0.09], digits=4)


def check_grpo_split(a):
    rewards, on_policy = (
        column(1, 0, 0, 1, 0, 0, 0, 0),
        torch.tensor([0, 1, 1, 1, 1, 1, 1, 1]).bool(),
    )
    split, grpo = a.advantages.grpo_split, a.advantages.grpo
    pick = torch.tensor([0, 1, 3])
    close(split(rewards, same_group(8), on_policy)[pick], [2.267781, -0.377963, 2.267781])
    close(
        split(rewards, same_group(8), on_policy, normalize_by_std=False)[pick],
        [0.857143, -0.142857, 0.857143],
    )
    close(grpo(rewards, same_group(8))[pick], [1.620182, -0.540061, 1.620182])
    close(grpo(rewards, same_group(8), normalize_by_std=False)[pick], [0.75, -0.25, 0.75])
    alone = split(column(1, 0, 0, 0, 0, 0, 0, 0), same_group(8), on_policy)
    close(alone, [0.999999, 0, 0, 0, 0, 0, 0, 0])
    # One on-policy row: mean 0 and std 1 for the whole group.
    close(
        split(column(1, 0.5), same_group(2), torch.tensor([False, True])), [0.999999, 0.5], digits=6
    )


def check_luffy_fading(a):
    """k of 7 rows and the teacher are right: (7 - k) / 8 for right rows, -(k + 1) / 8 for wrong
    ones.
    """
    for k in range(8):
        rewards = column(1, *([1.0] * k), *([0.0] * (7 - k)))
        advantages = a.advantages.drgrpo(rewards, same_group(8))
        close(advantages, [(7 - k) / 8] * (k + 1) + [-(k + 1) / 8] * (7 - k))


def check_gae(a):
    rewards, values, rows = column(0, 0, 0, 1), column(0.1, 0.2, 0.3, 0.4), row_index(4)
    raw = a.token_advantages.gae(rewards, values, trues(4), rows, 1, whiten_advantages=False)
    close(raw.advantages, [0.9, 0.8, 0.7, 0.6])
    close(raw.returns, [1, 1, 1, 1])
    white = a.token_advantages.gae(rewards, values, trues(4), rows, 1)
    close(white.advantages, [1.161895, 0.387298, -0.387298, -1.161895])
    close(white.returns, [1, 1, 1, 1])
    raw = a.token_advantages.gae(
        rewards, values, trues(4), rows, 1, lam=0.95, whiten_advantages=False
    )
    close(raw.advantages, [0.799675, 0.7365, 0.67, 0.6])
    close(raw.returns, [0.899675, 0.9365, 0.97, 1])
    raw = a.token_advantages.gae(
        rewards, values, trues(4), rows, 1, gamma=0.99, lam=0.95, whiten_advantages=False
    )
    close(raw.advantages, [0.773290, 0.718012, 0.660300, 0.6])


def check_gae_skips_masked(a):
    """verl carries .6 onto the masked tokens; ours are 0 there, which no loss can see."""
    rewards, values = column(0, 0, 0, 0, 1), column(0.1, 0.2, 9, 9, 0.4)
    mask = torch.tensor([1, 1, 0, 0, 1]).bool()
    raw = a.token_advantages.gae(
        rewards, values, mask, row_index(5), 1, lam=0.95, whiten_advantages=False
    )
    close(raw.advantages, [0.8315, 0.77, 0, 0, 0.6])


def check_reinforce_pp(a):
    rewards = a.token_advantages.outcome_rewards(REWARDS, MASK, ROWS, 6)
    out = a.token_advantages.reinforce_pp(rewards, MASK, ROWS, 6)
    close(out.advantages[:6], [0.963624, 0.963624, -0.963624, -0.963624, -0.963624, -0.963624])
    close(out.returns, REWARDS[ROWS])
    out = a.token_advantages.reinforce_pp(rewards, MASK, ROWS, 6, gamma=0.9)
    close(out.advantages[:3], [0.846305, 1.047123, -0.961058])


def check_remax(a):
    rewards = a.token_advantages.outcome_rewards(REWARDS, MASK, ROWS, 6)
    out = a.token_advantages.remax(rewards, MASK, ROWS, 6, column(0.5, 0.5, 0.5, 0.5, 1, 1))
    close(out.advantages, column(0.5, -0.5, -0.5, 0.5, 0, 0)[ROWS])


def check_outcome_rewards(a):
    mask = torch.tensor([1, 1, 0, 0, 0, 1, 0]).bool()
    exactly(
        a.token_advantages.outcome_rewards(column(2, 3, 5), mask, row_index(3, 2, 2), 3),
        [0, 2, 0, 0, 0, 5, 0],
    )


def check_optimal_token_baseline(a):
    pi, squares = column(0.5, 0.8, 0.4, 0.6, 0.7), column(0.4, 0.7, 0.35, 0.5, 0.6)
    rewards, rows = column(0, 1, 0, 0, 0), row_index(2, 3)
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        estimate = getattr(a.token_advantages, name)
        out = estimate(rewards, pi.log(), squares, trues(5), rows, 2, torch.tensor([9, 9]))
        close(out.advantages, [0.578947, 0.629630, -0.421053, -0.370370, 0])
        out = estimate(
            column(0, 1, 0, 0, 1), pi.log(), squares, trues(5), rows, 2, torch.tensor([9, 9])
        )
        close(out.advantages[4], 1.0)  # beyond the second-longest row the baseline is 0
        weighed = estimate(
            rewards,
            pi.log(),
            squares,
            trues(5),
            rows,
            2,
            same_group(2),
            importance_weights=column(2, 1, 1, 1, 1),
        )
        close(weighed.advantages[0], 1 - 1.6 / 2.15)  # w_1 = 4 · .4 against .55


def check_tir_time(a):
    """Row 1 has two tool tokens between its own.

    Tool-aware time aligns both rows' second tokens.
    """
    mask = torch.tensor([1, 0, 0, 1, 1, 1]).bool()
    logprobs, squares, rows = (
        column(0.5, 0.5, 0.5, 0.5, 0.5, 0.5).log(),
        column(0.5, 0.5, 0.5, 0.5, 0.5, 0.5),
        row_index(4, 2),
    )
    rewards = column(0, 0, 0, 1, 0, 0)
    tir = a.token_advantages.tir_optimal_token_baseline(
        rewards, logprobs, squares, mask, rows, 2, same_group(2)
    )
    close(tir.advantages, [0.5, 0, 0, 0.5, -0.5, -0.5])
    plain = a.token_advantages.optimal_token_baseline(
        rewards, logprobs, squares, mask, rows, 2, same_group(2)
    )
    close(plain.advantages, [0.5, 0, 0, 1, -0.5, 0])


def check_classmate_std_off(a):
    cm = a.classmate_advantages
    u = [1, 0, 0, -1, 4, -4, -2, 2]
    main = [0.5, -0.5, 0.5, -0.5, 2, -2, 0, 0]
    for function in (cm.separated, cm.with_classmate):
        out = function(MAIN, CLASSMATE, PAIR, CM_MASK, CM_COT, CM_ROWS).advantages
        close(out[FIRST], u)
        close(out[LAST], main)
    z = cm.gdpo(MAIN, CLASSMATE, PAIR, CM_MASK, CM_COT, CM_ROWS).advantages
    close(z[FIRST], [0.408248, 0, 0, -0.408248, 1.632993, -1.632993, -0.816496, 0.816496])
    weighed = cm.separated(
        MAIN, CLASSMATE, PAIR, CM_MASK, CM_COT, CM_ROWS, classmate_weight=0.1
    ).advantages
    close(weighed[FIRST], [0.55, -0.45, 0.45, -0.55, 2.2, -2.2, -0.2, 0.2])


def check_classmate_std_on(a):
    cm = a.classmate_advantages
    arguments = (MAIN, CLASSMATE, PAIR, CM_MASK, CM_COT, CM_ROWS)
    main = [0.866024, -0.866024, 0.866024, -0.866024, 1.224744, -1.224744, 0, 0]
    separated = cm.separated(*arguments, normalize_by_std=True).advantages
    close(separated[FIRST], [1.732048, 0, 0, -1.732048, 2.090769, -2.090769, -0.866025, 0.866025])
    close(separated[LAST], main)
    together = cm.with_classmate(*arguments, normalize_by_std=True).advantages
    close(together[FIRST], [1.224743, 0, 0, -1.224743, 1.095445, -1.095445, -0.547722, 0.547722])
    close(together[LAST], main)
    praise = cm.non_neg(*arguments, normalize_by_std=True).advantages
    close(praise[FIRST], [1.7320, 0, 0.8660, -0.8660, 2.0908, -1.2247, 0, 0.8660], digits=4)


def check_classmate_gdpo_tokens(a):
    arguments = (MAIN, CLASSMATE, PAIR, CM_MASK, CM_COT, CM_ROWS)
    out = a.classmate_advantages.gdpo(*arguments, normalize_by_std=True).advantages
    close(out[:4], [1.137053, 1.137053, 0.866024, 0.866024])
    close(out[4:7], [0, -0.866024, -0.866024])
    close(out[23:27], [-0.568527, -0.568527, 0, 0])
    everywhere = a.classmate_advantages.gdpo(
        *arguments, normalize_by_std=True, classmate_tokens="all"
    ).advantages
    close(everywhere[:4], [1.137053] * 4)
    weighed = a.classmate_advantages.gdpo(
        *arguments, normalize_by_std=True, classmate_weight=0.1
    ).advantages
    close(
        weighed[FIRST], [0.9898, -0.8098, 0.8098, -0.9898, 1.3625, -1.3625, -0.09, 0.09], digits=4
    )


def check_classmate_singleton(a):
    one = (column(3), column(1), same_group(1), trues(2), torch.tensor([True, False]), row_index(2))
    close(a.classmate_advantages.separated(*one, normalize_by_std=True).advantages[1], 2.999997)
    exactly(a.classmate_advantages.gdpo(*one, normalize_by_std=True).advantages[:1], [0])


# Two rows of a group with turns of 2+1 and 1+1+1 tokens; an observation lies between turns.
TURN_ROWS = row_index(4, 5)
TURNS = torch.tensor([0, 0, -1, 1, 0, -1, 1, -1, 2])
TURN_MASK = TURNS >= 0
TURN_REWARDS = torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 2.0]])


def check_turn_end_rewards(a):
    placed = a.token_advantages.turn_end_rewards(TURN_REWARDS, TURNS, TURN_MASK, TURN_ROWS, 2)
    close(placed, [0, 0, 0, 1, -1, 0, 0, 0, 2])
    only_last = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1]).bool()
    placed = a.token_advantages.turn_end_rewards(TURN_REWARDS, TURNS, only_last, TURN_ROWS, 2)
    close(placed, [0, 0, 0, 0, 0, 0, 0, 0, 1])
