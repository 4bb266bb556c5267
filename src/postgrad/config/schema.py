"""All settings of the package except those of a method, as typed dataclasses with limits.

`setting(...)` attaches a help text, choices and bounds to a field. check.py checks them and
names the key in its error. The sections `rollout`, `environment`, `agent` and `reward` are in files
of their own. A method's own settings are in the method's file.
"""

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from postgrad.config.schema_reward import JudgeConfig as JudgeConfig
from postgrad.config.schema_reward import RewardConfig
from postgrad.config.schema_rollout import (
    AGENT,
    ENVIRONMENT,
    AgentConfig,
    EnvironmentConfig,
    RolloutConfig,
)
from postgrad.config.setting import REQUIRED as REQUIRED
from postgrad.config.setting import setting

TRUNCATION_SIDES = ("left", "right", "middle")  # where a prompt that is too long may be truncated
OVERLONG = ("error", "drop", *TRUNCATION_SIDES)
RAY = "cluster.backend=ray"


@dataclass
class LoraConfig:
    rank: int = setting(
        0, "rank of the LoRA adapters; 0 trains all weights of the model instead", at_least=0
    )
    alpha: float = setting(32.0, "LoRA scale is alpha / rank", above=0.0)
    targets: str = setting(
        "all-linear",
        "layers with adapters: all-linear (all except the head), or names such as q_proj,v_proj",
    )


@dataclass
class ModelConfig:
    path: str = setting(
        REQUIRED,
        "hub id, model folder, adapter folder, GGUF file, smollm2, tiny (a 0.3M-parameter model "
        "made in code) or tiny_vision (one that reads pictures)",
    )
    device: str = setting("auto", "auto, cpu, or a kind of accelerator; see postgrad doctor")
    dtype: str = setting(
        "auto",
        "compute type; auto chooses bfloat16 where the hardware is fast at it",
        choices=("auto", "float32", "bfloat16"),
    )
    threads: int = setting(0, "CPU threads of torch; 0 measures and takes the fastest", at_least=0)
    activation_checkpointing: bool | None = setting(
        None,
        "recompute activations in the backward pass: less memory, more time; null: on a GPU where "
        "the run would not fit otherwise (docs/machines.md)",
    )
    kept_attention_blocks: int | None = setting(
        None,
        "recomputed blocks that keep their attention outputs: more memory, less time for long "
        "rows; null: as many as fit into a GPU",
        at_least=0,
        only_with="model.activation_checkpointing!=false",
    )
    quantization: str = setting(
        "none",
        "4bit keeps the policy's frozen linear layers in 4 bits (NF4); needs model.lora.rank",
        choices=("none", "4bit"),
    )
    trust_remote_code: bool = setting(
        False, "run Python code that comes with the model; only for models you trust"
    )
    vision: str = setting(
        "frozen",
        "what reads pictures in a model of text and images: frozen or trained",
        choices=("frozen", "trained"),
    )
    lora: LoraConfig = field(
        default_factory=LoraConfig,
        metadata={"help": "LoRA adapters", "only_with": "model.lora.rank"},
    )


@dataclass
class DataConfig:
    train: str = setting(
        REQUIRED,
        "parquet, jsonl, json or csv files, separated by commas; FILE:COLUMN=NEW_NAME renames; "
        "file.py:load, a function that returns rows; "
        "arithmetic:LEVEL[:STYLE[:SPLIT]]; scenes:KIND[:SPLIT]; "
        "reasoning_gym:NAME[:OPTION=VALUE]; "
        "hub:OWNER/NAME[:SPLIT[:COLUMN=COLUMN]]; or seeds:N for an environment (docs/data.md)",
    )
    validation: str = setting(
        "",
        "held-out problems in the same formats, one set per file; NAME=FILE names a set; "
        "empty: no validation",
    )
    template: str = setting(
        "auto",
        "how messages become a prompt: the chat template, or plain text",
        choices=("auto", "chat", "plain"),
    )
    template_options: dict[str, Any] = setting(
        {},
        "variables of the chat template, e.g. data.template_options.enable_thinking=false "
        "for Qwen3",
    )
    prompt_style: str = setting(
        "own",
        "text around the question: own keeps the messages of the file, a style of docs/data.md, "
        "or a .txt file with {question}",
    )
    max_prompt_tokens: int = setting(
        512, "longest prompt in tokens, including template and tools", at_least=1
    )
    overlong: str = setting(
        "error",
        "prompts longer than data.max_prompt_tokens: stop with an error, drop them, or truncate "
        "them on the left, on the right (keeping the start of the model's turn) or in the middle. "
        "Responses in the data that are too long are dropped or an error, never truncated",
        choices=OVERLONG,
    )
    shuffle: bool = setting(True, "shuffle the problems anew in each epoch")


@dataclass
class OptimizerConfig:
    kind: str = setting(
        "adamw",
        "adamw_offloaded keeps the state in host memory (12 bytes per weight less on the device, "
        "slower steps), adamw_8bit keeps it in 8 bits, adamw_fused runs as one kernel; muon "
        "orthogonalizes the steps of the blocks' matrices and uses AdamW for the rest; rmsprop is "
        "the optimizer of DPO's authors",
        choices=("adamw", "adamw_offloaded", "adamw_8bit", "adamw_fused", "muon", "rmsprop"),
    )
    lr: float = setting(1e-6, "peak learning rate", above=0.0, at_most=1.0)
    betas: list[float] = setting(
        [0.9, 0.999], "AdamW's two decay rates", only_with="optimizer.kind!=rmsprop"
    )
    eps: float = setting(1e-8, "AdamW's epsilon", above=0.0)
    weight_decay: float = setting(
        0.01,
        "decoupled weight decay",
        at_least=0.0,
        at_most=10.0,
        only_with="optimizer.kind!=rmsprop",
    )
    max_grad_norm: float = setting(
        1.0, "gradient clipping by the global norm; 0: off", at_least=0.0
    )
    skip_grad_norm: float | None = setting(
        None,
        "skip updates with a gradient norm above this or not finite; null: off",
        above=0.0,
    )
    schedule: str = setting(
        "constant",
        "learning rate schedule after the warm-up",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: float = setting(
        0.0, "steps of linear warm-up; a number below 1 is a share of all steps", at_least=0.0
    )
    final_lr_ratio: float = setting(
        0.0,
        "final learning rate of linear and cosine, as a share of the peak",
        at_least=0.0,
        at_most=1.0,
        only_with="optimizer.schedule!=constant",
    )


@dataclass
class TrainingConfig:
    steps: int = setting(100, "number of training steps", at_least=1, only_with="training.epochs=0")
    epochs: float = setting(
        0.0,
        "passes over data.train, instead of training.steps; 0: off; a run writes the number of "
        "steps to its config.yaml",
        at_least=0.0,
    )
    problems_per_step: int = setting(16, "problems per step", at_least=1)
    updates_per_step: int = setting(
        1,
        "optimizer steps per pass over a step's rollouts; each takes a part of the problems "
        "(verl: train_batch_size / ppo_mini_batch_size)",
        at_least=1,
    )
    ppo_epochs: int = setting(
        1,
        "passes over a step's rollouts, each of training.updates_per_step optimizer steps "
        "(verl: ppo_epochs, TRL: num_iterations)",
        at_least=1,
    )
    token_budget: int = setting(
        0,
        "most tokens per forward pass; does not change the gradient; "
        "0: 8192, or 16384 on a GPU with LoRA or activation checkpointing; fewer where these would "
        "not fit into the GPU's memory",
        at_least=0,
    )
    checkpoint_every: int = setting(
        50, "steps between checkpoints; the last step is always saved", at_least=1
    )
    keep_checkpoints: int = setting(2, "number of newest checkpoints to keep", at_least=1)
    validate_every: int = setting(
        0, "steps between validations; 0: only before the first and after the last step", at_least=0
    )
    validation_problems: int = setting(
        0, "use only the first problems of each validation set; 0: all", at_least=0
    )
    validation_samples: int = setting(
        1,
        "responses per validation problem; above 1: also best@k and maj@k",
        at_least=1,
        only_with="training.validation_temperature!=0",
    )
    validation_temperature: float | None = setting(
        None,
        "sampling temperature of validations; null: one greedy response and one at "
        "rollout.temperature; 0: greedy only",
        at_least=0.0,
    )
    validation_top_p: float = setting(
        1.0,
        "nucleus sampling of validations",
        above=0.0,
        at_most=1.0,
        only_with="training.validation_temperature!=0",
    )
    keep_best: str = setting(
        "",
        "also keep the checkpoint that is best on this validation set (mean: on all sets); "
        "never choose by a test set",
    )
    stop_at: float | None = setting(
        None,
        "end the run when validation accuracy reaches this",
        at_least=0.0,
        at_most=1.0,
        only_with="data.validation and training.validate_every",
    )
    max_flat_steps: int = setting(
        20, "stop after this many steps in a row without a learning signal", at_least=1
    )
    profile_steps: list[int] = setting(
        [],
        "steps to record with torch's profiler, e.g. [3]: a table and a trace in RUN/profile",
        at_least=1,
        only_with="cluster.backend=local",
    )


@dataclass
class ClusterConfig:
    backend: str = setting(
        "local",
        "where the models run: this process, a child process, or a Ray cluster; "
        "cluster=ray is short for cluster.backend=ray",
        choices=("local", "process", "ray"),
    )
    workers: int = setting(
        1,
        "ray: processes that share the training of each model (FSDP2), one per GPU",
        at_least=1,
        only_with=RAY,
    )
    tensor_parallel: int = setting(
        1,
        "ray: workers that divide the matrices of each block among them (tensor parallelism)",
        at_least=1,
        only_with=RAY,
    )
    expert_parallel: int = setting(
        1,
        "ray: workers that divide the experts of each block among them; tokens are sent to the "
        "workers of their experts. cluster.tensor_parallel divides every expert instead",
        at_least=1,
        only_with=RAY,
    )
    sequence_parallel: int = setting(
        1,
        "ray: workers that divide the tokens of a pass among them, for rows that are too long "
        "for one device (Ulysses)",
        at_least=1,
        only_with=RAY,
    )
    shard_workers: int = setting(
        0,
        "ray: workers over which FSDP2 shards one copy of the weights, such as those of one "
        "node; other workers hold further copies (hybrid sharding); 0: all workers, one copy",
        at_least=0,
        only_with=RAY,
    )
    engines: int = setting(
        0,
        "separate engines, each with its own copy of the weights, updated after each step: one "
        "with cluster.backend=process, any number with ray; 0: the trained model samples, with "
        "ray in each worker, or in each rollout.tensor_parallel workers",
        at_least=0,
        only_with="cluster.backend=process,ray and rollout.engine!=http,sglang",
    )
    pools: dict[str, int] = setting(
        {},
        "ray: number of own workers per role, e.g. cluster.pools.critic=2; roles without a pool "
        "share the policy's workers. cluster.pools.verifier=2: two actors score responses, each "
        "with reward.workers processes, instead of child processes of the driver",
        only_with=RAY,
    )
    offload: bool = setting(
        False, "ray: keep shards and optimizer state in host memory; slower steps", only_with=RAY
    )
    address: str = setting(
        "",
        "ray: host:port of a running cluster; empty: start one on this machine, loopback only",
        only_with=RAY,
    )
    wait_s: float = setting(
        600.0,
        "time limit for one call to a child process, a worker or a model server, in seconds",
        above=0.0,
    )


@dataclass
class EngineConfig:
    """The settings that an engine is built from. Training runs and evaluations both have them."""

    seed: int = setting(0, "random seed", at_least=0)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    max_prompt_tokens: int = setting(512, "longest expected prompt; sizes caches", at_least=1)


@dataclass
class WarmupConfig:
    recipe: str = setting(
        "", "recipe to run first; this run then starts from its model; empty: none"
    )
    overrides: list[str] = setting(
        [],
        "key=value settings of that run; it takes model, data, reward, seed and cluster from this "
        "run unless they are set here",
        only_with="warmup.recipe",
    )


@dataclass
class Config:
    """All settings of a run. `method` is an instance of the method's own settings dataclass."""

    name: str = setting(
        "", "name of the run folder; empty: the recipe's name and a hash of the settings"
    )
    runs: str = setting("runs", "folder that contains the run folders")
    seed: int = setting(0, "random seed", at_least=0)
    track: list[str] = setting(
        [],
        "also send the metrics to this tracker, or to several: track=wandb,tensorboard; "
        "file.py:Class is your own; empty: none",
        choices=("", "wandb", "tensorboard"),
        or_path=True,
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig, metadata=ENVIRONMENT)
    agent: AgentConfig = field(default_factory=AgentConfig, metadata=AGENT)
    reward: RewardConfig = field(default_factory=RewardConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    method: Any = None


def engine_config(config: Config) -> EngineConfig:
    """Return the settings of a run that its engine is built from."""
    return EngineConfig(
        config.seed, config.model, config.rollout, config.cluster, config.data.max_prompt_tokens
    )


def copy_settings(settings: Any) -> Any:
    """Return a copy of settings and of their sections; Python objects among the values stay."""
    made = copy.copy(settings)
    for name, value in vars(settings).items():
        if dataclasses.is_dataclass(value):
            setattr(made, name, copy_settings(value))
        elif isinstance(value, list | dict):
            setattr(made, name, copy.copy(value))
    return made
