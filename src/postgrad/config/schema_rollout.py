"""The sections `rollout`, `environment` and `agent` of the settings; schema.py explains them."""

from dataclasses import dataclass
from typing import Any

from postgrad.config.setting import setting

# Conditions of settings: the engine has its own copy of the weights, in one of two ways.
ENGINE_APART = ("cluster.engines", "rollout.engine!=native,hf")
# All settings of a section have an effect with this one only.
ENVIRONMENT = {"only_with": "environment.name"}
AGENT = {"only_with": "agent.command"}


@dataclass
class RolloutConfig:
    engine: str = setting(
        "native",
        "engine that samples responses: native, hf, vllm, sglang, http, or your own class as "
        "file.py:Class or package.module:Class; docs/machines.md compares them",
    )
    url: str = setting(
        "",
        "server and model of rollout.engine=http or sglang: http://host:8000/v1#model; "
        "the server must accept new weights (docs/machines.md)",
        only_with="rollout.engine!=native,hf,vllm",
    )
    max_logprob_difference: float = setting(
        0.0,
        "largest mean difference (nats) between the log-probs of engine and trainer at the start, "
        "if they have separate weights; 0: 0.01, or 0.1 in bfloat16",
        at_least=0.0,
        only_with=ENGINE_APART,
    )
    samples: int = setting(8, "responses per problem: the group size", at_least=1)
    temperature: float = setting(
        1.0, "sampling temperature; the loss uses log-probs at the same temperature", above=0.0
    )
    max_response_tokens: int = setting(256, "longest response in tokens", at_least=1)
    max_rows: int = setting(
        0, "responses decoded at the same time; 0: 256 on a CPU, 2048 on a GPU", at_least=0
    )
    cache_gib: float = setting(
        0.0,
        "GPU memory for the KV cache in GiB; 0: as much as needed, at most a third of the "
        "free memory",
        at_least=0.0,
    )
    tensor_parallel: int = setting(
        1,
        "vllm with cluster=ray: workers that divide the weights of one engine among them, "
        "on devices of one node",
        at_least=1,
        only_with="rollout.engine=vllm and cluster.backend=ray",
    )
    staleness: int = setting(
        0,
        "steps that rollouts run ahead of the update; importance weights correct for the older "
        "weights; needs a separate engine",
        at_least=0,
    )
    stream: bool = setting(
        False,
        "sample without pauses: a step trains on the groups that finish first, new weights reach "
        "responses that are being sampled, and no token is more than rollout.staleness updates old",
    )
    top_p: float = setting(
        1.0,
        "nucleus sampling; with native, hf and sglang, the loss of the GRPO family normalizes over "
        "the tokens that were kept; others refuse values below 1",
        above=0.0,
        at_most=1.0,
    )
    top_k: int = setting(0, "top-k sampling; 0: off; trained as rollout.top_p", at_least=0)
    min_p: float = setting(
        0.0, "min-p sampling; 0: off; trained as rollout.top_p", at_least=0.0, at_most=1.0
    )
    stop: list[str] | None = setting(
        None,
        "strings that end a response when they are complete; null: those of data.prompt_style",
    )
    tools: list[str] = setting(
        [],
        "functions that the policy may call: calculator, python, file.py:function, "
        "package.module:function, or those of an MCP server, mcp:COMMAND or mcp:URL "
        "(mcp_session:... with a connection per trajectory) "
        "(docs/environments.md)",
    )
    max_turns: int = setting(
        8,
        "turns per response, with tools or an environment; tool calls of the last turn are not "
        "answered",
        at_least=1,
        only_with=("rollout.tools", "environment.name"),
    )
    tool_format: str = setting(
        "auto",
        "how the model writes calls; auto: the tokenizer's response template, or what its chat "
        "template shows; python_blocks: fenced Python is run by the tool python",
        choices=(
            "auto",
            "hermes",
            "fenced",
            "qwen3_coder",
            "llama3",
            "gpt_oss",
            "glm",
            "deepseek",
            "gemma",
            "python_blocks",
        ),
        only_with="rollout.tools",
    )
    tool_timeout_s: float = setting(
        10.0, "time limit per tool call, in seconds", above=0.0, only_with="rollout.tools"
    )
    tool_chars: int = setting(
        1024,
        "longest result of a tool call, in characters; a longer one is truncated in the middle",
        at_least=16,
        only_with="rollout.tools",
    )


@dataclass
class EnvironmentConfig:
    name: str = setting(
        "",
        "what answers the policy between turns: file.py:Class, package.module:Class, guess, a "
        "server of OpenEnv's wire as http://HOST:PORT, or several as NAME=CLASS,NAME=CLASS "
        "(docs/environments.md); environment=CLASS is short for it; empty: none",
    )
    options: dict[str, Any] = setting(
        {}, "arguments of the class, e.g. environment.options.high=100"
    )
    weights: dict[str, float] = setting(
        {}, "of several environments: their shares of the rows that name none; default: equal"
    )
    workers: int = setting(
        2, "child processes that run the environments; 0: threads of the driver", at_least=0
    )
    timeout_s: float = setting(30.0, "time limit per call of an environment, in seconds", above=0.0)
    max_chars: int = setting(
        4096,
        "longest observation, in characters; a longer one is truncated in the middle",
        at_least=16,
    )


@dataclass
class AgentConfig:
    command: str = setting(
        "",
        "a program that calls the policy through OPENAI_BASE_URL, such as 'python my_agent.py' "
        "(docs/environments.md); agent=COMMAND is short for it; empty: none",
    )
    workers: int = setting(16, "programs that run at the same time", at_least=1)
    timeout_s: float = setting(600.0, "time limit per program, in seconds", above=0.0)
    max_calls: int = setting(64, "most calls of the policy per program", at_least=1)
