"""examples/curriculum.py: problems that are always or never solved are skipped."""

import json
from pathlib import Path

import pytest
from method_runs import SMALL, bound, run
from tiny_runs import CURRICULUM, config_of

from postgrad.data.problem_queue import ProblemQueue
from postgrad.data.problems import load_problems
from postgrad.errors import ConfigError, RunError
from postgrad.methods import find_method
from postgrad.methods.step import Step


def curriculum(tiny: Path, *overrides: str):
    """(method, problems): the method with its settings, without models."""
    config = config_of("grpo", tiny, CURRICULUM, *SMALL, *overrides)
    return find_method(config.method.name)(config), load_problems(config.data.train)


def draws(method, problems, steps: int = 200) -> dict[str, int]:
    """How often each problem was drawn in so many steps of 4."""
    counts = {problem.uid: 0 for problem in problems}
    problem_queue = ProblemQueue(problems)
    for number in range(1, steps + 1):
        for problem in method.draw(None, Step(number, problem_queue)):
            counts[problem.uid] += 1
    return counts


def test_problems_are_drawn_by_their_solve_rate(tiny):
    """Rates of 0, 1/2, 1 and none with a floor of 1/4: shares of 1 : 4 : 1 : 4."""
    method, problems = curriculum(tiny, "method.floor=0.25")
    problems = problems[:8]
    names = [problem.uid for problem in problems]
    rates = [0.0, 0.5, 1.0, None] * 2
    known = zip(names, rates, strict=True)
    method.solve_rates = {uid: rate for uid, rate in known if rate is not None}
    counts = draws(method, problems)
    assert sum(counts.values()) == 800
    for uid, rate in zip(names, rates, strict=True):
        share = 0.1 if rate in (0.0, 1.0) else 0.4
        assert counts[uid] / 800 == pytest.approx(share / 2, abs=0.03), (rate, counts)


def test_floor_0_drops_them_and_nothing_left_is_an_error(tiny):
    method, problems = curriculum(tiny, "method.floor=0")
    problems = problems[:6]
    names = [problem.uid for problem in problems]
    method.solve_rates = dict.fromkeys(names[:2], 1.0)
    counts = draws(method, problems, steps=5)
    assert [counts[uid] for uid in names[:2]] == [0, 0] and min(counts[u] for u in names[2:]) > 2
    method.solve_rates = dict.fromkeys(names, 0.0)
    with pytest.raises(RunError, match=r"method\.floor"):
        method.draw(None, Step(1, ProblemQueue(problems)))


def test_solve_rates_follow_the_rewards_and_survive(tiny):
    """All right, then one of four right: 1, then 0.5 · 1 + 0.5 · 0.25 = 0.625."""
    run = bound("grpo", tiny, CURRICULUM, "training.problems_per_step=1", value=lambda text: 1.0)
    batch = run.until("score")
    (uid,) = set(batch.rows["uid"])
    assert run.method.solve_rates == {uid: 1.0}
    run.method.ports.scorer.value = lambda text, values=[1.0, 0.9, 0.0, 0.0]: values.pop()
    run.method.score(batch, run.step_done)
    assert run.method.solve_rates == {uid: 0.625}
    again, _ = curriculum(tiny)
    again.load(json.loads(json.dumps(run.method.state())))
    assert again.solve_rates == {uid: 0.625} and again.kl_coef == run.method.kl_coef


def test_what_would_bypass_it_is_refused(tiny):
    for override in ("rollout.staleness=1", "method.max_refills=2"):
        method, _ = curriculum(tiny, override)
        with pytest.raises(ConfigError, match=override.replace(".", r"\.")):
            type(method).check(method)


@pytest.mark.slow
def test_it_learns(tiny, verifiers, tmp_path):
    lines = run(
        "grpo",
        tiny,
        tmp_path,
        CURRICULUM,
        f"reward.verifier={verifiers}:sevens",
        "method.solved_score=0.5",
        "optimizer.lr=5e-3",
        "training.steps=15",
        "training.problems_per_step=8",
    )
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.3, rewards
    assert lines[0]["curriculum/always_or_never"] == 1.0, "at first no response is right"
    assert lines[-1]["curriculum/solve_rate"] > 0.3
    assert sum(line["curriculum/skipped"] for line in lines) > 0
