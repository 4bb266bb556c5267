"""ExGRPO: the replay pool, the two modes, the loss of a replayed row, and a killed run."""

import pytest
import torch
from given_logprobs import Row, priced
from method_runs import SMALL, Bound, run
from test_gradient_property import (
    assert_one_gradient,
    batch_with_all_columns,
    gradient,
    policy_of,
)
from tiny_runs import config_of
from vision_models import square

from postgrad.methods.exgrpo import ExGrpo
from postgrad.methods.step import Step
from postgrad.types import POLICY, REPLAY, Batch

RECORDED = [0.4, 0.2, 0.02, 0.9]
A = Row(REPLAY, [0.5, 0.1, 0.01, 0.9], [0.3, 0.3, 0.3, 0.3], 0.75, author=RECORDED)
B = Row(POLICY, [0.6, 0.24, 0.5, 1.0], [0.5, 0.4, 0.5, 1.0], -0.25, mask=[1, 1, 1, 0])


# ---- the price of a row


@pytest.mark.slow
def test_a_replayed_row_is_priced_by_its_recorded_logprobs(tiny):
    """T3: the ratio to the recorded log-probs, shaped.

    The row's old log-probs (.3) do not matter.
    """
    done = priced(tiny, "exgrpo", [A, B])
    assert done.loss * 2 == pytest.approx(-0.481566, abs=1e-6)
    assert (done.gradient * 2)[:4].tolist() == pytest.approx(
        [-0.012860, -0.026042, -0.026042, -0.015496], abs=1e-6
    )
    assert done.metrics["policy/clip_fraction"] == 0.0, "mixed mode has no clip"


@pytest.mark.slow
def test_the_clip_is_for_the_warm_up(tiny, monkeypatch):
    """T3's own row clipped (.25 a token) and open (.7 / 3)."""
    import given_logprobs

    real = given_logprobs.table

    def warming_up(rows):
        batch = real(rows)
        batch.rows["mixed"] = torch.zeros(len(batch), dtype=torch.bool)
        return batch

    assert priced(tiny, "exgrpo", [B]).loss == pytest.approx(0.175, abs=1e-6)
    shaped = ("method.on_shape=p_div_p",)
    assert priced(tiny, "exgrpo", [B], *shaped).loss == pytest.approx(
        0.25 * (1.028571 + 0.882353 + 1) / 4, abs=1e-6
    )
    monkeypatch.setattr(given_logprobs, "table", warming_up)
    assert priced(tiny, "exgrpo", [B]).loss == pytest.approx(0.1875, abs=1e-6)
    assert priced(tiny, "exgrpo", [B], *shaped).loss == pytest.approx(0.1875, abs=1e-6), (
        "no reshaping either"
    )


@pytest.mark.slow
def test_any_split_and_any_order_give_one_gradient(tiny, loaded):
    policy, batch = policy_of("exgrpo", tiny, loaded), batch_with_all_columns()
    replayed = torch.arange(len(batch)) % 3 == 0
    batch.rows["source"] = torch.where(replayed, REPLAY, POLICY).to(torch.int8)
    batch.tokens["token_source"] = batch.expand(batch.rows["source"])
    assert_one_gradient(lambda rows, budget: gradient(policy, rows, budget), batch)


# ---- the pool


class ReplayRun(Bound):
    """ExGRPO on four problems per step with four rows each.

    `plan` maps a uid to the number of rows that succeed.
    """

    def __init__(self, model, *overrides: str) -> None:
        super().__init__(config_of("exgrpo", model, *SMALL, "method.retire_margin=0", *overrides))
        assert isinstance(self.method, ExGrpo)
        self.ex: ExGrpo = self.method
        self.plan: dict[str, int] = {}
        self.scorer.score = self.judged  # type: ignore[method-assign]

    def judged(self, problems, responses, *_):
        from postgrad.types import Score

        seen: dict[str, int] = {}
        out = []
        for p in problems:
            seen[p.uid] = seen.get(p.uid, 0) + 1
            out.append(Score(float(seen[p.uid] <= self.plan.get(p.uid, 0))))
        return out

    def go(self, number: int, *successes: int) -> Batch:
        """One step in which the first problems of the data have so many successes."""
        self.plan |= {p.uid: n for p, n in zip(self.problems, successes, strict=False)}
        return self.until("collect", number)

    def uids(self, *numbers: int) -> list[str]:
        return [self.problems[i].uid for i in numbers]


@pytest.fixture
def replay(tiny):
    return ReplayRun(tiny)


def test_warm_up_lasts_until_a_step_has_more_than_the_share_and_never_comes_back(replay):
    """6 of 16 rows are 37.5%, 5 are 31%. The warm-up stores nothing, not even in its last step."""
    batch = replay.go(1, 2, 3, 0, 0)
    assert not replay.ex.is_mixed and not batch.rows["mixed"].any() and len(replay.ex.pool) == 0
    replay.problem_queue.cursor._position = 0
    batch = replay.go(2, 2, 4, 0, 0)
    assert (
        replay.ex.is_mixed
        and not batch.rows["mixed"].any()
        and len(replay.ex.pool) == 0
        and replay.metrics["replay/mixed"] == 0.0
    )
    assert replay.problem_queue.left == len(replay.problems), (
        "solved groups of the warm-up are not retired"
    )
    batch = replay.go(3)
    assert (
        replay.ex.is_mixed
        and bool(batch.rows["mixed"].all())
        and replay.metrics["replay/solved"] == 0.0
    )
    replay.until("collect", 4)
    assert replay.ex.is_mixed


def mixed(model, *overrides: str) -> ReplayRun:
    replay = ReplayRun(model, *overrides)
    replay.ex.is_mixed = True
    return replay


def test_what_enters_the_pool_and_what_leaves_the_data(tiny):
    """No success: nothing. All: retired.

    Some: every distinct success with log-probs and entropy.
    """
    replay = mixed(tiny)
    batch = replay.go(1, 0, 1, 3, 4)
    entries = replay.ex.pool.entries
    assert list(entries) == replay.uids(1, 2) and [e.successes for e in entries.values()] == [1, 3]
    assert replay.problem_queue.left == len(
        replay.problems
    ) - 1 and replay.problem_queue.cursor.retired == {3}
    outputs = replay.host.policy.logprobs(batch)
    rows, first = batch.response.split(), batch.response.offsets.tolist()
    kept = {tuple(rows[i].tolist()): i for i in (8, 9, 10)}
    assert {tuple(e.tokens.tolist()) for e in entries[replay.uids(2)[0]].experiences} == set(kept)
    for e in entries[replay.uids(2)[0]].experiences:
        i = kept[tuple(e.tokens.tolist())]
        part = slice(first[i], first[i + 1])
        assert torch.allclose(e.logprobs, outputs["logprobs"][part], atol=1e-6)
        assert e.entropy == pytest.approx(float(outputs["entropy"][part].mean()), abs=1e-5)


def test_a_row_that_saw_pictures_after_its_prompt_is_not_stored(tiny, monkeypatch):
    """The pool has no pictures: replayed, its image tokens would show nothing."""
    replay = mixed(tiny)
    monkeypatch.setattr(replay.ex.ports.policy, "logprobs", lambda *given: {})
    stored: list[int] = []
    monkeypatch.setattr(
        replay.ex.pool, "add_rows", lambda rows, successes, outputs: stored.append(len(rows))
    )
    batch = replay.until("score", 1)
    batch.rows["images"] = [(square("red"),) if i == 5 else () for i in range(len(batch))]
    success = torch.arange(len(batch)) % 4 < 2
    replay.ex.store(batch, success, torch.full((len(batch),), 2), replay.step_done)
    assert stored == [int(success.sum()) - 1]


@pytest.mark.slow
def test_a_margin_keeps_enough_problems_to_draw_from(tiny):
    few = mixed(tiny, "method.retire_margin=87")  # 4 problems a step
    few.go(1, 4, 4, 4, 4)
    assert few.problem_queue.left == len(few.problems) == 91
    some = mixed(tiny, "method.retire_margin=85")
    some.go(1, 4, 4, 4, 4)
    assert some.problem_queue.left == 89, "as long as more than 85 + 4 remain"


def test_replayed_groups_are_those_of_the_step_not_of_one_drawn_ahead(tiny):
    replay = mixed(tiny)
    replay.go(1, 1, 2, 3, 1)
    batch = replay.until("score", 2)
    replay.ex.pool.entries.clear()
    replay.ex.draw(None, Step(3, replay.problem_queue))
    step = Step(2, replay.problem_queue)
    replay.ex.collect(batch, step)
    assert step.metrics["replay/groups"] == 2


def test_half_of_the_problems_come_back_and_only_the_rest_is_drawn(tiny):
    """Two of four problems are replayed: one stored row and three fresh ones.

    The others have four.
    """
    replay = mixed(tiny)
    replay.go(1, 1, 2, 3, 1)
    before = round(replay.problem_queue.epoch * len(replay.problems))
    batch = replay.go(2)
    assert round(replay.problem_queue.epoch * len(replay.problems)) == before + 2
    replayed = batch.rows["source"] == REPLAY
    assert int(replayed.sum()) == 2 == replay.metrics["replay/groups"] and len(batch) == 16
    assert torch.bincount(batch.rows["group"]).tolist() == [4, 4, 4, 4]
    for i in torch.nonzero(replayed)[:, 0].tolist():
        uid, tokens = batch.rows["uid"][i], batch.response.split()[i]
        stored = replay.ex.pool.entries[uid].experiences
        match = [e for e in stored if torch.equal(e.tokens.long(), tokens)]
        assert len(match) == 1 and match[0].entropy == min(e.entropy for e in stored)
        part = slice(*batch.response.offsets[i : i + 2].tolist())
        assert torch.equal(batch.tokens["behavior_logprobs"][part], match[0].logprobs)
        assert set(batch.tokens["token_source"][part].tolist()) == {REPLAY}
    assert replay.metrics["reward/replay"] <= 1.0 and replay.metrics["off_policy/token_share"] > 0


def test_the_latest_count_decides_the_bucket_and_all_right_retires_a_replay_too(tiny):
    replay = mixed(tiny, "method.replay_share=1.0")
    replay.go(1, 3, 3, 3, 3)
    stored = {uid: len(e.experiences) for uid, e in replay.ex.pool.entries.items()}
    replay.go(2, 1, 2, 4, 0)  # all four are replayed; the first row of each group is the stored one
    assert {uid: e.successes for uid, e in replay.ex.pool.entries.items()} == dict(
        zip(replay.uids(0, 1, 3), (1, 2, 3), strict=True)
    )
    assert replay.problem_queue.cursor.retired == {2}
    first, second, _, last = replay.uids(0, 1, 2, 3)
    now = {uid: len(e.experiences) for uid, e in replay.ex.pool.entries.items()}
    assert now[first] == stored[first] and now[last] == stored[last], (
        "a replayed row is not stored again"
    )
    assert stored[second] <= now[second] <= stored[second] + 1


def test_a_success_is_stored_once(tiny):
    replay = mixed(tiny, "rollout.temperature=0.01")  # all rows of a problem are alike
    replay.go(1, 3, 0, 0, 0)
    (entry,) = replay.ex.pool.entries.values()
    assert entry.successes == 3 and len(entry.experiences) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", ["pick_by=perplexity", "replay_order=max", "pick_by=random", "importance=false"]
)
def test_other_choices_of_the_row(overrides, tiny):
    replay = mixed(tiny, f"method.{overrides}", "method.replay_share=1.0")
    replay.go(1, 3, 3, 3, 3)
    batch = replay.until("sample", 2)
    value = {
        "pick_by=perplexity": lambda e: e.perplexity,
        "replay_order=max": lambda e: -e.entropy,
    }.get(overrides)
    for i in torch.nonzero(batch.rows["source"] == REPLAY)[:, 0].tolist():
        stored = replay.ex.pool.entries[batch.rows["uid"][i]].experiences
        (match,) = [e for e in stored if torch.equal(e.tokens.long(), batch.response.split()[i])]
        assert value is None or value(match) == min(map(value, stored))
        part = slice(*batch.response.offsets[i : i + 2].tolist())
        recorded = (
            torch.zeros(len(match.tokens)) if overrides == "importance=false" else match.logprobs
        )
        assert torch.equal(batch.tokens["behavior_logprobs"][part], recorded)


# ---- whole runs

VERIFIER = """
def has_seven(response, problem):
    return float("7" in response)
"""
RUN = (
    "method.start_at=0.2",
    "training.updates_per_step=2",
    "optimizer.lr=3e-3",
    "method.retire_margin=4",
    "training.problems_per_step=6",
)


@pytest.fixture
def seven(tmp_path):
    (tmp_path / "seven.py").write_text(VERIFIER)
    return f"reward.verifier={tmp_path}/seven.py:has_seven"


@pytest.mark.slow
def test_a_run_turns_mixed_and_goes_on_learning(tiny, seven, tmp_path):
    own = (
        "training.steps=40",
        "training.problems_per_step=8",
        "rollout.samples=8",
        "training.checkpoint_every=1000",
    )
    lines = run("exgrpo", tiny, tmp_path, *RUN, *own, seven)
    turned = [line["replay/mixed"] for line in lines]
    assert turned[0] == 0.0 and turned[-1] == 1.0 and turned == sorted(turned)
    alone = [line["reward/on_policy"] for line in lines]
    assert sum(alone[-5:]) / 5 > sum(alone[:5]) / 5 + 0.3, alone
    assert lines[-1]["replay/problems_left"] < 91 and any(
        line["replay/groups"] == 4 for line in lines
    )
