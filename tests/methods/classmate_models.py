"""Models and batches of the tests of Classmate-CoT."""

import dataclasses

from fake_engine import FakeEngine
from method_runs import PlainScorer, build_tokenizer

from postgrad.cluster.host import build_host
from postgrad.config.schema import Config
from postgrad.data.encode.encoder import Encoder
from postgrad.data.problem_queue import ProblemQueue
from postgrad.data.problems import load_problems
from postgrad.methods import find_method
from postgrad.methods.method import Ports, Step
from postgrad.rollout.generator import Generator
from postgrad.types import Batch, Trajectory

END = 17


class Setting:
    """A method whose policy says scripted responses and whose classmates are fakes."""

    def __init__(
        self,
        config: Config,
        responses: list[str],
        reply=lambda prompt, seed: [7, END],
        value=lambda text: float(len(text)),
    ):
        self.config, self.method = config, find_method("classmate")(config)
        self.method.check()
        self.prompts = Encoder(build_tokenizer(config), "plain", 64)
        self.engines = [FakeEngine(reply) for _ in config.method.classmates]
        models = {
            f"classmate-{k}": Generator(engine, self.prompts, 512)
            for k, engine in enumerate(self.engines, 1)
        }
        self.scorer = PlainScorer(value)
        self.host = build_host(
            dataclasses.replace(
                config, method=dataclasses.replace(config.method, condition="no_classmate")
            )
        )
        self.method.bind(
            Ports(self.host.policy, self.host.engine, self.scorer, self.prompts, models)
        )
        self.problems = load_problems("arithmetic:1")
        self.step = Step(1, ProblemQueue(self.problems, shuffle=False))
        per_group = len(responses) // 2
        rows = []
        for i, text in enumerate(responses):
            problem, tokens = self.problems[i // per_group], self.prompts.encode_response(text)
            rows.append(
                Trajectory(
                    problem.uid,
                    self.prompts.prompt(problem),
                    tokens,
                    i // per_group,
                    i % per_group,
                    finish="stop",
                )
            )
        self.batch = Batch.of(rows)

    def until_estimate(self) -> Batch:
        batch = self.method.score(self.method.enrich(self.batch, self.step), self.step)
        return self.method.estimate(batch, self.step)

    def asked(self, k: int = 0) -> list[str]:
        return [self.prompts.decode(request.prompt) for request in self.engines[k].requests]


FOUR = ["(12)34", "(56)7", "(89", "1)2"]  # closed, closed, never closed, opened by nobody
