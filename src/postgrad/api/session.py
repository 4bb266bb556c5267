"""Session: the low level, for people who write their own training loop."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from postgrad.algorithms.losses import LOSSES, Loss
from postgrad.api.models import as_model, model_path
from postgrad.api.rewards import Reward, as_verifier_setting
from postgrad.api.rows import as_problems
from postgrad.api.sampler import Prompt
from postgrad.api.settings import Settings, as_setting, full_key
from postgrad.cluster.host import build_host
from postgrad.config.compose import compose, known_keys
from postgrad.config.schema import Config
from postgrad.data.encode.encoder import make_encoder
from postgrad.errors import (
    Missing,
    RunError,
    UnknownName,
    Unreadable,
    Unsupported,
    Unwritable,
    WrongValue,
    did_you_mean,
)
from postgrad.files import atomic_folder
from postgrad.methods.grpo import Grpo
from postgrad.methods.method import Method
from postgrad.methods.ports import Ports
from postgrad.methods.sft import Sft
from postgrad.methods.step import Group, Step
from postgrad.methods.support.grpo_settings import check_loss_options
from postgrad.methods.support.responses import add_scores
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.policy import split_updates
from postgrad.model.threads import kept_threads, set_threads
from postgrad.model.views import FULL
from postgrad.problem import Problem
from postgrad.training.resolve import resolve
from postgrad.types import Batch
from postgrad.verifiers.scorer import AUTO, Scorer

CROSS_ENTROPY = "cross_entropy"


class Session:
    """A model with an engine and an optimizer: sample, forward_backward, optim_step.

        session = postgrad.Session("Qwen/Qwen3-0.6B", max_tokens=256)
        batch = session.sample(["2+2=", "3+3="], n=8)
        session.score(batch, reward)
        batch.tokens["advantages"] = ...                   # one number per response token
        session.forward_backward(batch, loss="ppo_clip")
        session.optim_step(lr=1e-6)

    Engine, forward passes and losses are those of the recipes: a loop that does what a recipe does
    computes the same weights. The model is in this process.

    Args:
        model: a path, a hub id, or `(model, tokenizer)` in memory, which is copied.
        tokenizer: the tokenizer of a model in memory, if `model` is not a pair.
        seed: random seed of the samples.
        temperature: sampling temperature; log-probs are computed at the same temperature.
        max_tokens: longest response in tokens.
        lora_rank: rank of LoRA adapters; 0 trains all weights.
        settings: any setting of training by its full name: {"optimizer.betas": [0.9, 0.95]}.
        **more: any setting by the last part of its name.

    Raises:
        ConfigError: an argument is wrong, or the model cannot be loaded.
    """

    @kept_threads()
    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        seed: int = 0,
        temperature: float = 1.0,
        max_tokens: int = 256,
        lora_rank: int = 0,
        settings: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        named = {
            "seed": seed,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "lora_rank": lora_rank,
            **(settings or {}),
            **more,
        }
        with model_path(as_model(model, tokenizer)) as path:
            self.config = resolve(_make_config(path, named))
            host = build_host(self.config)
        self.policy = host.policy
        self.encoder = make_encoder(host.policy.loaded.tokenizer, self.config.data)
        self._method = Grpo(self.config)
        # Nothing of the method scores here: score() has its own scorer.
        ports = Ports(host.policy, host.engine, None, self.encoder)  # type: ignore[arg-type]
        self._method.bind(ports)
        self._problems: dict[str, Problem] = {}
        self._has_pass = False

    @property
    def model(self) -> Any:
        """The transformers model that is trained."""
        return self.policy.model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.policy.loaded.tokenizer

    # ---- data

    @kept_threads()
    def sample(
        self, prompts: Sequence[Prompt | Problem | dict[str, Any]], n: int = 1, *, step: int = 0
    ) -> Batch:
        """Sample `n` responses per prompt from the present weights; a batch of all trajectories.

        `batch.rows["text"]` are the responses, `batch.rows["group"]` numbers the prompts,
        `batch.tokens["behavior_logprobs"]` are the tokens' log-probs.

        Args:
            prompts: texts, lists of messages, rows as in `train`, or Problems.
            n: responses per prompt.
            step: changes the random numbers; a loop gives its step here.
        """
        set_threads(self.config.model.threads)
        problems = self.problems(prompts)
        batch = self._method.sample([Group(one, n) for one in problems], Step(step))
        texts = [self.encoder.decode(ids.tolist()) for ids in batch.response.split()]
        batch.rows["text"] = texts
        return batch

    def problems(self, data: Any) -> list[Problem]:
        """Return rows, texts or lists of messages as problems that the session can sample."""
        if isinstance(data, str):
            raise WrongValue(f"prompts is a text; give a list: [{data[:20]!r}]", at="prompts")
        if not isinstance(data, list | tuple):
            problems = as_problems(data)
        elif all(isinstance(one, Problem) for one in data):
            problems = list(data)
        else:
            problems = as_problems(
                [one if isinstance(one, dict) else {"prompt": one} for one in data], "prompts"
            )
        self.encoder.fit(problems)
        self._problems |= {problem.uid: problem for problem in problems}
        return problems

    def encode(self, data: Any) -> Batch:
        """Return conversations as a batch for loss="cross_entropy".

        `data` are rows as in `train` with a prompt and a response, or with messages. Only the
        assistant's tokens count.
        """
        rows = Sft(_with_method(self.config, Sft, {}))
        rows.bind(self._method.ports)
        return Batch.of([rows.conversation_row(problem) for problem in as_problems(data)])

    def score(
        self,
        batch: Batch,
        reward: Reward | Sequence[Reward] | None = None,
        reward_weights: Sequence[float] | None = None,
    ) -> Tensor:
        """Score a sampled batch: sets `batch.rows["reward"]` and returns it, (rows,).

        `reward` as in `train`. Raises RunError if a response could not be scored.
        """
        verifier = as_verifier_setting(reward, reward_weights) or AUTO
        problems = [self._problems[uid] for uid in batch.rows["uid"]]
        settings = self.config.reward
        with Scorer(verifier, settings.timeout_s, settings.workers) as scorer:
            ids = batch.response.split()
            texts = batch.rows["text"]
            results = scorer.score(problems, texts, lambda: [one.tolist() for one in ids])
            add_scores(batch, results)
        failure = next((reason for reason in batch.rows["failure"] if reason), "")
        if failure:
            raise RunError(f"a response could not be scored: {failure}")
        return batch.rows["reward"]

    # ---- training

    @kept_threads()
    def logprobs(self, batch: Batch) -> Tensor:
        """(tokens,) log-probs of the response tokens under the present weights."""
        set_threads(self.config.model.threads)
        return self.policy.logprobs(batch)["logprobs"]

    @kept_threads()
    def forward_backward(
        self,
        batch: Batch,
        loss: str | Loss | Any = "ppo_clip",
        *,
        aggregation: str = "token-mean",
        entropy_coef: float = 0.0,
        **options: float,
    ) -> dict[str, float]:
        """Add the gradient of a loss to the gradients so far; return the pass's metrics.

        Calls before one `optim_step` add up; each has its own denominators.

        Args:
            batch: needs the token column `advantages`, and `old_logprobs` if the weights have
                changed since the batch was sampled; without it the present policy is the old one.
            loss: a name of docs/algorithms.md, `cross_entropy`, a Loss, or a function of columns
                that returns a TokenLoss.
            aggregation: how token losses become one number.
            entropy_coef: coefficient of the entropy bonus.
            **options: options of the loss, such as clip_low=0.2.

        Raises:
            ConfigError: there is no such loss or option, or a column is missing.
        """
        set_threads(self.config.model.threads)
        method = self._objective(loss, aggregation, entropy_coef, options)
        if loss != CROSS_ENTROPY and "advantages" not in batch.tokens:
            raise Missing(
                'the batch has no advantages; set batch.tokens["advantages"], '
                "one number per response token",
                at="advantages",
            )
        self.policy.objective = method.objective
        metrics = MetricAccumulator()
        part = split_updates(batch, 1)[0]  # its own tables: the caller's batch is not changed
        self.policy.accumulate(method.objective.prepare(part), FULL, metrics)
        self._has_pass = True
        return metrics.result()

    @kept_threads()
    def optim_step(self, lr: float = 1e-6) -> dict[str, float]:
        """Update the weights from the gradients so far, and clear them; returns `grad_norm`.

        Without any gradient (all advantages are zero) nothing changes.

        Raises:
            RunError: forward_backward was not called before.
        """
        if not self._has_pass:
            raise RunError("there is no gradient; call forward_backward first")
        if not lr > 0:
            raise WrongValue(f"lr={lr} is out of range; it must be above 0")
        self._has_pass = False
        set_threads(self.config.model.threads)
        if not self.policy.optimizer.has_gradients():
            return {"lr": lr, "grad_norm": 0.0}
        return {"lr": lr, "grad_norm": float(self.policy.optimizer.step(lr))}

    def save(self, folder: str | Path) -> Path:
        """Write weights (a Hugging Face folder, `policy`) and optimizer. Raises ConfigError."""
        path = Path(folder).expanduser()
        if path.exists() and any(path.iterdir()):
            raise Unwritable(f"{path} exists already; name a new folder, or remove it")
        with atomic_folder(path) as temporary:
            self.policy.save(str(temporary))
        return path

    def load(self, folder: str | Path) -> None:
        """Continue from the weights and the optimizer that save() wrote. Raises ConfigError."""
        path = Path(folder).expanduser()
        if not (path / "optimizer.safetensors").is_file():
            raise Unreadable(f"{path} was not written by Session.save: it has no optimizer state")
        self.policy.load(str(path))
        self._has_pass = False

    def _objective(
        self, loss: Any, aggregation: str, entropy_coef: float, options: dict[str, float]
    ) -> Method:
        """Return the method whose loss this is. Raises ConfigError."""
        if loss == CROSS_ENTROPY:
            if options or entropy_coef:
                option = next(iter(options), "entropy_coef")
                raise UnknownName(f"loss=cross_entropy has no option {option}; leave it out")
            return Sft(_with_method(self.config, Sft, {"aggregation": aggregation}))
        values = {
            "loss": loss if isinstance(loss, str) else as_setting(loss),
            "aggregation": aggregation,
            "entropy_coef": entropy_coef,
            "loss_options": dict(options),
        }
        if isinstance(loss, str) and loss not in LOSSES and ":" not in loss:
            raise UnknownName(
                f"loss={loss} is not a loss; {did_you_mean(loss, [*LOSSES, CROSS_ENTROPY])}"
            )
        method = Grpo(_with_method(self.config, Grpo, values))
        check_loss_options(method)
        return method


def _make_config(path: str, named: Mapping[str, Any]) -> Config:
    """Return the configuration of a session. Raises ConfigError."""
    known = known_keys(Grpo.Settings)
    settings = Settings()
    settings.add("model.path", path)
    settings.add("data.train", "none")  # required by runs; a session reads no file
    for name, value in named.items():
        settings.add(full_key(name, known), value)
    config = compose("grpo", settings.overrides, lambda _: Grpo.Settings)
    settings.attach(config)
    if config.cluster.backend != "local":
        raise Unsupported(
            "a session runs in this process; leave cluster.backend out", at="cluster.backend"
        )
    return config


def _with_method(config: Config, method: type[Method], values: dict[str, Any]) -> Config:
    """Return a configuration with the method's default settings and these values."""
    settings = dataclasses.replace(method.Settings(), name=config.method.name, **values)
    return dataclasses.replace(config, method=settings)
