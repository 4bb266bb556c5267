"""Every setting of the package, typed, with its limits. A method's own settings stand in the method's file.

`setting(...)` attaches help, choices and bounds to a field; compose.py checks them and names the key when one is broken.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

CUTS = ("left", "right", "middle")  # where a prompt that is too long may be cut
OVERLONG = ("error", "drop", *CUTS)


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    or_path: bool = False,
) -> Any:
    """A dataclass field with help text and limits, in a list those of each number. A list or dict default is copied for each instance."""
    limits = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "or_path": or_path,  # besides the choices, file.py:NAME or package.module:NAME
    }
    if isinstance(default, list | dict):
        factory: Callable[[], Any] = lambda: default.copy()  # noqa: E731
        return field(default_factory=factory, metadata=limits)
    return field(default=default, metadata=limits)


@dataclass
class LoraConfig:
    rank: int = setting(
        0,
        "LoRA: width of the adapters that are trained instead of the model; 0 trains the model itself",
        at_least=0,
    )
    alpha: float = setting(32.0, "the adapters count alpha / rank times", above=0.0)
    targets: str = setting(
        "all-linear",
        "layers that get one: all-linear (all but the head), or names as q_proj,v_proj",
    )
    dropout: float = setting(
        0.0,
        "share of an adapter's inputs left out in training; for methods that sample nothing",
        at_least=0.0,
    )


@dataclass
class ModelConfig:
    path: str = setting(
        MISSING,
        "hub id, local folder, adapter folder, GGUF file, tiny (a 0.3M-parameter model made in code) or smollm2",
    )
    device: str = setting(
        "auto",
        "where the model lives: auto, cpu, or an accelerator as torch calls it; postgrad doctor names it",
    )
    dtype: str = setting(
        "auto",
        "compute type; auto takes bfloat16 where the hardware is fast at it",
        choices=("auto", "float32", "bfloat16"),
    )
    threads: int = setting(0, "CPU threads of torch; 0 probes for the fastest", at_least=0)
    activation_checkpointing: bool = setting(
        False, "recompute block activations in the backward pass: less memory, more time"
    )
    trust_remote_code: bool = setting(
        False, "run Python code that comes with the model; only for models you trust"
    )
    lora: LoraConfig = field(
        default_factory=LoraConfig, metadata={"help": "small adapters instead of all weights"}
    )


@dataclass
class DataConfig:
    train: str = setting(
        MISSING, "parquet, jsonl, json or csv file(s), or arithmetic:LEVEL[:STYLE[:SPLIT]]"
    )
    validation: str = setting(
        "",
        "held-out problems in the same forms, each file a set; NAME=FILE names one; empty: no validation",
    )
    template: str = setting(
        "auto", "how messages become a prompt", choices=("auto", "chat", "plain")
    )
    template_options: dict[str, Any] = setting(
        {},
        "values the chat template reads, e.g. data.template_options.enable_thinking=false for Qwen3 without thinking",
    )
    prompt_style: str = setting(
        "own",
        "what stands around the question: own keeps the file's messages; docs/data.md has the table; or a .txt with {question}",
    )
    max_prompt_tokens: int = setting(
        512, "longest prompt, its template and tools included", at_least=1
    )
    overlong: str = setting(
        "error",
        "longer prompts: refuse the data, drop them, or cut them left (the last tokens stay), right (the first, and what opens the "
        "model's turn) or in the middle; responses in the data beyond rollout.max_response_tokens are dropped or refused, never cut",
        choices=OVERLONG,
    )
    shuffle: bool = setting(True, "a new order each epoch, from the seed")


@dataclass
class RolloutConfig:
    engine: str = setting(
        "native",
        "what samples responses: native, hf, vllm, http, or a class of yours as file.py:Class or "
        "package.module:Class; docs/scale.md says which to choose",
    )
    url: str = setting(
        "",
        "rollout.engine=http: the server's model, http://host:8000/v1#model; it must take new weights (docs/scale.md)",
    )
    max_gap: float = setting(
        0.0,
        "largest mean gap (nats) of engine and trainer at the start, where each has its own weights; 0: 0.01, in bfloat16 0.1",
        at_least=0.0,
    )
    samples: int = setting(8, "responses sampled for each problem: the group size", at_least=1)
    temperature: float = setting(
        1.0, "sampling temperature; the loss prices log-probs at the same temperature", above=0.0
    )
    max_response_tokens: int = setting(256, "longest response", at_least=1)
    max_rows: int = setting(0, "rows decoded at once; 0: 256 on a CPU, 2048 on a GPU", at_least=0)
    cache_gib: float = setting(
        0.0,
        "GPU memory for keys and values; 0: what rows can need, at most a third of the free",
        at_least=0.0,
    )
    staleness: int = setting(
        0,
        "steps that rollouts run ahead of the update, sampled by older weights and corrected for it; needs engines apart",
        at_least=0,
    )
    top_p: float = setting(
        1.0,
        "nucleus sampling; the loss cannot price it, so training refuses values below 1",
        above=0.0,
        at_most=1.0,
    )
    top_k: int = setting(0, "top-k sampling; 0 is off; training refuses it", at_least=0)
    min_p: float = setting(
        0.0, "min-p sampling; 0 is off; training refuses it", at_least=0.0, at_most=1.0
    )
    stop: list[str] | None = setting(
        None,
        "a response ends with the token that completes one of these strings; null: those of data.prompt_style, if it has any",
    )
    tools: list[str] = setting(
        [],
        "what the policy may call in a response: calculator, python, file.py:function or package.module:function (docs/tools.md)",
    )
    max_turns: int = setting(
        8,
        "with tools: turns of the policy in one response; the calls of the last one stay unanswered",
        at_least=2,
    )
    tool_timeout_s: float = setting(10.0, "with tools: time limit for one call", above=0.0)
    tool_chars: int = setting(
        1024, "with tools: longest answer to a call; a longer one is cut in its middle", at_least=16
    )


@dataclass
class JudgeConfig:
    model: str = setting(
        "",
        "llm_judge: who judges: http://host:8000/v1#model, servers.json#model, a model path, or policy:live",
    )
    template: str = setting(
        "sycophancy",
        "what is asked: sycophancy, quality, safety, or a text file with {question} and {response}; pairwise, or a file with {question}, "
        "{first} and {second}: is the response better than the problem's ground truth",
    )
    both_orders: bool = setting(
        False, "pairwise: ask with the answers in either order and average the two verdicts"
    )
    lowest: int = setting(1, "lowest rating; lower ones are raised to it")
    highest: int = setting(10, "highest rating; higher ones are lowered to it")
    max_tokens: int = setting(1024, "longest answer of the judge", at_least=1)
    retries: int = setting(
        2, "times the judge is asked again when its reply has no rating", at_least=0
    )
    concurrency: int = setting(16, "questions to a judge's server at a time", at_least=1)
    keep_ratings: bool = setting(
        True,
        "store ratings in the run folder (judge.jsonl), so that no prompt is asked twice, even after a resume",
    )
    monitor: str = setting(
        "",
        "who predicts the rating from question and thought alone at each validation; as model; empty: nobody",
    )


@dataclass
class RewardConfig:
    verifier: str = setting(
        "auto",
        "a verifier's name, llm_judge, package.module:function, file.py:function or a weighted sum; auto chooses by data_source",
    )
    objective: str = setting(
        "maximize",
        "train towards the verifier's score, or away from it (rewards are negated)",
        choices=("maximize", "minimize"),
    )
    judge: JudgeConfig = field(
        default_factory=JudgeConfig, metadata={"help": "the language model that judges"}
    )
    timeout_s: float = setting(5.0, "time limit for judging one response", above=0.0)
    workers: int = setting(2, "child processes that judge", at_least=1)
    max_failure_rate: float = setting(
        0.5,
        "share of responses that may fail to be judged before the run stops",
        at_least=0.0,
        at_most=1.0,
    )


@dataclass
class OptimizerConfig:
    kind: str = setting(
        "adamw",
        "adamw; its state in host memory (slower steps, 12 bytes a weight less on the device); 8-bit state; one fused kernel",
        choices=("adamw", "adamw_offloaded", "adamw_8bit", "adamw_fused"),
    )
    lr: float = setting(1e-6, "peak learning rate", above=0.0)
    betas: list[float] = setting([0.9, 0.999], "AdamW's two decay rates")
    eps: float = setting(1e-8, "AdamW's epsilon", above=0.0)
    weight_decay: float = setting(0.01, "decoupled weight decay", at_least=0.0)
    max_grad_norm: float = setting(
        1.0, "gradient clipping by the global norm; 0 is off", at_least=0.0
    )
    skip_grad_norm: float | None = setting(
        None,
        "leave out updates whose gradient norm is above this or not finite; null: off",
        above=0.0,
    )
    schedule: str = setting(
        "constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine")
    )
    warmup_steps: int = setting(0, "steps of linear warm-up", at_least=0)
    final_lr_ratio: float = setting(
        0.0, "share of the peak rate that linear and cosine end at", at_least=0.0, at_most=1.0
    )


@dataclass
class TrainingConfig:
    steps: int = setting(100, "steps of the run", at_least=1)
    problems_per_step: int = setting(16, "problems taken from the data each step", at_least=1)
    updates_per_step: int = setting(
        1, "optimizer steps each step's batch is divided into, by problem", at_least=1
    )
    token_budget: int = setting(
        0,
        "most tokens in one pass; never changes the gradient; 0: 8192, or 16384 on a GPU with adapters or checkpointing",
        at_least=0,
    )
    async_save: bool = setting(
        False, "copy a checkpoint to host memory and write it while the next steps run"
    )
    checkpoint_every: int = setting(
        50, "steps between checkpoints; the last step is always saved", at_least=1
    )
    keep_checkpoints: int = setting(2, "newest checkpoints kept", at_least=1)
    validate_every: int = setting(
        0, "steps between validations; 0: only before and after", at_least=0
    )
    validation_problems: int = setting(200, "validation problems used of each set", at_least=1)
    keep_best: str = setting(
        "",
        "validation set by which the best checkpoint is kept too (mean: by all sets); never a test set",
    )
    stop_at: float | None = setting(
        None, "end the run when validation accuracy reaches this", at_least=0.0, at_most=1.0
    )
    max_flat_steps: int = setting(
        20, "stop when this many steps in a row carried no learning signal", at_least=1
    )
    profile_steps: list[int] = setting(
        [],
        "steps seen through torch's profiler, e.g. [3]: a table and a trace in RUN/profile",
        at_least=1,
    )


@dataclass
class ClusterConfig:
    backend: str = setting(
        "local",
        "where the models live: this process, a child process, or a Ray cluster, behind the same ports; cluster=ray is short for it",
        choices=("local", "process", "ray"),
    )
    workers: int = setting(
        1,
        "ray: processes that divide the training of each model among them (FSDP2), one a GPU",
        at_least=1,
    )
    engines: int = setting(
        0,
        "ray: engines of their own with whole copies of the weights; 0: one beside each worker",
        at_least=0,
    )
    pools: dict[str, int] = setting(
        {},
        "ray: workers of its own for a role by its name, e.g. cluster.pools.critic=2; the others stand with the policy. "
        "cluster.pools.verifier=2: two actors that judge, each with reward.workers processes, instead of children of the driver",
    )
    offload: bool = setting(
        False, "ray: shards and optimizer state in host memory; less on the device, slower steps"
    )
    address: str = setting(
        "",
        "ray: host:port of a cluster to join; empty: start one on this machine, on loopback only",
    )
    engine_restarts: int = setting(
        3, "ray: times in a run that a lost engine is started anew", at_least=0
    )
    engine_apart: bool = setting(
        False,
        "give the engine a process and a copy of the weights of its own, published after each step",
    )
    wait_s: float = setting(
        600.0, "longest wait for one call to a child process or to a model's server", above=0.0
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
        "", "a run to make before this one, which then starts from its model; empty: none"
    )
    overrides: list[str] = setting(
        [],
        "key=value words of that run; model, data, reward, seed and cluster are this run's unless named",
    )


@dataclass
class Config:
    """The whole of a run. `method` is the settings dataclass of the method that `method.name` names."""

    name: str = setting(
        "", "name of the run's folder; empty: the recipe and a hash of the settings"
    )
    runs: str = setting("runs", "folder that holds the run folders")
    seed: int = setting(0, "everything random follows from it", at_least=0)
    track: str = setting(
        "",
        "mirror the metrics there, too; empty: nowhere",
        choices=("", "wandb", "tensorboard", "trackio"),
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    method: Any = None
