"""The base class of methods: the stages of a step, and what runs beside the model.

A method is a subclass of Method that replaces or inserts stages. These run on the driver, in order:
draw, compose, sample, enrich, score, estimate, update, publish. Each takes the result of the stage
before and the Step.

These run beside the model: view, prepare, row_groups, target_ids, loss, lr_scales. They may use
the configuration only, because a worker on another machine builds the same method from the same
configuration.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from postgrad.algorithms.aggregation import AGGREGATIONS, token_weights
from postgrad.config.schema import Config, setting
from postgrad.data.overlong import RowEncoder
from postgrad.errors import ConfigError
from postgrad.methods.ports import SAVED_KINDS, Ports, Role
from postgrad.methods.step import Group, Stage, Step
from postgrad.methods.support.checks import (
    check_agent,
    check_memory_saving,
    check_monitor,
    check_numbers,
    check_sampling,
    check_stages,
    check_staleness,
    check_state,
    check_stream,
    check_tools,
    check_unread,
)
from postgrad.methods.support.sampling import SampleRequest, sample_requests, sampled_row
from postgrad.methods.support.scoring import (
    add_scores,
    drop_failures,
    policy_texts,
    score_texts,
)
from postgrad.methods.support.synced_roles import sync_copies
from postgrad.methods.support.user_class import check_attributes
from postgrad.methods.support.validation import check_validation, mean_score, validation_passes
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import FULL, TokenOutputs, View
from postgrad.rollout.engine import Completion, Sampling, make_sampling, trajectory_seed
from postgrad.rollout.episodes import failed_environments, row_problems, turn_metrics
from postgrad.rollout.respond import Answer, respond
from postgrad.types import Batch, Failure, Problem, Score, Trajectory
from postgrad.verifiers.model_terms import asks_judge, model_terms
from postgrad.verifiers.trl_rewards import COMPLETION_IDS, TRAINER_STATE

if TYPE_CHECKING:
    from postgrad.data.render import Prompts as PromptEncoder


@dataclass
class MethodSettings:
    """Settings of every method. A method adds its own in a subclass."""

    name: str = setting(
        "",
        "the method, or your own as package.module:Class or file.py:Class; "
        "method=NAME is short for method.name=NAME",
    )
    aggregation: str = setting(
        "token-mean", "how token losses become one number", choices=AGGREGATIONS
    )


@dataclass(frozen=True)
class Supply:
    """How much a run has of what its method cannot do without, such as demonstrations.

    A run with `num` 0 is refused, because it would silently be another method.
    """

    num: int
    line: str  # what the start of a run reports
    fix: str  # what to type if there is none


class Method:
    """One training algorithm. Subclasses set `Settings` and replace stages."""

    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    # The loss uses log-probs of what the engine sampled.
    trains_on_samples: ClassVar[bool] = True
    # Rows of a group that one loss reads jointly; a pass holds all of them.
    rows_per_loss: ClassVar[int] = 1
    # Rows that one problem of the data gives, at most, if the method does not train on samples.
    given_per_problem: ClassVar[int] = 1
    # Every problem's demonstration becomes a row, so each must fit into max_response_tokens.
    trains_on_demonstrations: ClassVar[bool] = False
    # A prompt is also read with the responses of other rows.
    mixes_rows: ClassVar[bool] = False
    # The trained model gives one score per response instead of log-probs.
    trains_scores: ClassVar[bool] = False
    # Responses are split into thought and output, so that a monitor can read the thoughts.
    has_thoughts: ClassVar[bool] = False
    # Rows may contain tokens that tools wrote.
    supports_tools: ClassVar[bool] = False
    # Rows may contain tokens that an environment wrote, and all rows may have its reward.
    supports_environments: ClassVar[bool] = False
    # The loss replays what top-p, top-k and min-p kept; other methods refuse these settings.
    supports_truncated_sampling: ClassVar[bool] = False
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
        self.answers: dict[str, list[Answer]] = {}  # of the last validation, by pass

    def row_encoder(self, prompts: "PromptEncoder") -> RowEncoder:
        """What encodes the prompts of this method's rows; SFT encodes whole conversations."""
        return prompts

    def data_notes(self, prompts: "PromptEncoder", problems: Sequence[Problem]) -> list[str]:
        """Lines about the training data that a run reports at its start."""
        return []

    def supply(self, prompts: "PromptEncoder", problems: Sequence[Problem]) -> Supply | None:
        """What the run has of what this method needs besides problems; None if it needs nothing."""
        return None

    # ---- checks; all raise ConfigError, before anything is written

    def check(self) -> None:
        """Refuses settings that cannot work."""
        check_sampling(self)
        check_monitor(self)
        self.check_unread()
        check_tools(self)
        check_agent(self)
        check_staleness(self)
        check_stream(self, Method)
        check_stages(self)
        check_state(self)
        check_attributes(self)
        check_numbers(self.config)
        check_memory_saving(self.config)
        check_validation(self.config)

    def check_unread(self) -> None:
        """Refuses settings that have no effect with the others."""
        check_unread(self.config)

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Refuses training data that this method cannot use."""

    def check_validation_problems(self, problems: Sequence[Problem]) -> None:
        """Refuses validation data that this method cannot use."""

    def check_model(self, model: Any) -> None:
        """Refuses a model that this method cannot train. Called once the model is loaded."""

    # ---- models

    def roles(self) -> dict[str, Role]:
        """Models that the method needs besides the policy, by name."""
        return {}

    def all_roles(self) -> dict[str, Role]:
        """The method's roles, and the models that the reward settings name."""
        roles = self.roles()
        if self.needs_verifier():
            for term in model_terms(self.config.reward.verifier):
                roles[term.role] = Role("scores", term.path)
        judge = self.config.reward.judge
        if asks_judge(self.config.reward.verifier) and self.needs_verifier():
            roles["judge"] = Role("chat", judge.model)
        if judge.monitor:
            roles["monitor"] = Role("chat", judge.monitor)
        return roles

    def needs_verifier(self) -> bool:
        """Whether this run scores responses."""
        return True

    def scores_training_rows(self) -> bool:
        """Whether steps score responses to data.train; otherwise only validations do."""
        return self.needs_verifier()

    def reward_arguments(self) -> tuple[str, ...]:
        """What reward functions of TRL may take besides texts and columns."""
        return (COMPLETION_IDS, TRAINER_STATE)

    def reward_parts(self) -> dict[str, str]:
        """The parts of the verifier's score that the method reads, by the setting that names them.

        A run is refused if a built-in verifier reports no such part.
        """
        return {}

    def bind(self, ports: Ports) -> None:
        """Gives the method its models and services."""
        self.ports = ports

    def saved_models(self) -> list[Any]:
        """The models that a checkpoint holds: the policy, critics, and copies of the policy."""
        names = [name for name, role in self.roles().items() if role.kind in SAVED_KINDS]
        return [self.ports.policy, *(self.ports.models[name] for name in names)]

    # ---- the stages of a step, on the driver

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
        """The problems of this step."""
        return step.data.draw(self.config.training.problems_per_step)

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        """The plan of each problem's group."""
        return [Group(problem, self.config.rollout.samples) for problem in problems]

    def sample(self, groups: Sequence[Group], step: Step) -> Batch:
        """Samples responses. The given rows and the sampled rows become one batch."""
        sampling = make_sampling(self.config.rollout)
        sampling = replace(sampling, record_kept=sampling.filters)
        requests = [(group.problem, group.indices, group.prefixes) for group in groups]
        sampled = self.generate(requests, sampling, step.number)
        if self.ports.turns is not None:
            completions = [one for group in sampled for one in group]
            step.metrics |= turn_metrics(completions)
        return self.assemble(groups, sampled)

    def assemble(self, groups: Sequence[Group], sampled: Sequence[Sequence[Completion]]) -> Batch:
        """The batch of the groups: per group the given rows, then the sampled ones."""
        rows: list[Trajectory] = []
        for number, (group, completions) in enumerate(zip(groups, sampled, strict=True)):
            for row in group.given_rows:
                row.group = number
                if self.ports.turns is not None:  # as sampled rows, whose turns are recorded
                    row.rows.setdefault("messages", "")
                rows.append(row)
            prompt = self.ports.prompts.encode(group.problem) if completions else []
            for i, completion in enumerate(completions):
                prefix = group.prefixes[i] if i < len(group.prefixes) else []
                row = sampled_row(group.problem, prompt, prefix, completion)
                row.group = number
                row.index = group.first_index + i
                rows.append(row)
        return Batch.of(rows)

    def enrich(self, batch: Batch, step: Step) -> Batch:
        """Adds columns before scoring, such as continuations by other models."""
        return batch

    def score(self, batch: Batch, step: Step) -> Batch:
        """Scores every row. Rows that could not be scored are recorded and leave the batch."""
        problems = step.problems(batch)
        batch.rows["text"] = [
            self.ports.prompts.decode(ids.tolist()) for ids in batch.response.split()
        ]
        texts = self.texts_to_score(batch)
        if "environment" not in batch.rows:
            batch.rows["question"] = [problem.messages[-1]["content"] for problem in problems]
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
        """The verifier's result per row; override it for rewards of another kind."""
        return score_texts(self.ports, batch, problems, texts, self.no_output_score, step)

    def texts_to_score(self, batch: Batch) -> Sequence[str | None]:
        """What the policy wrote in each row, without tool output; None if there is nothing."""
        return policy_texts(self.ports, batch)

    def drop_failures(self, batch: Batch, step: Step) -> Batch:
        """The rows that have a score. Raises RunError beyond reward.max_failure_rate."""
        return drop_failures(batch, step, self.config.reward.max_failure_rate)

    def estimate(self, batch: Batch, step: Step) -> Batch:
        """Sets the token column `advantages`."""
        return batch

    def update(self, batch: Batch, step: Step) -> Batch:
        """Trains the policy. Per-token statistics of its passes become columns of the rollouts."""
        step.metrics.update(self.ports.policy.update(batch, step.number))
        for name, column in self.ports.policy.token_stats().items():
            if name not in batch.tokens:
                batch.tokens[name] = column
        return batch

    def publish(self, batch: Batch, step: Step) -> Batch:
        """Sends the new weights to an engine that has its own, and to copies of the policy."""
        self.sync_weights()
        sync_copies(self, step)
        return batch

    def sync_weights(self) -> None:
        if not self.ports.engine.shares_weights:
            self.ports.engine.publish(self.ports.policy.weights())

    # ---- beside the model

    def view(self, step: int) -> View:
        """The view of the policy that is trained at this step."""
        return FULL

    def prepare(self, batch: Batch) -> Batch:
        """The batch of one optimizer step, with `loss_weight` set from global counts.

        Called once, before the batch is split. May drop rows without gradient.
        """
        batch.tokens["loss_weight"] = token_weights(
            self.settings.aggregation,
            batch.tokens["loss_mask"],
            batch.row_index,
            len(batch),
            self.config.rollout.max_response_tokens,
            groups=batch.rows["group"],
        )
        return batch

    def target_ids(self, batch: Batch) -> Tensor:
        """(tokens,) ids whose log-probs the loss reads, or (tokens, ids) for several per token."""
        return batch.response.values

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]:
        """Factors of the learning rate by parameter name; 1 for names that are absent."""
        return {}

    def row_groups(self, batch: Batch) -> Sequence[int] | None:
        """Ids of rows that one loss reads jointly; None if the loss reads each row alone."""
        return None

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        """The weighted sum of token losses over a micro-batch, a scalar.

        Micro-batches add up: any split of the rows gives the same total.
        """
        raise ConfigError(
            f"method={self.config.method.name}: the class {type(self).__name__} has no loss; "
            "define loss(self, batch, current, metrics), or derive it from a method that has one"
        )

    # ---- validation and state

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Accuracy on held-out problems, by the passes of training.validation_*.

        Keeps the answers of each pass in `self.answers`.
        """
        self.answers = {}
        metrics: dict[str, float] = {}
        num_failures = 0
        for validation_pass in validation_passes(self.config):
            answers = respond(
                self.ports.engine,
                self.ports.scorer,
                self.ports.prompts,
                problems,
                validation_pass.sampling,
                validation_pass.samples,
                self.config.seed,
                self.ports.turns,
            )
            self.answers[validation_pass.name] = answers
            metrics[f"validation/{validation_pass.name}"] = mean_score(answers)
            num_failures += sum(isinstance(answer.verdict, Failure) for answer in answers)
        if num_failures:
            metrics["validation/failures"] = float(num_failures)
        return metrics

    def state(self) -> dict[str, Any]:
        """What the method keeps between steps; a checkpoint holds it."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from the result of state()."""

    # ---- helpers

    def generate(
        self, requests: Sequence[SampleRequest], sampling: Sampling, step: int
    ) -> list[list[Completion]]:
        """Completions per request: a problem, the indices of its samples, prefixes of the first."""
        return sample_requests(self.ports, requests, sampling, self.config.seed, step)

    def rng(self, step: Step, purpose: str, index: int = 0) -> Random:
        """A random generator seeded by run, step, purpose and index, so that resumed runs agree."""
        return Random(trajectory_seed(self.config.seed, step.number, purpose, index))
