"""Token ids for an entropy analysis: from a run or an evaluation, or sampled and then stored."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from postgrad.analysis.settings import EntropyConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.data.problems import load_problems
from postgrad.data.rollout_folder import rollout_files
from postgrad.data.rows.files import read_rows
from postgrad.errors import Conflict, Missing, RunError, TooLarge, UnknownName, Unreadable
from postgrad.files import atomic_file
from postgrad.problem import Problem
from postgrad.rollout.engine import Engine, Request, Sampling, trajectory_seed
from postgrad.types import Batch, Trajectory

T = TypeVar("T")
Pair = tuple[list[int], list[int]]  # token ids of a prompt and of its response
IDS = pa.list_(pa.int64())


def stored_pairs(config: EntropyConfig, tokenizer: Any) -> list[Pair] | None:
    """Return the prompt and response ids stored in `data`; None if `data` is problems.

    Raises:
        ConfigError: the data exists but cannot be used.
    """
    path = Path(config.data).expanduser()
    if (path / "rollouts").is_dir():
        return _parquet_pairs(_rollout_file(path, config.step))
    if path.is_dir() and (path / "summary.json").is_file():  # a folder of postgrad eval
        pairs: list[Pair] = []
        for file in sorted(path.glob("*.jsonl")):
            pairs += _eval_pairs(file, tokenizer)
        return pairs
    if path.suffix == ".parquet" and path.is_file() and _has_token_ids(path):
        return _parquet_pairs(path)
    if path.suffix == ".jsonl" and path.is_file() and _is_eval_file(path):
        return list(_eval_pairs(path, tokenizer))
    return None


def _rollout_file(run: Path, step: int) -> Path:
    """Return the rollout file of a run's step; step 0 is the latest."""
    files = rollout_files(run / "rollouts")
    if not files:
        raise Missing(f"data={run} has no rollouts yet; train it first, or give problems")
    first, last = min(files), max(files)
    if step and step not in files:
        raise UnknownName(f"step={step}: {run} has rollouts of steps {first} to {last}")
    return files[step or last]


def _has_token_ids(file: Path) -> bool:
    """Return whether the columns prompt and response are lists of integers."""
    try:
        schema = pq.read_schema(file)
    except (pa.ArrowInvalid, OSError) as error:
        reason = " ".join(str(error).split())[:150]
        raise Unreadable(f"data={file} is not a parquet file: {reason}") from error
    types = {column.name: column.type for column in schema}
    return all(_is_integer_list(types.get(name)) for name in ("prompt", "response"))


def _is_integer_list(type: pa.DataType | None) -> bool:
    return type is not None and pa.types.is_list(type) and pa.types.is_integer(type.value_type)


def _parquet_pairs(file: Path) -> list[Pair]:
    if not _has_token_ids(file):
        raise Missing(
            f"data={file} has no token ids in columns prompt and response; give a file of rollouts"
        )
    table = pq.read_table(file, columns=["prompt", "response"])
    return list(zip(table["prompt"].to_pylist(), table["response"].to_pylist(), strict=True))


def _is_eval_file(file: Path) -> bool:
    """Return whether the first line has the response's token ids, as postgrad eval writes."""
    for _, row in read_rows(file):
        return "tokens" in row
    return False


def _eval_pairs(file: Path, tokenizer: Any) -> Iterator[Pair]:
    """Yield the pairs of a result file of postgrad eval.

    The file has the response's ids and the prompt's text, so the prompt is encoded again.
    """
    for location, row in read_rows(file):
        text = row.get("prompt")
        tokens = row.get("tokens")
        if not isinstance(text, str) or not isinstance(tokens, list):
            raise Missing(
                f"{file}, {location}: no prompt or no tokens; give a result file of postgrad eval"
            )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(prompt, clean_up_tokenization_spaces=False) != text:
            raise Conflict(
                f"{file}, {location}: this model's tokenizer cannot encode the prompt; "
                "give the model that wrote the responses"
            )
        yield prompt, tokens


def evenly_spaced(items: list[T], count: int) -> list[T]:
    """Return `count` items at even intervals; all of them if `count` is 0."""
    if not count or count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]


def make_batch(pairs: Sequence[Pair], vocabulary: int, context: int, data: str) -> Batch:
    """Return the pairs as a batch, without those that have no prompt or no response.

    `vocabulary` and `context` are the model's limits in tokens.

    Raises:
        ConfigError: no pair is left, a token id is not in the vocabulary, or a row is longer
            than the context.
    """
    pairs = [pair for pair in pairs if pair[0] and pair[1]]
    if not pairs:
        raise Missing(f"data={data} has no response with tokens")
    largest = max(max(*prompt, *response) for prompt, response in pairs)
    if largest >= vocabulary:
        raise Conflict(
            f"data={data} has token {largest}, the model's vocabulary is {vocabulary}; "
            "give data of the same tokenizer"
        )
    longest = max(len(prompt) + len(response) - 1 for prompt, response in pairs)
    if longest > context:
        raise TooLarge(
            f"data={data} has a row of {longest} tokens, the model's context is {context}"
        )
    rows = [
        Trajectory(f"row{number}", prompt, response, number)
        for number, (prompt, response) in enumerate(pairs)
    ]
    return Batch.of(rows)


def read_problems(config: EntropyConfig, encoder: Encoder, context: int) -> list[Problem]:
    """Return as many problems, evenly spaced in the data, as `rows` responses need.

    Raises ConfigError if a prompt and a response do not fit the model's context.
    """
    problems = load_problems(config.data)
    longest = max(len(encoder.prompt(problem)) for problem in problems)
    if longest >= context:
        raise TooLarge(
            f"data={config.data} has a prompt of {longest} tokens, the model's context is {context}"
        )
    if longest + config.max_response_tokens > context:
        raise TooLarge(
            f"max_response_tokens={config.max_response_tokens} and a prompt of {longest} tokens "
            f"exceed the model's context of {context}; set max_response_tokens={context - longest}"
        )
    num_problems = -(-config.rows // config.samples)
    return evenly_spaced(problems, num_problems)


def sample_pairs(
    config: EntropyConfig, engine: Engine, encoder: Encoder, problems: Sequence[Problem]
) -> list[Pair]:
    """Return `samples` responses per problem, sampled from the model."""
    requests: list[Request] = []
    for problem in problems:
        seeds = [trajectory_seed(config.seed, 0, problem.uid, i) for i in range(config.samples)]
        requests.append(Request(encoder.prompt(problem), seeds))
    groups = engine.generate(requests, Sampling(config.temperature, config.max_response_tokens))
    pairs: list[Pair] = []
    for request, group in zip(requests, groups, strict=True):
        pairs += [(request.prompt, generation.tokens) for generation in group]
    return pairs


def store_pairs(pairs: Sequence[Pair], file: Path) -> None:
    """Write the pairs as a parquet file of rollouts, which the command accepts as `data`."""
    columns = {
        "prompt": pa.array([prompt for prompt, _ in pairs], IDS),
        "response": pa.array([response for _, response in pairs], IDS),
    }
    try:
        with atomic_file(file) as temporary:
            pq.write_table(pa.table(columns), temporary)
    except OSError as error:
        raise RunError(f"{file} could not be written: {error.strerror or error}") from error
