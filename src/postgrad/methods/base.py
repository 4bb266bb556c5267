"""The stages that methods share. A method is a subclass that replaces or inserts some of them.

On the driver run the stages: draw, compose, sample, enrich, score, estimate, update, publish; each takes what the stage before
returned, and the step. Beside the model run view, prepare and loss: they may use only the configuration, because a worker elsewhere
builds the same method from the same configuration.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from postgrad.algorithms.aggregation import AGGREGATIONS, token_weights
from postgrad.config.schema import Config, setting
from postgrad.data.feed import Feed
from postgrad.errors import RunError
from postgrad.methods.support.checks import (
    check_monitor,
    check_numbers,
    check_read,
    check_sampling,
    check_staleness,
    check_tools,
)
from postgrad.model.critic import Critic
from postgrad.model.passes.head import TokenOutputs
from postgrad.model.policy import MetricAccumulator, Policy
from postgrad.model.views import FULL, View
from postgrad.rollout.engine import (
    Completion,
    Engine,
    Request,
    Sampling,
    sampling_of,
    trajectory_seed,
)
from postgrad.rollout.generator import Chat as Chat
from postgrad.rollout.generator import Generator as Generator
from postgrad.rollout.respond import Prompts, Scorer, respond
from postgrad.rollout.turns import Turns, run_turns
from postgrad.types import DEMONSTRATION, POLICY, TOOL, Batch, Failure, Problem, Score, Trajectory
from postgrad.verifiers.scorer import LLM_JUDGE

LIVE = "policy:live"  # the path of a role that is the run's own engine


@dataclass(frozen=True)
class Role:
    """A model a method wants beside the policy.

    `kind`: frozen answers with log-probs and never learns; critic is trained on values; engine continues prompts (its port is a
    Speaker); chat answers messages (its port is a Chat). `path` is what model.path is for the policy, which is also where an empty one
    starts from. An engine or a chat may also be `policy:live`, the very engine that samples this run's rollouts, a server's model
    (`http://host:8000/v1#model`), one of a mapping file (`servers.json#model`), or `fake:TEXT`, which always says TEXT. `lr` is a critic's.
    """

    kind: str
    path: str = ""
    lr: float = 0.0


@dataclass
class Ports:
    """Everything a method may talk to. It cannot tell where any of it lives. `models` are the roles it asked for, by name."""

    policy: Policy
    engine: Engine
    scorer: Scorer
    prompts: Prompts
    models: dict[str, Any] = field(default_factory=dict)
    turns: Turns | None = None  # where the policy may call tools

    @property
    def reference(self) -> Policy:
        return self.models["reference"]

    @property
    def critic(self) -> Critic:
        return self.models["critic"]


@dataclass
class Step:
    """One step of a run: its number (from 1), the data it draws from, the metrics it collects, the rows it had to leave out."""

    number: int
    data: Feed = None  # type: ignore[assignment]  # there in every step of a run
    metrics: dict[str, float] = field(default_factory=dict)
    failed: list[Batch] = field(default_factory=list)

    def problems(self, batch: Batch) -> list[Problem]:
        """The problem of each row."""
        return [self.data.find(uid) for uid in batch.rows["uid"]]


@dataclass
class Group:
    """What one problem's group will hold: rows given from outside, and how many to sample.

    `starts` are the first tokens of the first sampled rows, written by somebody else; the engine goes on from there.
    """

    problem: Problem
    num_samples: int
    given: list[Trajectory] = field(default_factory=list)
    starts: list[list[int]] = field(default_factory=list)


@dataclass
class MethodSettings:
    """Settings every method has. A method's own stand in its file, in a subclass of this."""

    name: str = setting(
        "", "the method, or your own as package.module:Class; method=NAME is short for it"
    )
    aggregation: str = setting(
        "token-mean", "how token losses become one number", choices=AGGREGATIONS
    )


Stage = Callable[[Any, Step], Any]


class Method:
    """One algorithm. Subclasses set `Settings` and replace stages."""

    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    trains_on_samples: ClassVar[bool] = True  # the loss prices what the engine sampled
    learns_demonstrations: ClassVar[bool] = (
        False  # every problem's demonstration is a row, so it must fit
    )
    has_thoughts: ClassVar[bool] = (
        False  # responses are cut into thought and output, so a monitor can read the thoughts
    )
    takes_tools: ClassVar[bool] = False  # its loss and its rows bear tokens that tools wrote
    no_output_score: float = 0.0  # score of a response in which there is nothing to judge
    ports: Ports

    def __init__(self, config: Config) -> None:
        self.config = config
        self.settings: Any = config.method

    def check(self) -> None:
        """Refuse settings that cannot work, before anything is written."""
        check_sampling(self)
        check_monitor(self)
        self.check_used()
        check_tools(self)
        check_staleness(self)
        check_numbers(self.config)

    def check_used(self) -> None:
        """Refuse settings that nothing would read beside the others: who writes one believes that it works."""
        check_read(self.config)

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Refuse data this method cannot learn from, before anything is written."""

    def check_held_out(self, problems: Sequence[Problem]) -> None:
        """Refuse data this method cannot be validated on, before anything is written."""

    def check_model(self, model: Any) -> None:
        """Refuse a model this method cannot train, once it is loaded and before anything is written."""

    def roles(self) -> dict[str, Role]:
        """Models beside the policy, by name."""
        return {}

    def models_wanted(self) -> dict[str, Role]:
        """The method's roles, and those that the reward asks for whatever the method."""
        judge = self.config.reward.judge
        wanted = (
            {"judge": judge.model}
            if self.config.reward.verifier == LLM_JUDGE and self.judges()
            else {}
        )
        wanted |= {"monitor": judge.monitor} if judge.monitor else {}
        return self.roles() | {name: Role("chat", path) for name, path in wanted.items()}

    def judges(self) -> bool:
        """Whether this run needs a verifier for its problems."""
        return True

    def bind(self, ports: Ports) -> None:
        self.ports = ports

    # ---- on the driver: the stages of a step

    def stages(self) -> list[Stage]:
        return [
            self.draw,
            self.compose,
            self.sample,
            self.enrich,
            self.score,
            self.estimate,
            self.update,
            self.publish,
        ]

    def draw(self, _: Any, step: Step) -> list[Problem]:
        """Take this step's problems from the data."""
        return step.data.draw(self.config.training.problems_per_step)

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        """What each problem's group will hold."""
        return [Group(problem, self.config.rollout.samples) for problem in problems]

    def sample(self, groups: Sequence[Group], step: Step) -> Batch:
        """Let the engine continue the prompts; given rows and sampled rows become one table."""
        sampling = sampling_of(self.config.rollout)
        sampled = self.generate(
            [(g.problem, range(g.num_samples), g.starts) for g in groups], sampling, step.number
        )
        if self.ports.turns is not None:
            done = [completion for completions in sampled for completion in completions]
            for name in ("turns", "calls", "errors"):
                step.metrics[f"tools/{name}"] = sum(getattr(one, name) for one in done) / max(
                    1, len(done)
                )
        return self.assemble(groups, sampled)

    def assemble(self, groups: Sequence[Group], sampled: Sequence[Sequence[Completion]]) -> Batch:
        """The table of the groups: given rows, then the sampled ones."""
        trajectories: list[Trajectory] = []
        for number, (group, completions) in enumerate(zip(groups, sampled, strict=True)):
            for trajectory in group.given:
                trajectory.group = number
                trajectories.append(trajectory)
            prompt = self.ports.prompts.encode(group.problem)
            for index, done in enumerate(completions):
                start = group.starts[index] if index < len(group.starts) else []
                written = [True] * len(done.tokens) if done.written is None else done.written
                trajectories.append(
                    Trajectory(
                        group.problem.uid,
                        prompt,
                        [*start, *done.tokens],
                        number,
                        index,
                        POLICY,
                        done.finish,
                        behavior_logprobs=[*[0.0] * len(start), *done.logprobs],
                        loss_mask=None if all(written) else [*[True] * len(start), *written],
                        token_source=[
                            *[DEMONSTRATION] * len(start),
                            *[POLICY if own else TOOL for own in written],
                        ],
                    )
                )
        return Batch.of(trajectories)

    def enrich(self, batch: Batch, step: Step) -> Batch:
        """Add columns before scoring: what other models or tools make of the rows."""
        return batch

    def score(self, batch: Batch, step: Step) -> Batch:
        """Score every row. Rows that could not be scored are recorded and leave the batch."""
        problems = step.problems(batch)
        batch.rows["text"] = [
            self.ports.prompts.decode(ids.tolist()) for ids in batch.response.split()
        ]
        batch.rows["question"] = [problem.messages[-1]["content"] for problem in problems]
        verdicts = self.verdicts(problems, self.judged_texts(batch))
        batch.rows["failure"] = [
            f"{v.kind}: {v.reason}" if isinstance(v, Failure) else "" for v in verdicts
        ]
        batch.rows["reward"] = torch.tensor(
            [v.value if isinstance(v, Score) else float("nan") for v in verdicts]
        )
        parts = sorted({name for v in verdicts if isinstance(v, Score) for name in v.parts})
        for name in parts:
            values = [
                v.parts.get(name, float("nan")) if isinstance(v, Score) else float("nan")
                for v in verdicts
            ]
            batch.rows[f"reward/{name}"] = torch.tensor(values)
        return self.leave_out_failures(batch, step)

    def judged_texts(self, batch: Batch) -> Sequence[str | None]:
        """What of each response the verifier sees, all that the policy wrote; None where there is nothing to judge."""
        own = batch.tokens["token_source"] != TOOL
        if bool(own.all()):
            return batch.rows["text"]
        rows = zip(batch.response.split(), own.split(batch.response.lengths.tolist()), strict=True)
        return [self.ports.prompts.decode(ids[keep].tolist()) for ids, keep in rows]

    def verdicts(
        self, problems: Sequence[Problem], texts: Sequence[str | None]
    ) -> list[Score | Failure]:
        """The verifier's word on each text; `self.no_output_score` where there is none."""
        there = [(i, text) for i, text in enumerate(texts) if text is not None]
        judged = self.ports.scorer.score(
            [problems[i] for i, _ in there], [text for _, text in there]
        )
        found = {i: verdict for (i, _), verdict in zip(there, judged, strict=True)}
        return [found.get(i, Score(self.no_output_score)) for i in range(len(texts))]

    def leave_out_failures(self, batch: Batch, step: Step) -> Batch:
        """The rows without a `failure`; the others are recorded in the step and counted. Too many of them end the run."""
        bad = torch.tensor([bool(reason) for reason in batch.rows["failure"]])
        step.metrics["reward/failures"] = step.metrics.get("reward/failures", 0.0) + float(
            bad.sum()
        )
        share = float(bad.float().mean()) if len(bad) else 0.0
        limit = self.config.reward.max_failure_rate
        if share > limit or (len(bad) and bool(bad.all())):
            example = next(reason for reason in batch.rows["failure"] if reason)
            raise RunError(
                f"{share:.0%} of the responses could not be judged (reward.max_failure_rate={limit:g}); the first: {example}"
            )
        if bool(bad.any()):
            step.failed.append(batch.select(torch.nonzero(bad)[:, 0]))
            batch = batch.select(torch.nonzero(~bad)[:, 0])
        return batch

    def estimate(self, batch: Batch, step: Step) -> Batch:
        """Set the token column `advantages`."""
        return batch

    def update(self, batch: Batch, step: Step) -> Batch:
        """Train beside the model. What its passes saw of the tokens goes into the rollouts; nobody computes it for that alone."""
        step.metrics.update(self.ports.policy.update(batch, step.number))
        for name, column in self.ports.policy.token_stats().items():
            if name not in batch.tokens:
                batch.tokens[name] = column
        return batch

    def publish(self, batch: Batch, step: Step) -> Batch:
        """Hand the new weights to engines that keep their own."""
        self.sync_weights()
        return batch

    def sync_weights(self) -> None:
        if not self.ports.engine.shares_weights:
            self.ports.engine.publish(self.ports.policy.weights())

    # ---- beside the model

    def view(self, step: int) -> View:
        """Which policy the log-probs mean at this step."""
        return FULL

    def prepare(self, batch: Batch) -> Batch:
        """See one optimizer step's whole batch once: set `loss_weight` by global counts, leave out rows that cannot matter."""
        batch.tokens["loss_weight"] = token_weights(
            self.settings.aggregation,
            batch.tokens["loss_mask"],
            batch.row_index,
            len(batch),
            self.config.rollout.max_response_tokens,
        )
        return batch

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]:
        """Shares of the learning rate, by parameter name; 1 for those not named."""
        return {}

    def row_groups(self, batch: Batch) -> Sequence[int] | None:
        """Units of rows that one loss reads together; None when every row stands alone."""
        return None

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        """The weighted sum over a micro-batch's tokens. Additive: any split of the rows gives the same total."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    # ---- shared helpers

    def generate(
        self,
        wanted: Sequence[tuple[Problem, Sequence[int], Sequence[list[int]]]],
        sampling: Sampling,
        step: int,
    ) -> list[list[Completion]]:
        """Completions of (problem, indices, starts of the first of them); each index of a problem has its own seed.

        A problem that is wanted twice, as at the turn of an epoch, is another group with other seeds.
        """
        requests: list[Request] = []
        owners: list[int] = []
        times: Counter[str] = Counter()
        for owner, (problem, indices, starts) in enumerate(wanted):
            name = f"{problem.uid}#{times[problem.uid]}" if times[problem.uid] else problem.uid
            times[problem.uid] += 1
            prompt = self.ports.prompts.encode(problem)
            seeds = [trajectory_seed(self.config.seed, step, name, i) for i in indices]
            for start, seed in zip(starts, seeds, strict=False):
                requests.append(
                    Request([*prompt, *start], [seed], sampling.max_new_tokens - len(start))
                )
                owners.append(owner)
            if len(seeds) > len(starts):
                requests.append(Request(prompt, seeds[len(starts) :]))
                owners.append(owner)
        out: list[list[Completion]] = [[] for _ in wanted]
        problems = [wanted[owner][0] for owner in owners]
        found = run_turns(self.ports.engine, requests, problems, sampling, self.ports.turns)
        for owner, completions in zip(owners, found, strict=True):
            out[owner] += completions
        return out

    def random(self, step: Step, use: str, index: int = 0) -> Random:
        """Numbers that follow from run, step, use and index alone, so that a resumed run draws the same."""
        return Random(trajectory_seed(self.config.seed, step.number, use, index))

    def demonstration(self, problem: Problem, number: int = 0) -> Trajectory:
        """A problem's demonstration as a row of the group."""
        tokens = self.ports.prompts.encode_demonstrations(problem)[number]
        limit = self.config.rollout.max_response_tokens
        if len(tokens) > limit:
            raise RunError(
                f"the demonstration of problem {problem.uid} has {len(tokens)} tokens; raise rollout.max_response_tokens (now {limit})"
            )
        return Trajectory(
            problem.uid,
            self.ports.prompts.encode(problem),
            tokens,
            source=DEMONSTRATION,
            finish="given",
        )

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Accuracy on held-out problems: greedy, and of one sample at the rollout temperature."""
        rollout = self.config.rollout
        out: dict[str, float] = {}
        for name, temperature in (("accuracy", 0.0), ("sampled_accuracy", rollout.temperature)):
            sampling = sampling_of(rollout, temperature)
            ports = self.ports
            answers = respond(
                ports.engine,
                ports.scorer,
                ports.prompts,
                problems,
                sampling,
                1,
                self.config.seed,
                ports.turns,
            )
            out[f"validation/{name}"] = sum(answer.score for answer in answers) / len(answers)
            if failures := sum(
                isinstance(answer.verdict, Failure) for answer in answers
            ):  # they count 0 above
                out["validation/failures"] = out.get("validation/failures", 0.0) + failures
        return out

    def trained(self) -> list[Any]:
        """The models a checkpoint holds: the policy, and every role that learns."""
        return [
            self.ports.policy,
            *(
                self.ports.models[name]
                for name, role in self.roles().items()
                if role.kind == "critic"
            ),
        ]

    def state(self) -> dict[str, Any]:
        """What the method remembers between steps; goes into the checkpoint."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from state()."""
