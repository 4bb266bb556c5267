"""The base of methods with thoughts, by a user's method that rewards short thoughts."""

import torch
from method_runs import SMALL, PlainScorer, build_tokenizer
from refused import refused
from tiny_runs import config_of

from postgrad.cluster.host import build_host
from postgrad.data.encode.encoder import Encoder
from postgrad.data.problem_queue import ProblemQueue
from postgrad.data.problems import load_problems
from postgrad.methods.method import Ports, Step
from postgrad.methods.support.thinking import Thinking
from postgrad.types import Batch, Trajectory

THINKING = (
    "method=postgrad.methods.support.thinking:Thinking",
    "method.cot_start='('",
    "method.cot_end=')'",
)


class Short(Thinking):
    """GRPO on the outputs; the thoughts, as far as they are shown, also learn to be short."""

    def enrich(self, batch: Batch, step: Step) -> Batch:
        self.shown_thoughts(batch, self.split_thoughts(batch, step), step, random_share=False)
        return batch

    def score(self, batch: Batch, step: Step) -> Batch:
        batch = super().score(batch, step)
        batch.rows["reward/short"] = -torch.tensor([float(len(text)) for text in batch.rows["cot"]])
        return batch

    def thought_rewards(self) -> dict[str, float]:
        return {"short": 0.5}


def estimated(tiny, responses: list[str], *overrides: str) -> tuple[Batch, PlainScorer]:
    config = config_of("grpo", tiny, *SMALL, *THINKING, "method.normalize_by_std=false", *overrides)
    method, host, prompts = (
        Short(config),
        build_host(config),
        Encoder(build_tokenizer(config), "plain", 64),
    )
    method.check()
    scorer = PlainScorer(lambda text: float(text == "7"))
    method.bind(Ports(host.policy, host.engine, scorer, prompts))
    problem, *_ = problems = load_problems("arithmetic:1")
    step = Step(1, ProblemQueue(problems, shuffle=False))
    rows = [
        Trajectory(problem.uid, prompts.prompt(problem), prompts.encode_response(text), 0, i)
        for i, text in enumerate(responses)
    ]
    return method.estimate(method.score(method.enrich(Batch.of(rows), step), step), step), scorer


def test_outputs_are_judged_and_thoughts_get_a_reward_of_their_own(tiny):
    batch, scorer = estimated(tiny, ["(1)7", "(123)7"])
    assert scorer.asked == ["7", "7"] and batch.rows["reward"].tolist() == [1, 1]
    short, long = batch.tokens["advantages"].split(batch.response.lengths.tolist())
    assert short.tolist() == [0, 0.5, 0, 0, 0], "half of 1, the distance from the mean of -1 and -3"
    assert long.tolist() == [0, -0.5, -0.5, -0.5, 0, 0, 0]


def test_only_what_is_shown_learns_from_it_and_only_the_tokens_that_learn_at_all(tiny):
    batch, _ = estimated(tiny, ["(1)7", "(123)7"], "method.keep=first-1-tokens")
    assert batch.tokens["advantages"].nonzero()[:, 0].tolist() == [1, 6]
    batch, _ = estimated(tiny, ["(1)7", "(123)7"], "method.main_tokens=output_only")
    assert not batch.tokens["advantages"].any() and batch.tokens["loss_mask"].nonzero()[
        :, 0
    ].tolist() == [3, 4, 10, 11]


def test_a_response_without_an_output_is_not_judged(tiny):
    batch, scorer = estimated(tiny, ["(1", "(123)7"], "method.no_output_score=-2")
    assert (
        scorer.asked == ["7"]
        and scorer.token_ids == [batch.response.split()[1].tolist()]
        and batch.rows["reward"].tolist() == [-2, 1]
        and batch.rows["output"] == [None, "7"]
    )
    assert not batch.tokens["cot_mask"][:3].any(), "nobody sees a thought that was never closed"


def test_minimizing_wants_to_know_what_silence_is_worth(tiny):
    with refused("missing", "reward.objective"):
        estimated(tiny, ["(1)7"], "reward.objective=minimize")
