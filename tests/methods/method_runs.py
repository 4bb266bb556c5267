"""Helpers of the tests of methods: toy runs, methods with local models, a plain scorer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_runs import config_of, metrics_of, toy_run
from torch import Tensor

from postgrad.cluster.host import build_host
from postgrad.config.compose import recipe_names
from postgrad.config.schema import Config
from postgrad.data.encode.encoder import Encoder
from postgrad.data.problem_queue import ProblemQueue
from postgrad.data.problems import load_problems
from postgrad.methods import find_method
from postgrad.methods.method import Method, Ports, Step
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import Batch, Failure, Problem, Score

RECIPES = [name for name in recipe_names() if not name.startswith("demo_")]
# Recipes that train on pairs of the data, or on one response per row.
PAIR_RECIPES = ("dpo", "dpo_norm", "dpo_sft", "ipo", "orpo", "simpo", "cs336_dpo")
SFT_RECIPES = ("sft", "dft", "cs336_sft", "cs336_sft_2048", "cs336_sft_4096", "cs336_instruct")
GIVEN_RECIPES = (*PAIR_RECIPES, "kto", "reward_model", *SFT_RECIPES)
# Recipes that differ from another one only in their sizes are composed, not run.
SIZES_ONLY = [*(name for name in RECIPES if name.endswith("_small")), "classmate_maths"]
# Recipes that need a teacher and no reward.
DISTILL_RECIPES = ("distill", "gkd")
NOT_SAMPLING = (*GIVEN_RECIPES, *DISTILL_RECIPES, *SIZES_ONLY)
SAMPLING_RECIPES = [name for name in RECIPES if name not in NOT_SAMPLING]
LIMIT = 6  # rollout.max_response_tokens

SMALL = toy_run(response_tokens=LIMIT)


VERIFIERS = '''
def graded(response, problem):
    """Many values, so that every group has something to compare, and the parts that gdpo weighs."""
    answer = sum(map(ord, response)) % 11 / 10
    return {"score": answer, "answer": answer, "format": len(response) % 3 / 2}


def sevens(response, problem):
    return response.count("7") / 6


def has_seven(response, problem):
    return float("7" in response)


def noise(response, problem):
    """Rewards of the size of `sevens` that cannot be learned: a hash of response and problem."""
    import hashlib

    value = hashlib.blake2b(f"{response}/{problem.uid}".encode(), digest_size=1).digest()[0] % 7 / 6
    return {"score": value, "sevens": sevens(response, problem)}
'''


NO_MARKERS = ["method.cot_start=''", "method.cot_end=''"]
WORDS = {
    "dapo": ["method.overlong_buffer=3"],
    "verl_dapo": ["method.overlong_buffer=3", "training.updates_per_step=2"],
    "cs336_grpo": ["data.prompt_style=own"],
    "cs336_no_baseline": ["data.prompt_style=own"],
    "classmate_gdpo": NO_MARKERS,
    "classmate_baseline": NO_MARKERS,
    "classmate_warmup": NO_MARKERS,
    "distill": ["method.teacher=tiny"],
    "gkd": ["method.teacher=tiny"],
    "classmate_think": [
        "method.cot_start=''",
        "method.cot_end=''",
    ],  # the tiny model has no letters to write markers with
    "classmate_sycophancy": ["method.cot_start=''", "method.cot_end=''"],
}


def overrides_for(recipe: str) -> list[str]:
    """Settings that a recipe needs for six response tokens, two steps and a model of two blocks."""
    if recipe.startswith("bupo"):
        phase_one = (
            []
            if recipe in ("bupo_grpo", "bupo_layerwise_lr", "bupo_frozen_below")
            else ["method.phase_one_steps=1"]
        )
        return ["method.num_blocks=1", *phase_one]
    return WORDS.get(recipe, [])


def run(recipe: str, model: Path, runs: Path, *overrides: str) -> list[dict[str, Any]]:
    """A whole run through the driver; the metrics of its steps."""
    config = config_of(recipe, model, *SMALL, *overrides_for(recipe), f"runs={runs}", *overrides)
    return metrics_of(train(config, Reporter()).folder)


@dataclass
class PlainScorer:
    """A scorer without processes.

    `value` maps a response to its score, or to None for a failure. All responses to the problems
    of `flat` get the same score.
    """

    value: Callable[[str], float | None]
    flat: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)

    def score(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        token_ids: Callable[[], list[list[int]]] | None = None,
    ) -> list[Score | Failure]:
        self.asked += responses
        self.token_ids += token_ids() if token_ids else []
        values = [
            0.25 if p.uid in self.flat else self.value(r)
            for p, r in zip(problems, responses, strict=True)
        ]
        return [
            Failure("test", "refused") if v is None else Score(v, {"answer": v, "format": 1 - v})
            for v in values
        ]


def spread_out(response: str) -> float:
    return sum(map(ord, response)) % 11 / 10


class Bound:
    """A method with its models in this process, or with the models of `placed`."""

    def __init__(
        self, config: Config, value: Callable[[str], float | None] = spread_out, placed: Any = None
    ) -> None:
        self.config = config
        self.method: Method = find_method(config.method.name)(config)
        self.method.check()
        self.host = placed or build_host(config)
        self.scorer = PlainScorer(value)
        tokenizer = build_tokenizer(config)
        self.prompts = Encoder(tokenizer, "plain", 64, "error")
        self.method.bind(
            Ports(self.host.policy, self.host.engine, self.scorer, self.prompts, self.host.models)
        )
        self.problems = load_problems(config.data.train)
        self.problem_queue = ProblemQueue(self.problems, shuffle=False)
        self.step_done = Step(0)

    def stages(self) -> list[str]:
        return [
            stage.__name__
            for stage in [*self.method.sampling_stages(), *self.method.learning_stages()]
        ]

    def until(self, last: str = "publish", number: int = 1) -> Batch:
        """The stages of one step up to and including `last`."""
        step = self.step_done = Step(number, self.problem_queue)
        work: Any = None
        for stage in [*self.method.sampling_stages(), *self.method.learning_stages()]:
            work = stage(work, step)
            if stage.__name__ == last:
                break
        return work

    @property
    def metrics(self) -> dict[str, float]:
        return self.step_done.metrics


def build_tokenizer(config: Config) -> Any:
    from postgrad.model.load.load import load_tokenizer

    return load_tokenizer(config.model, config.seed)


def bound(
    recipe: str, model: Path, *overrides: str, value: Callable[[str], float | None] = spread_out
) -> Bound:
    return Bound(config_of(recipe, model, *SMALL, *overrides_for(recipe), *overrides), value)


def flat_weights(policy: Any) -> Tensor:
    return torch.cat([w.flatten().clone() for w in policy.weights().values()])
