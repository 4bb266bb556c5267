"""ExGRPO: the policy's own successes come back as rows of later groups.

Warm-up is plain clipped GRPO. After a step in which enough rows succeeded the run is mixed for good: successes of problems that were
solved sometimes enter a pool, and part of every step's problems comes from there, each with one stored row beside its fresh ones. That
row's ratio is taken to the log-probs recorded with it, then shaped (mixed.py). Problems that all rows solve are retired.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postgrad.algorithms.replay import BUCKET_WEIGHTS
from postgrad.config.schema import Config, setting
from postgrad.errors import ConfigError
from postgrad.methods.base import Group, Stage, Step
from postgrad.methods.support.checks import refuse_unread
from postgrad.methods.support.mixed import Mixed, MixedSettings
from postgrad.methods.support.replay_pool import PICK_BY, POOL_RANGES, Experience, Pool
from postgrad.types import POLICY, REPLAY, Batch, Problem, Ragged, Trajectory


@dataclass
class ExGrpoSettings(MixedSettings):
    start_at: float = setting(
        0.35,
        "mixed mode follows a step with more than this share of successes",
        at_least=0.0,
        at_most=1.0,
    )
    success_reward: float = setting(1.0, "rewards from here on are successes")
    replay_share: float = setting(
        0.5,
        "most of a step's problems that come from the pool, as a share",
        at_least=0.0,
        at_most=1.0,
    )
    buckets: str = setting(
        "normal",
        "weight of a problem's latest number of successes; none: all alike",
        choices=BUCKET_WEIGHTS,
    )
    pool_range: str = setting(
        "all", "problems of the pool to draw from, by age", choices=POOL_RANGES
    )
    pick_by: str = setting(
        "entropy", "which stored row of a problem, by its mean token", choices=PICK_BY
    )
    pick: str = setting("min", "the row with the least or the most of it", choices=("min", "max"))
    importance: bool = setting(
        True, "ratio to the recorded log-probs; false: to 1, as for demonstrations"
    )
    retire_margin: int = setting(
        20, "problems kept beyond those of a step, whatever is solved", at_least=0
    )


class ExGrpo(Mixed):
    Settings = ExGrpoSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.mixed = False
        self.pool = Pool()
        self.replaying: list[str] = []

    def check(self) -> None:
        super().check()
        if self.settings.max_refills:
            raise ConfigError(
                f"method.max_refills={self.settings.max_refills}: exgrpo chooses its problems itself; remove it"
            )

    def check_used(self) -> None:
        super().check_used()
        settings = self.settings
        if not settings.replay_share:
            names = ["buckets", "pool_range", "pick_by", "pick", "importance"]
            refuse_unread(
                "method", settings, names, "with method.replay_share=0: nothing is replayed"
            )
        if settings.pick_by == "random":
            refuse_unread("method", settings, ["pick"], "with method.pick_by=random")

    def stages(self) -> list[Stage]:
        stages = super().stages()
        stages.insert(stages.index(self.score) + 1, self.collect)
        return stages

    # ---- stages

    def draw(self, _: Any, step: Step) -> list[Problem]:
        """Problems of the pool, and as many fresh ones as are missing, in an order that mixes them over the updates of the step."""
        settings, wanted = self.settings, self.config.training.problems_per_step
        uniform = self.random(step, "replay of problems").random
        most = int(settings.replay_share * wanted) if self.mixed else 0
        self.replaying = self.pool.choose(
            most, self.config.rollout.samples, settings.buckets, settings.pool_range, uniform
        )
        problems = [step.data.find(uid) for uid in self.replaying] + step.data.draw(
            wanted - len(self.replaying)
        )
        places = [uniform() for _ in problems]
        return [problems[i] for i in sorted(range(wanted), key=places.__getitem__)]

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        groups, waiting = super().compose(problems, step), set(self.replaying)
        for group in groups:
            if (uid := group.problem.uid) in waiting:
                waiting.remove(uid)  # a problem that is also drawn afresh is replayed once
                group.given.append(self.replay(group.problem, step))
                group.num_samples -= 1
        return groups

    def replay(self, problem: Problem, step: Step) -> Trajectory:
        """One stored row of the problem as a row of its group."""
        settings, uniform = self.settings, self.random(step, f"replay of {problem.uid}").random
        stored = self.pool.pick(problem.uid, settings.pick_by, settings.pick == "max", uniform)
        recorded = stored.logprobs.tolist() if settings.importance else None
        prompt = self.ports.prompts.encode(problem)
        return Trajectory(
            problem.uid,
            prompt,
            stored.tokens.tolist(),
            source=REPLAY,
            finish="given",
            behavior_logprobs=recorded,
        )

    def collect(self, batch: Batch, step: Step) -> Batch:
        """Once mixed, store the successes of problems solved sometimes and retire those solved always; before, see whether to begin."""
        success = batch.rows["reward"] >= self.settings.success_reward
        batch.rows["mixed"] = torch.full(
            (len(batch),), self.mixed
        )  # the loss reads it beside the model
        share = float(success.double().mean())
        step.metrics |= {
            "replay/solved": share,
            "replay/mixed": float(self.mixed),
            "replay/groups": float(len(self.replaying)),
        }
        if self.mixed:
            self.store(batch, success, step)
        self.mixed = self.mixed or share > self.settings.start_at
        step.metrics |= {
            "replay/pool": float(len(self.pool)),
            "replay/rows": float(self.pool.num_experiences),
        }
        return batch

    def store(self, batch: Batch, success: Tensor, step: Step) -> None:
        """By the successes of each row's group: 0 nothing, all of them retired, in between the policy's own ones kept."""
        samples, (_, group) = (
            self.config.rollout.samples,
            batch.rows["group"].unique(return_inverse=True),
        )
        successes = torch.zeros(len(batch), dtype=torch.int64).index_add(0, group, success.long())[
            group
        ]  # (rows,)
        wanted = torch.nonzero(success & (successes < samples) & (batch.rows["source"] == POLICY))[
            :, 0
        ]
        new = batch.select(wanted)
        told = self.ports.policy.logprobs(new, self.view(step.number))
        columns = (new.response.values, told["logprobs"], told["entropy"])
        parts = (Ragged(column, new.response.lengths).split() for column in columns)
        before = self.pool.num_experiences
        for uid, number, tokens, logprobs, entropy in zip(
            new.rows["uid"], successes[wanted].tolist(), *parts, strict=True
        ):
            self.pool.add(
                uid,
                number,
                Experience(tokens.int(), logprobs.clone(), float(entropy.double().mean())),
            )
        step.metrics["replay/stored"] = float(self.pool.num_experiences - before)
        for uid, number in zip(batch.rows["uid"], successes.tolist(), strict=True):
            if number < samples:
                self.pool.note(uid, number)
                continue
            self.pool.drop(uid)
            if (
                step.data.left
                > self.config.training.problems_per_step + self.settings.retire_margin
            ):
                step.data.retire([uid])
        step.metrics["replay/problems_left"] = float(step.data.left)

    # ---- beside the model

    def loss_settings(self, batch: Batch) -> dict[str, float]:
        """The clip is for the warm-up only."""
        return (
            dict.fromkeys(("clip_low", "clip_high", "dual_clip"), math.inf)
            if is_mixed(batch)
            else super().loss_settings(batch)
        )

    def on_shape(self, batch: Batch) -> str:
        return super().on_shape(batch) if is_mixed(batch) else "none"

    # ---- state

    def state(self) -> dict[str, Any]:
        return super().state() | {"mixed": self.mixed, "pool": self.pool.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.mixed = state["mixed"]
        self.pool.load(state["pool"])


def is_mixed(batch: Batch) -> bool:
    return bool(batch.rows["mixed"].any())
