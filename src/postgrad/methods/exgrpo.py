"""ExGRPO: the policy's own successful responses return as rows of later groups.

The run starts as plain clipped GRPO. After a step with enough successes it is mixed for good:
successes of problems that are solved sometimes enter a pool, and part of each step's problems comes
from the pool, each with one stored row besides its fresh ones. The ratio of a stored row is taken
to the log-probs recorded with it and then shaped (luffy.py). Problems that all rows
solve are retired.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.replay import BUCKET_WEIGHTS
from postgrad.config.schema import Config, setting
from postgrad.data.encode.encoder import Encoder
from postgrad.errors import Conflict
from postgrad.methods.method import Supply
from postgrad.methods.step import Group, Stage, Step
from postgrad.methods.support.mixed_policy import (
    MixedPolicy,
    MixedPolicyObjective,
    MixedPolicySettings,
)
from postgrad.methods.support.replay_pool import PICK_BY, POOL_RANGES, ReplayPool, count_successes
from postgrad.types import POLICY, REPLAY, TOOL, Batch, Problem, Trajectory


@dataclass
class ExGrpoSettings(MixedPolicySettings):
    start_at: float = setting(
        0.35,
        "the run is mixed after a step with more than this share of successes",
        at_least=0.0,
        at_most=1.0,
    )
    success_reward: float = setting(1.0, "smallest reward of a success")
    replay_share: float = setting(
        0.5, "largest share of a step's problems from the pool", at_least=0.0, at_most=1.0
    )
    buckets: str = setting(
        "normal",
        "weight of a problem by its latest number of successes; none: equal",
        choices=BUCKET_WEIGHTS,
        only_with="method.replay_share",
    )
    pool_range: str = setting(
        "all",
        "problems of the pool to draw from, by age",
        choices=POOL_RANGES,
        only_with="method.replay_share",
    )
    pick_by: str = setting(
        "entropy",
        "which stored row of a problem is replayed",
        choices=PICK_BY,
        only_with="method.replay_share",
    )
    replay_order: str = setting(
        "min",
        "the row with the least or the most of it",
        choices=("min", "max"),
        only_with="method.replay_share and method.pick_by!=random",
    )
    importance: bool = setting(
        True,
        "ratio to the recorded log-probs; false: to 1, as for demonstrations",
        only_with="method.replay_share",
    )
    retire_margin: int = setting(
        20, "problems that always remain besides those of one step", at_least=0
    )


class ExGrpoObjective(MixedPolicyObjective):
    def loss_options(self, batch: Batch) -> dict[str, float]:
        """Clip the ratio until the run is mixed."""
        if not is_mixed(batch):
            return super().loss_options(batch)
        return dict.fromkeys(("clip_low", "clip_high", "dual_clip"), math.inf)

    def on_shape(self, batch: Batch) -> str:
        return super().on_shape(batch) if is_mixed(batch) else "none"


class ExGrpo(MixedPolicy):
    Settings = ExGrpoSettings
    Objective = ExGrpoObjective
    traits = replace(
        MixedPolicy.traits, truncated_sampling=False
    )  # the pool does not store what was kept

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.is_mixed = False
        self.pool = ReplayPool()
        self.replayed_uids: list[str] = []

    def check(self) -> None:
        super().check()
        if self.settings.max_refills:
            raise Conflict(
                f"method.max_refills={self.settings.max_refills}: exgrpo chooses its problems "
                "itself; remove it"
            )

    def supply(self, encoder: Encoder, problems: Sequence[Problem]) -> Supply | None:
        """Count the problems of a step that may come from the pool."""
        settings = self.settings
        if not settings.replay_share:
            return None
        per_step = self.config.training.problems_per_step
        can_fill_pool = self.config.rollout.samples > 1 and settings.start_at < 1
        num = int(settings.replay_share * per_step) if can_fill_pool else 0
        return Supply(
            num,
            f"replays: {num} of the {per_step} problems of a step may come from the pool "
            f"(method.replay_share={settings.replay_share:g})",
            "replays need method.replay_share * training.problems_per_step of at least 1, "
            "rollout.samples of at least 2 and method.start_at below 1",
        )

    def scoring_stages(self) -> list[Stage]:
        return [*super().scoring_stages(), self.collect]

    # ---- stages, on the driver

    def draw(self, _: Any, step: Step) -> list[Problem]:
        """Problems of the pool and fresh ones, shuffled over the updates of the step."""
        settings = self.settings
        num_problems = self.config.training.problems_per_step
        num_replayed = int(settings.replay_share * num_problems) if self.is_mixed else 0
        uniform = self.rng(step, "replay of problems").random
        samples = self.config.rollout.samples
        self.replayed_uids = self.pool.choose(
            num_replayed, samples, settings.buckets, settings.pool_range, uniform
        )
        problems = [step.data.find(uid) for uid in self.replayed_uids]
        problems += step.data.draw(num_problems - len(problems))
        positions = [uniform() for _ in problems]
        return [problems[i] for i in sorted(range(num_problems), key=positions.__getitem__)]

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        groups = super().compose(problems, step)
        waiting = set(self.replayed_uids)
        for group in groups:
            if group.problem.uid in waiting:
                waiting.remove(group.problem.uid)  # once, even if it is also drawn afresh
                group.given_rows.append(self.replay_row(group.problem, step))
                group.num_samples -= 1
        return groups

    def replay_row(self, problem: Problem, step: Step) -> Trajectory:
        """One stored response of the problem as a row."""
        settings = self.settings
        uniform = self.rng(step, f"replay of {problem.uid}").random
        stored = self.pool.pick(
            problem.uid, settings.pick_by, settings.replay_order == "max", uniform
        )
        own = stored.own.tolist()
        return Trajectory(
            problem.uid,
            self.ports.encoder.prompt(problem),
            stored.tokens.tolist(),
            source=REPLAY,
            finish="given",
            behavior_logprobs=stored.logprobs.tolist() if settings.importance else None,
            loss_mask=own,
            token_source=[REPLAY if is_own else TOOL for is_own in own],
            images=problem.prompt_images,
        )

    def collect(self, batch: Batch, step: Step) -> Batch:
        """Update the pool once the run is mixed, and decide whether it becomes mixed."""
        success = batch.rows["reward"] >= self.settings.success_reward
        batch.rows["mixed"] = torch.full((len(batch),), self.is_mixed)  # read beside the model
        success_share = float(success.double().mean())
        step.metrics["replay/solved"] = success_share
        step.metrics["replay/mixed"] = float(self.is_mixed)
        num_replayed = (batch.rows["source"] == REPLAY).sum()  # one row per group
        step.metrics["replay/groups"] = float(num_replayed)
        if self.is_mixed:
            successes = count_successes(batch, success)
            self.store(batch, success, successes, step)
            self.retire(batch, successes, step)
        self.is_mixed = self.is_mixed or success_share > self.settings.start_at
        step.metrics["replay/pool"] = float(len(self.pool))
        step.metrics["replay/rows"] = float(self.pool.num_experiences)
        return batch

    def store(self, batch: Batch, success: Tensor, successes: Tensor, step: Step) -> None:
        """Add the policy's successes of problems that some rows solve, but not all.

        A row that saw pictures after its prompt is left out: the pool has no pictures.
        """
        is_partly_solved = successes < self.config.rollout.samples
        is_new = success & is_partly_solved & (batch.rows["source"] == POLICY)
        if "images" in batch.rows:
            pairs = zip(step.problems(batch), batch.rows["images"], strict=True)
            is_new &= torch.tensor([images == one.prompt_images for one, images in pairs])
        indices = torch.nonzero(is_new)[:, 0]
        new = batch.select(indices)
        outputs = self.ports.policy.logprobs(new, self.objective.view(step.number))
        before = self.pool.num_experiences
        self.pool.add_rows(new, successes[indices], outputs)
        step.metrics["replay/stored"] = float(self.pool.num_experiences - before)

    def retire(self, batch: Batch, successes: Tensor, step: Step) -> None:
        """Remove fully solved problems from the pool, and from the data if others are left."""
        fewest = self.config.training.problems_per_step + self.settings.retire_margin
        for uid, number in zip(batch.rows["uid"], successes.tolist(), strict=True):
            if number < self.config.rollout.samples:
                self.pool.set_successes(uid, number)
                continue
            self.pool.drop(uid)
            if step.data.left > fewest:
                step.data.retire([uid])
        step.metrics["replay/problems_left"] = float(step.data.left)

    # ---- state

    def state(self) -> dict[str, Any]:
        return super().state() | {"mixed": self.is_mixed, "pool": self.pool.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.is_mixed = state["mixed"]
        self.pool.load(state["pool"])


def is_mixed(batch: Batch) -> bool:
    return bool(batch.rows["mixed"].any())
