"""Token ids for an entropy analysis: those of a run or of an evaluation."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from postgrad.analysis.settings import EntropyConfig
from postgrad.data.rollout_folder import rollout_files
from postgrad.data.rows.files import read_rows
from postgrad.errors import Conflict, Missing, TooLarge, UnknownName, Unreadable
from postgrad.types import Batch, Trajectory

T = TypeVar("T")
Pair = tuple[list[int], list[int]]  # token ids of a prompt and of its response


def stored_pairs(config: EntropyConfig, tokenizer: Any) -> list[Pair]:
    """Return the prompt and response ids stored in `data`. Raises ConfigError."""
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
    raise Missing(
        f"data={config.data} has no token ids of responses; answer problems with postgrad eval "
        "MODEL data=SET out=FOLDER, and give that folder"
    )


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
