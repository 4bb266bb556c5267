"""An agent: plays one task of an environment of the package verifiers and prints its reward.

    pip install 'verifiers>=0.4,<0.5'
    postgrad train grpo agent="python examples/verifiers_agent.py TASKSET" agent.max_calls=32 \\
        data.train=seeds:1000 model.path=MODEL

TASKSET is what `vf-eval` takes: an installed package of tasks, with its environment and harness if
it has them. `--env '{"agent": {"max_turns": 4}}'` adds settings of the environment. Programs of
verifiers run on this machine unless `--env` names another runtime. The problem's `extra.index`, or
the number in its uid (data.train=seeds:N), chooses the task.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import sys
from typing import Any

MODEL = "policy"  # the endpoint accepts any name
LOCAL_RUNTIME = {"type": "subprocess"}


def main() -> None:
    """Play the task of the problem on the standard input; print {"reward": ...} at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("taskset")
    parser.add_argument("--env", type=json.loads, default={})
    options = parser.parse_args()
    problem = json.load(sys.stdin)
    try:
        import verifiers.v1  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("the package verifiers is missing; type pip install 'verifiers>=0.4,<0.5'")
    episode = asyncio.run(play(options.taskset, options.env, task_number(problem)))
    if not episode.ok:
        errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        sys.exit(errors[-1].message if errors else "the episode failed")
    print(json.dumps(episode_reward(episode)))


def task_number(problem: dict[str, Any]) -> int:
    """Return which task a problem means."""
    if "index" in problem["extra"]:
        return int(problem["extra"]["index"])
    found = re.search(r"(\d+)$", problem["uid"])
    if found is None:
        sys.exit(f"problem {problem['uid']} names no task; use data.train=seeds:N")
    return int(found[1])


async def play(taskset: str, settings: dict[str, Any], number: int) -> Any:
    """Return the episode of one task. Its calls go to OPENAI_BASE_URL."""
    import verifiers.v1 as vf
    from verifiers.v1.utils import loaders

    config: dict[str, Any] = {**settings, "taskset": {**settings.get("taskset", {}), "id": taskset}}
    config_class = loaders.env_config_type(taskset, config.get("id", ""))
    for name, field in config_class.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            config[name] = {"runtime": LOCAL_RUNTIME, **config.get(name, {})}
    environment = loaders.load_environment(loaders.resolve_env_config(config))
    tasks = environment.taskset
    if tasks.bounded:
        all_tasks = list(tasks)
        task = all_tasks[number % len(all_tasks)]
    else:
        task = next(itertools.islice(tasks, number, None))
    client = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    async with environment.serving():
        return await environment.run_episode(task, vf.ModelContext(MODEL, client))


def episode_reward(episode: Any) -> dict[str, float]:
    """Return the mean reward of the trained agents' traces, and the metrics of the first one."""
    traces = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    parts = {name: value for name, value in traces[0].metrics.items() if value is not None}
    return {**parts, "reward": sum(trace.reward for trace in traces) / len(traces)}


if __name__ == "__main__":
    main()
