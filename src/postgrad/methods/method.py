"""The base class of methods: the two lists of stages that make a step, on the driver.

    sampling:  draw -> compose -> sample             now, ahead of the update, or as a stream
    learning:  enrich -> score -> estimate -> update -> publish

Each stage takes the result of the stage before and the Step, and returns the batch. A method
replaces stages, or adds to a list. What runs in the model's process is its Objective.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from postgrad.algorithms.aggregation import AGGREGATIONS
from postgrad.config.schema import Config, setting
from postgrad.config.setting import Condition
from postgrad.errors import RunError
from postgrad.methods.objective import Objective as BaseObjective
from postgrad.methods.objective import build_objective
from postgrad.methods.ports import Ports, Role
from postgrad.methods.step import Group, Stage, Step
from postgrad.methods.support.checks import check_method, check_stream
from postgrad.methods.support.responses import (
    SampleRequest,
    add_scores,
    drop_failures,
    policy_texts,
    sample_requests,
    sampled_row,
    score_texts,
)
from postgrad.methods.support.validation import validate
from postgrad.pictures import text_of_content
from postgrad.rollout.engine import Completion, Sampling, make_sampling, trajectory_seed
from postgrad.rollout.episodes import failed_environments, row_problems, turn_metrics
from postgrad.rollout.respond import Answer
from postgrad.types import Batch, Failure, Problem, Score, Trajectory
from postgrad.verifiers.expression import parse_reward

if TYPE_CHECKING:
    from postgrad.data.encode.encoder import EncodedRow, Encoder


@dataclass
class MethodSettings:
    """Settings of every method. A method adds its own in a subclass."""

    name: str = setting(
        "",
        "the method, or your own as package.module:Class or file.py:Class; "
        "method=NAME is short for method.name=NAME",
    )
    objective: str = setting(
        "", "your own objective as package.module:Class or file.py:Class; empty: the method's"
    )
    aggregation: str = setting(
        "token-mean", "how token losses become one number", choices=AGGREGATIONS
    )
    only_with: ClassVar[dict[str, Condition]] = {}  # more conditions, by name (config/check.py)
    _is_frozen: ClassVar[bool] = False

    def freeze(self) -> None:
        """Refuse changes from now on: a run has started, and other processes have their copy."""
        object.__setattr__(self, "_is_frozen", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_frozen:
            raise RunError(
                f"settings.{name} is set, and settings do not change during a run; use an "
                f'attribute of your own, or for the loss a column, such as batch.rows["{name}"]'
            )
        super().__setattr__(name, value)


@dataclass(frozen=True)
class Traits:
    """What a method does with rows. Checks, the loader and the memory estimate read it."""

    samples: bool = True  # the loss reads log-probs of what the engine sampled
    demonstrations: bool = False  # each problem's becomes a row, so all must fit
    given_per_problem: int = 1  # most rows that a problem gives, if the method does not sample
    rows_per_loss: int = 1  # rows of a group that one loss reads jointly
    mixes_rows: bool = False  # a prompt is also read with the responses of other rows
    scores: bool = False  # the trained model gives one score per response
    thoughts: bool = False  # responses split into thought and output; a monitor may read them
    tools: bool = False  # rows may contain tokens that tools wrote
    environments: bool = False  # rows may contain tokens and rewards of an environment
    truncated_sampling: bool = False  # the loss replays what top-p, top-k and min-p kept


@dataclass(frozen=True)
class Supply:
    """How much a run has of what its method cannot do without, such as demonstrations.

    A run with `num` 0 is refused, because it would silently be another method.
    """

    num: int
    line: str  # what the start of a run reports
    fix: str  # what to type if there is none


class Method:
    """One training algorithm. Subclasses set `Settings` and `Objective`, and replace stages."""

    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    Objective: ClassVar[type[BaseObjective]] = BaseObjective
    traits: ClassVar[Traits] = Traits()
    # Parts of the reward, columns `reward/PART`, that the method adds to those of the verifier.
    own_reward_parts: ClassVar[tuple[str, ...]] = ()
    # Metrics to which each refill of a step adds; the others are means over all rows of the step.
    counts: ClassVar[tuple[str, ...]] = ("reward/failures",)
    # Score of a response without an output to score.
    no_output_score: float = 0.0
    ports: Ports

    def __init__(self, config: Config) -> None:
        self.config = config
        self.settings: Any = config.method
        # The model's process builds its own. Here its pure functions are called, such as `view`.
        self.objective: Any = build_objective(config, self.Objective)
        self.answers: dict[str, list[Answer]] = {}  # of the last validation, by pass

    # ---- the stages of a step

    def sampling_stages(self) -> list[Stage]:
        """Return the stages that make a step's rollouts; the last one samples."""
        return [self.draw, self.compose, self.sample]

    def learning_stages(self) -> list[Stage]:
        """Return the stages that learn from them; the last one sends the weights to the engine."""
        return [self.enrich, self.score, self.estimate, self.update, self.publish]

    def draw(self, _: Any, step: Step) -> list[Problem]:
        """Return the problems of this step."""
        return step.data.draw(self.config.training.problems_per_step)

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        """Return the plan of each problem's group."""
        return [Group(problem, self.config.rollout.samples) for problem in problems]

    def sample(self, groups: Sequence[Group], step: Step) -> Batch:
        """Sample responses. The given rows and the sampled rows become one batch."""
        sampling = make_sampling(self.config.rollout)
        sampling = replace(sampling, record_kept=sampling.filters)
        requests = [(group.problem, group.indices, group.prefixes) for group in groups]
        sampled = self.generate(requests, sampling, step.number)
        if self.ports.turns is not None:
            completions = [one for group in sampled for one in group]
            step.metrics |= turn_metrics(completions)
        return self.assemble(groups, sampled)

    def assemble(self, groups: Sequence[Group], sampled: Sequence[Sequence[Completion]]) -> Batch:
        """Return the batch of the groups: per group the given rows, then the sampled ones."""
        rows: list[Trajectory] = []
        for number, (group, completions) in enumerate(zip(groups, sampled, strict=True)):
            for row in group.given_rows:
                row.group = number
                if self.ports.turns is not None:  # as sampled rows, whose turns are recorded
                    row.rows.setdefault("messages", "")
                rows.append(row)
            prompt = self.ports.encoder.prompt(group.problem) if completions else []
            for i, completion in enumerate(completions):
                prefix = group.prefixes[i] if i < len(group.prefixes) else []
                row = sampled_row(group.problem, prompt, prefix, completion)
                row.group = number
                row.index = group.first_index + i
                rows.append(row)
        return Batch.of(rows)

    def enrich(self, batch: Batch, step: Step) -> Batch:
        """Add columns before scoring, such as continuations by other models."""
        return batch

    def score(self, batch: Batch, step: Step) -> Batch:
        """Score each row. Rows that could not be scored are recorded and leave the batch."""
        problems = step.problems(batch)
        batch.rows["text"] = [
            self.ports.encoder.decode(ids.tolist()) for ids in batch.response.split()
        ]
        texts = self.texts_to_score(batch)
        if "environment" not in batch.rows:
            batch.rows["question"] = [
                text_of_content(problem.messages[-1]["content"]) for problem in problems
            ]
            add_scores(batch, self.score_texts(batch, problems, texts, step))
            return self.drop_failures(batch, step)
        failures = batch.rows["environment_failure"]
        scored = [None if failed else text for text, failed in zip(texts, failures, strict=True)]
        problems = row_problems(problems, batch.rows["environment"])
        results = self.score_texts(batch, problems, scored, step)
        add_scores(batch, failed_environments(results, failures))
        return self.drop_failures(batch, step)

    def score_texts(
        self, batch: Batch, problems: Sequence[Problem], texts: Sequence[str | None], step: Step
    ) -> list[Score | Failure]:
        """Return the verifier's result per row; override it for rewards of another kind."""
        return score_texts(self.ports, batch, problems, texts, self.no_output_score)

    def texts_to_score(self, batch: Batch) -> Sequence[str | None]:
        """Return what the policy wrote per row, without tool output; None if there is nothing."""
        return policy_texts(self.ports, batch)

    def drop_failures(self, batch: Batch, step: Step) -> Batch:
        """Return the rows with a score. Raises RunError beyond reward.max_failure_rate."""
        return drop_failures(batch, step, self.config.reward.max_failure_rate)

    def estimate(self, batch: Batch, step: Step) -> Batch:
        """Set the token column `advantages`."""
        return batch

    def update(self, batch: Batch, step: Step) -> Batch:
        """Train the policy. Per-token statistics of its passes become columns of the rollouts."""
        step.metrics.update(self.ports.policy.update(batch, step.number))
        for name, column in self.ports.policy.token_stats().items():
            if name not in batch.tokens:
                batch.tokens[name] = column
        return batch

    def publish(self, batch: Batch, step: Step) -> Batch:
        """Send the new weights to an engine that has its own."""
        self.sync_weights()
        return batch

    def sync_weights(self) -> None:
        """Send the policy's weights to an engine that has a copy of its own."""
        if not self.ports.engine.shares_weights:
            self.ports.engine.publish(self.ports.policy.weights())

    # ---- data and checks

    def encode_row(self, encoder: "Encoder", problem: Problem) -> "EncodedRow":
        """Return the prompt of a problem, and the response if the method learns from given ones."""
        if self.traits.demonstrations:
            return encoder.reply_row(problem)
        return encoder.prompt_row(problem)

    def data_notes(self, encoder: "Encoder", problems: Sequence[Problem]) -> list[str]:
        """Return lines about the training data that a run reports at its start."""
        return []

    def supply(self, encoder: "Encoder", problems: Sequence[Problem]) -> Supply | None:
        """Return what the run has of what this method needs besides problems; None: nothing."""
        return None

    def check(self) -> None:
        """Raise ConfigError for settings that cannot work, before anything is written."""
        check_method(self)
        check_stream(self, Method)
        self.objective.check()

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise ConfigError for training data that this method cannot use."""

    def check_validation_problems(self, problems: Sequence[Problem]) -> None:
        """Raise ConfigError for validation data that this method cannot use."""

    # ---- models

    def roles(self) -> dict[str, Role]:
        """Return the models that the method needs besides the policy, by name."""
        return {}

    def all_roles(self) -> dict[str, Role]:
        """Return the method's roles, and the models that the reward settings name."""
        roles = self.roles()
        judge = self.config.reward.judge
        reward = parse_reward(self.config.reward.verifier)
        if self.needs_verifier():
            roles |= {term.role: Role("scores", term.model_path) for term in reward.models}
        if self.needs_verifier() and reward.asks_judge:
            roles["judge"] = Role("chat", judge.model)
        if judge.monitor:
            roles["monitor"] = Role("chat", judge.monitor)
        return roles

    def needs_verifier(self) -> bool:
        """Return whether this run scores responses."""
        return True

    def scores_training_rows(self) -> bool:
        """Return whether steps score responses to data.train; otherwise only validations do."""
        return self.needs_verifier()

    def keeps_token_ids(self) -> bool:
        """Return whether the token ids of what is scored are known, as rewards of TRL ask."""
        return True

    def reward_parts(self) -> dict[str, str]:
        """Return the parts of the verifier's score that the method reads, by their settings.

        A run is refused if a built-in verifier reports no such part.
        """
        return {}

    def bind(self, ports: Ports) -> None:
        """Give the method its models and services."""
        self.ports = ports

    def saved_models(self) -> list[Any]:
        """Return the models that a checkpoint holds: policy and critics."""
        names = [name for name, role in self.roles().items() if role.kind == "critic"]
        return [self.ports.policy, *(self.ports.models[name] for name in names)]

    # ---- validation and state

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Return the accuracy on held-out problems, by the passes of training.validation_*.

        Keeps the answers of each pass in `self.answers`.
        """
        self.answers, metrics = validate(self.ports, self.config, problems)
        return metrics

    def state(self) -> dict[str, Any]:
        """Return what the method keeps between steps; a checkpoint holds it."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the result of state()."""

    # ---- helpers

    def generate(
        self, requests: Sequence[SampleRequest], sampling: Sampling, step: int
    ) -> list[list[Completion]]:
        """Return completions per request: problem, indices of its samples, first prefixes."""
        return sample_requests(self.ports, requests, sampling, self.config.seed, step)

    def rng(self, step: Step, purpose: str, index: int = 0) -> Random:
        """Return a generator seeded by run, step, purpose and index, so resumed runs agree."""
        return Random(trajectory_seed(self.config.seed, step.number, purpose, index))
