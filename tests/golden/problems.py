"""Golden problems: what each row of layouts.py, and each real file, is read and encoded as.

`problems.jsonl` has one JSON array per line:

    ["row", LAYOUT, NUMBER, PROBLEM, TEXT, DIGEST]    fields that are set; the chat as text; ids
    ["file", NAME, COUNT, DIGEST]                     a real file of ../shared/data
    ["set", NAME, FILE, COUNT, DIGEST]                a prepared set of test_prepare.py

TEXT is the decoded chat; what is trained on stands in ⟦ ⟧. DIGEST covers ids and masks with a chat
template and as plain text, or the contents of all problems or rows.
"""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
from layouts import ITEMS, LAYOUTS
from test_prepare import LAYOUTS as PREPARED
from test_prepare import prepared_rows, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from postgrad.data.encode.encoder import Encoder
from postgrad.data.problems import load_problems
from postgrad.data.rows.messages import conversation_of
from postgrad.problem import Problem

GOLDEN = Path(__file__).parent / "problems.jsonl"
REAL_DATA = Path(
    os.environ.get("POSTGRAD_REAL_DATA", Path(__file__).parents[2].parent / "shared" / "data")
)
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Line = list[Any]
Row = tuple[list[int], list[int], list[bool]]  # prompt, response, loss mask


@lru_cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and the special tokens of TEMPLATE."""
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[2:],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def encode(problem: Problem, template: str) -> dict[str, Row]:
    """Return the rows that training makes of a problem: prompt, response and mask by their use."""
    prompts = Encoder(byte_tokenizer(), template, max_prompt_tokens=4096)
    rows: dict[str, Row] = {}
    conversation = conversation_of(problem)
    if conversation is None or not conversation.text:
        prompt = prompts.prompt(problem)
        pair = [problem.extra.get(name) for name in ("chosen", "rejected")]
        for number, text in enumerate(text for text in (*problem.demonstrations, *pair) if text):
            response = prompts.reply(problem, text)
            rows[f"reply {number}"] = (prompt, response, [True] * len(response))
        rows = rows or {"prompt": (prompt, [], [])}
    if conversation is not None:
        uses = ("all",) if conversation.text else ("last",)
        if template == "chat" and not conversation.text:
            uses = ("last", "all")  # plain text has no turns to choose
        for train_on in uses:
            row = prompts.conversation(problem, train_on)
            rows[f"conversation {train_on}"] = (row.prompt, row.response, row.loss_mask)
    return rows


def row_lines() -> Iterator[Line]:
    """Yield a line per layout and row."""
    with tempfile.TemporaryDirectory() as folder:
        for layout, make in LAYOUTS.items():
            path = Path(folder) / f"{layout}.jsonl"
            path.write_text("".join(json.dumps(make(item)) + "\n" for item in ITEMS))
            for number, problem in enumerate(load_problems(str(path))):
                chat, plain = encode(problem, "chat"), encode(problem, "plain")
                text = show(next(reversed(chat.values())))
                yield ["row", layout, number, fields_of(problem), text, digest([chat, plain])]


def file_lines() -> Iterator[Line]:
    """Yield a line per real file; none without them."""
    for path in sorted(REAL_DATA.rglob("*.*")):
        if path.suffix in (".jsonl", ".parquet", ".csv"):
            problems = load_problems(str(path))
            contents = digest([fields_of(problem) for problem in problems])
            yield ["file", str(path.relative_to(REAL_DATA)), len(problems), contents]


def set_lines() -> Iterator[Line]:
    """Yield a line per prepared set: of its test row, and of the real files."""
    real = {"gsm8k": "gsm8k/train.jsonl", "deepmath": "bupo/deepmath-5k.parquet"}
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out.parquet"
        for name, file, row, *_ in PREPARED:
            hub = Path(temporary) / name
            write(hub / file, row)
            options = {"split": "test"} if "/test-" in file and name == "hendrycks_math" else {}
            rows = prepared_rows(name, hub, out, **options)
            yield ["set", name, file, len(rows), table_digest(out)]
        for name, file in real.items():
            if (REAL_DATA / file).is_file():
                rows = prepared_rows(name, REAL_DATA / file, out)
                yield ["set", name, f"real {file}", len(rows), table_digest(out)]


def fields_of(problem: Problem) -> dict[str, Any]:
    """Return the fields of a problem that are set, as plain values."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Problem):
        value = getattr(problem, field.name)
        if dataclasses.is_dataclass(value):
            value = {key: one for key, one in vars(value).items() if one}
        if field.compare and value:
            fields[field.name] = json.loads(json.dumps(value, default=str))
    return fields


def show(row: Row) -> str:
    """Return a row as text, with what is trained on in ⟦ ⟧."""
    prompt, response, mask = row
    pieces: list[tuple[bool, list[int]]] = [(False, list(prompt))]
    for token, is_trained in zip(response, mask, strict=True):
        if pieces[-1][0] != is_trained:
            pieces.append((is_trained, []))
        pieces[-1][1].append(token)
    texts = [(is_trained, byte_tokenizer().decode(ids)) for is_trained, ids in pieces]
    return "".join(f"⟦{text}⟧" if is_trained else text for is_trained, text in texts)


def table_digest(path: Path) -> str:
    """Return a digest of the columns' names and the rows of a parquet file."""
    table = parquet.read_table(path)
    return digest([table.column_names, table.to_pylist()])


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read(kind: str) -> list[Line]:
    """Return the recorded lines of a kind."""
    lines = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    return [line for line in lines if line[0] == kind]


def write_golden() -> None:
    """Write problems.jsonl. Lines of real files stay as they are where the files are missing."""
    found = [*row_lines(), *file_lines(), *set_lines()]
    if not REAL_DATA.is_dir():
        found += [line for line in [*read("file"), *read("set")] if is_real(line)]
    texts = [json.dumps(line, sort_keys=True, ensure_ascii=False) for line in found]
    GOLDEN.write_text("\n".join(texts) + "\n")


def is_real(line: Line) -> bool:
    """Return whether a line needs the real files."""
    return line[0] == "file" or line[2].startswith("real ")
