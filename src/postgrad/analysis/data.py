"""Where the token ids of an entropy analysis come from: what a run or an evaluation stored, or fresh samples, which are stored first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import MISSING

from postgrad.config.compose import read_words
from postgrad.config.schema import ModelConfig, setting
from postgrad.data.problems import load_problems
from postgrad.data.readers import read_rows
from postgrad.data.render import Prompts
from postgrad.errors import ConfigError, RunError
from postgrad.files import atomic_file
from postgrad.problem import Problem
from postgrad.rollout.engine import Engine, Request, Sampling, trajectory_seed
from postgrad.types import Batch, Trajectory

Pair = tuple[list[int], list[int]]  # prompt and response


@dataclass
class EntropyModel(ModelConfig):
    dtype: str = setting(
        "float32",
        "compute type; entropies near 0 and near the ceiling want float32",
        choices=("float32", "bfloat16"),
    )


@dataclass
class EntropyConfig:
    """The settings of `postgrad analyze entropy`."""

    data: str = setting(
        MISSING,
        "a run folder, a parquet of rollouts, results of postgrad eval, or problems to be answered first",
    )
    out: str = setting(
        "",
        "folder of the figures; empty: eval/entropy in the run's folder, else entropy-MODEL here",
    )
    step: int = setting(0, "of a run: the step whose rollouts are read; 0: the newest", at_least=0)
    rows: int = setting(64, "responses looked at, spread over the data; 0: all", at_least=0)
    tolerance: float = setting(
        0.05,
        "boundary layer: share of the largest FFN change that counts as zero",
        at_least=0.0,
        at_most=1.0,
    )
    token_budget: int = setting(
        4096, "most tokens in one forward pass; never changes the result", at_least=1
    )
    seed: int = setting(0, "of the samples", at_least=0)
    samples: int = setting(1, "of problems: responses to each", at_least=1)
    temperature: float = setting(1.0, "of problems: sampling temperature", at_least=0.0)
    max_response_tokens: int = setting(1024, "of problems: longest response", at_least=1)
    template: str = setting(
        "auto", "of problems: how messages become a prompt", choices=("auto", "chat", "plain")
    )
    prompt_style: str = setting(
        "own", "of problems: the words around the question, as data.prompt_style of training"
    )
    template_options: dict[str, Any] = setting(
        {}, "of problems: values the chat template reads, e.g. enable_thinking"
    )
    model: EntropyModel = field(default_factory=EntropyModel)


# What a run's own configuration says about these holds for samples of its model, unless a word says otherwise.
FROM_RUN = {
    "max_response_tokens": ("rollout", "max_response_tokens"),
    **{key: ("data", key) for key in ("template", "prompt_style", "template_options")},
}
OF_MODEL = ("device", "dtype", "threads", "trust_remote_code")


def read_settings(path: str, overrides: Sequence[str], run: dict[str, Any] | None) -> EntropyConfig:
    """The checked settings; `path` is the model's, `run` the configuration it was trained with."""
    base: dict[str, Any] = {"model": {"path": path}}
    base |= {
        key: run[section][leaf]
        for key, (section, leaf) in FROM_RUN.items()
        if run and leaf in run.get(section, {})
    }
    plain: list[str] = []
    for word in overrides:
        key, equals, value = word.partition("=")
        if key in ("data", "out") and equals:  # paths are taken as they are, commas and all
            base[key] = value
        elif key == "model.path":
            raise ConfigError(
                f"{word}: the model is the first word: postgrad analyze entropy MODEL data=..."
            )
        else:
            plain.append(f"model.{word}" if key in OF_MODEL else word)
    return read_words(EntropyConfig, plain, base)


def stored_pairs(config: EntropyConfig, tokenizer: Any) -> list[Pair] | None:
    """Prompt and response ids of the data; None when it holds problems.

    Raises:
        ConfigError: the data is there but cannot be used.
    """
    path = Path(config.data).expanduser()
    if (path / "rollouts").is_dir():
        return _parquet_pairs(_rollouts_of(path, config.step))
    if path.is_dir() and (path / "summary.json").is_file():  # a folder of postgrad eval
        return [
            pair for file in sorted(path.glob("*.jsonl")) for pair in _eval_pairs(file, tokenizer)
        ]
    if path.suffix == ".parquet" and path.is_file() and _holds_ids(path):
        return _parquet_pairs(path)
    if (
        path.suffix == ".jsonl"
        and path.is_file()
        and "tokens" in next((row for _, row in read_rows(path)), {})
    ):
        return list(_eval_pairs(path, tokenizer))
    return None


def _rollouts_of(run: Path, step: int) -> Path:
    files = sorted((run / "rollouts").glob("step-*.parquet"))
    if not files:
        raise ConfigError(f"data={run} has no rollouts yet; train it first, or give problems")
    file = run / "rollouts" / f"step-{step:06d}.parquet" if step else files[-1]
    if file not in files:
        first, last = (int(f.stem.removeprefix("step-")) for f in (files[0], files[-1]))
        raise ConfigError(f"step={step}: {run} has rollouts of steps {first} to {last}")
    return file


def _schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"data={file} is not a parquet file: {' '.join(str(error).split())[:150]}"
        ) from error


def _holds_ids(file: Path) -> bool:
    types = {f.name: f.type for f in _schema(file)}
    return all(
        name in types
        and pa.types.is_list(types[name])
        and pa.types.is_integer(types[name].value_type)
        for name in ("prompt", "response")
    )


def _parquet_pairs(file: Path) -> list[Pair]:
    if not _holds_ids(file):
        raise ConfigError(f"data={file} has no columns prompt and response of token ids")
    table = pq.read_table(file, columns=["prompt", "response"])
    return list(zip(table["prompt"].to_pylist(), table["response"].to_pylist(), strict=True))


def _eval_pairs(file: Path, tokenizer: Any) -> Iterator[Pair]:
    """Lines of postgrad eval: the response's ids, and the prompt's text, which is what its ids were made from."""
    for place, row in read_rows(file):
        if not isinstance(row.get("prompt"), str) or not isinstance(row.get("tokens"), list):
            raise ConfigError(
                f"{file}, {place}: no prompt and tokens; a line of postgrad eval has both"
            )
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
        if tokenizer.decode(prompt, clean_up_tokenization_spaces=False) != row["prompt"]:
            raise ConfigError(
                f"{file}, {place}: the prompt is not made of this model's tokens; give the model that answered"
            )
        yield prompt, row["tokens"]


def spread(items: list[Any], count: int) -> list[Any]:
    """`count` of the items, evenly over all of them; 0: all."""
    if not count or count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]


def make_batch(pairs: Sequence[Pair], vocabulary: int, context: int, data: str) -> Batch:
    """The rows with a prompt and a response, checked against the model.

    Raises:
        ConfigError: nothing is left, ids the model does not have, rows it cannot read.
    """
    pairs = [pair for pair in pairs if pair[0] and pair[1]]
    if not pairs:
        raise ConfigError(f"data={data} has no response with tokens in it")
    largest = max(max(max(prompt), max(response)) for prompt, response in pairs)
    if largest >= vocabulary:
        raise ConfigError(
            f"data={data} holds token {largest}, the model has {vocabulary}; they come from another tokenizer"
        )
    longest = max(len(prompt) + len(response) - 1 for prompt, response in pairs)
    if longest > context:
        raise ConfigError(
            f"data={data} has a row of {longest} tokens, the model's context is {context}"
        )
    return Batch.of(
        [Trajectory(f"row{i}", prompt, response, i) for i, (prompt, response) in enumerate(pairs)]
    )


def read_problems(config: EntropyConfig, prompts: Prompts) -> list[Problem]:
    problems, _ = prompts.drop_overlong(load_problems(config.data))
    return spread(problems, -(-config.rows // config.samples))


def sample_pairs(
    config: EntropyConfig, engine: Engine, prompts: Prompts, problems: Sequence[Problem]
) -> list[Pair]:
    """Responses of the model itself."""
    requests = [
        Request(
            prompts.encode(problem),
            [trajectory_seed(config.seed, 0, problem.uid, i) for i in range(config.samples)],
        )
        for problem in problems
    ]
    answers = engine.generate(requests, Sampling(config.temperature, config.max_response_tokens))
    return [
        (request.prompt, done.tokens)
        for request, group in zip(requests, answers, strict=True)
        for done in group
    ]


def store_pairs(pairs: Sequence[Pair], file: Path) -> None:
    """As a parquet of rollouts, which the same command reads as data."""
    kind = pa.list_(pa.int64())
    table = pa.table(
        {
            "prompt": pa.array([p for p, _ in pairs], kind),
            "response": pa.array([r for _, r in pairs], kind),
        }
    )
    try:
        with atomic_file(file) as temporary:
            pq.write_table(table, temporary)
    except OSError as error:
        raise RunError(f"{file} could not be written: {error.strerror or error}") from error
