"""`data prepare`: from the files of a data set to one parquet file in one schema, the same bytes each time.

    files ─► rows ─► the set's converter (Draft, or dropped with a reason) ─► prompt style ─► uid ─► parquet with its own story

The story stands in the file's metadata under `postgrad`: the set, the files and their digests, the options, what was dropped and why.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from postgrad.data.prepare.base import Context, DataSet, Draft, Drop
from postgrad.data.prepare.catalog import COMMON, find_set, problem_draft
from postgrad.data.prepare.hub import data_files, fetch, matching
from postgrad.data.readers import exists, extension, missing, one_line, read_rows
from postgrad.data.rows import Row, RowError, user_turn
from postgrad.data.schemas import SCHEMAS
from postgrad.data.styles import OWN, Messages, Style, find_style, styled
from postgrad.data.uid import content_uid
from postgrad.errors import ConfigError, did_you_mean
from postgrad.files import atomic_file

CHUNK = (
    1000  # rows turned into a table at once: Python's objects take ten times the memory of Arrow's
)
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
STORY = b"postgrad"
VERL = SCHEMAS[0]


@dataclass
class Tally:
    """What became of the rows that were read."""

    read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # where a reason was met first

    def drop(self, reason: str, place: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.first.setdefault(reason, place)


@dataclass(frozen=True)
class PrepareRequest:
    """What `prepare` was asked for, every word checked."""

    name: str
    data_set: DataSet
    split: str
    style_name: str
    style: Style
    options: dict[str, Any]
    count_tokens: Callable[[str], int] | None = None


@dataclass(frozen=True)
class Prepared:
    """What was written: the table's size, the story that is in its metadata, and where each reason was met first."""

    path: Path
    provenance: dict[str, Any]
    first: dict[str, str]
    unchanged: bool


def parse_request(
    name: str, words: dict[str, str], count_tokens: Callable[[str], int] | None = None
) -> PrepareRequest:
    """Check the set's name, its split, its style and every option.

    Raises:
        ConfigError: names the word and the nearest right one.
    """
    data_set = find_set(name)
    known = COMMON | data_set.options
    options: dict[str, Any] = {key: option.default for key, option in known.items()}
    for key, value in words.items():
        if key not in known:
            raise ConfigError(
                f"{name} has no option {key}; {did_you_mean(key, [*known, 'from', 'out', 'tokenizer'])}"
            )
        options[key] = known[key].read(key, value)
    split, style = (
        options.pop("split") or next(iter(data_set.splits)),
        options.pop("style") or data_set.style,
    )
    if split not in data_set.splits and data_set.repo:
        raise ConfigError(f"{name} has no split {split}; {did_you_mean(split, data_set.splits)}")
    return PrepareRequest(
        name.lower(), data_set, split, style, find_style(style, "style"), options, count_tokens
    )


def find_files(
    request: PrepareRequest, place: str, patterns: str = "", repo: str = "", revision: str = ""
) -> tuple[list[tuple[str, Path]], str]:
    """The files to read as (name, path), and the hub's commit or "".

    Args:
        place: `hub`, a folder, or files with commas between.
        patterns: of files below the folder or repository, with commas between, in place of the set's own.
    """
    chosen = (
        tuple(patterns.split(",")) if patterns else request.data_set.splits.get(request.split, ())
    )
    if place == "hub":
        repo = repo or request.data_set.repo
        if not repo:
            raise ConfigError(f"{request.name} is on no hub; give from=FILE or from=FOLDER")
        folder, files, commit = fetch(repo, chosen, revision)
        return [(path.relative_to(folder).as_posix(), path) for path in files], commit
    parts = (
        [place] if exists(Path(place).expanduser()) else [part.strip() for part in place.split(",")]
    )
    found: list[tuple[str, Path]] = []
    for part in parts:
        path = Path(part).expanduser()
        if not exists(path):
            raise ConfigError(missing(path))
        found += (
            _in_folder(request, path, chosen, bool(patterns))
            if path.is_dir()
            else [(path.name, path)]
        )
    return found, ""


def _in_folder(
    request: PrepareRequest, folder: Path, patterns: tuple[str, ...], only: bool
) -> list[tuple[str, Path]]:
    """The set's files in a folder: named as on the hub, else after the set, else after the split, else all there are."""
    files = matching(folder, patterns)
    for local in (
        []
        if only or files
        else [*(request.data_set.local or (f"*{request.name}*",)), f"*{request.split}*", "*"]
    ):
        named = [path for path in data_files(folder) if fnmatchcase(path.name.lower(), local)]
        of_split = [path for path in named if request.split in path.name.lower()]
        if files := of_split or named:
            break
    if not files:
        there = ", ".join(path.name for path in data_files(folder)[:6]) or "none"
        raise ConfigError(
            f"{folder}: no file of {request.name} (data files there: {there}); give from=FILE"
        )
    return [(path.relative_to(folder).as_posix(), path) for path in files]


def prepare(
    request: PrepareRequest,
    files: list[tuple[str, Path]],
    commit: str,
    out: Path,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Prepared:
    """Read, convert and write. `progress` is told of every so many rows that were read.

    Raises:
        ConfigError: a file cannot be read, nothing is left, or `out` exists with other content and `overwrite` is False.
    """
    if extension(out) != ".parquet":
        raise ConfigError(
            f"out={out} must end in .parquet; `postgrad data export` writes csv and jsonl"
        )
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"out={out}: no folder {out.parent}; make it first")
    tally = Tally()
    tables = list(_tables(_problems(request, files, tally, progress)))
    tally.kept = sum(table.num_rows for table in tables)
    if not tables:
        reasons = (
            "; ".join(f"{count} {reason}" for reason, count in _by_count(tally.dropped))
            or "the files have no rows"
        )
        raise ConfigError(f"{request.name}: none of {tally.read} rows can be kept: {reasons}"[:600])
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise ConfigError(
            f"{request.name}: the rows' columns do not fit together ({one_line(error)})"
        ) from error
    if request.data_set.divide:
        table = _divided(request, table, tally)
    if count := request.options["n"]:
        table = table.slice(0, count)
        tally.kept = table.num_rows
    provenance = _story(request, files, commit, tally)
    table = table.replace_schema_metadata(
        {STORY: json.dumps(provenance, ensure_ascii=False, sort_keys=True)}
    )
    unchanged = _write(table, out, overwrite)
    return Prepared(out, provenance, tally.first, unchanged)


def _problems(
    request: PrepareRequest,
    files: list[tuple[str, Path]],
    tally: Tally,
    progress: Callable[[int], None],
) -> Iterator[Row]:
    """The rows of the new file, one after the other."""
    seen: set[str] = set()
    sources: dict[str, int] = {}
    for name, path in files:
        for place, row in read_rows(path):
            context = Context(
                request.options, request.split, tally.read, name, request.count_tokens
            )
            tally.read += 1
            if tally.read % CHUNK == 0:
                progress(CHUNK)
            try:
                draft = _draft(request, row, context, sources)
                uid, made = _finished(request, draft, context)
                if uid in seen and request.options["duplicates"] == "drop":
                    raise Drop("repeats another problem: the same question and answer")
            except (Drop, RowError, ConfigError) as reason:
                tally.drop(str(reason), f"{name}: {place}")
                continue
            copy, made["uid"] = 1, uid
            while made["uid"] in seen:
                copy += 1
                made["uid"] = f"{uid}-{copy}"
            seen.add(made["uid"])
            yield made
    progress(tally.read % CHUNK)
    if len(sources) > 1 and request.data_set.data_source and not request.options["source"]:
        held = ", ".join(f"{source} ({count})" for source, count in sorted(sources.items()))
        raise ConfigError(
            f"the files hold several data sources: {held}; say which is {request.name} with source=NAME"
        )


def _draft(request: PrepareRequest, row: Row, context: Context, sources: dict[str, int]) -> Draft:
    """A row in the set's own layout, or one that is in our schema already."""
    if not VERL.fits(row):
        return request.data_set.convert(row, context)
    problem = VERL.convert(row, context.stem)
    sources[problem.data_source] = sources.get(problem.data_source, 0) + 1
    if request.options["source"] not in ("", problem.data_source):
        raise Drop("of another data_source")
    return problem_draft(problem)


def _finished(request: PrepareRequest, draft: Draft, context: Context) -> tuple[str, Row]:
    """(uid, the row as it is written). The uid does not depend on the prompt style."""
    source = request.options["data_source"] or request.data_set.data_source or draft.data_source
    draft = replace(draft, question=draft.question.strip())
    messages = _messages(request.style, draft)
    row = {
        "uid": "",
        "data_source": source,
        "prompt": list(messages),
        "target": [{"role": "assistant", "content": text} for text in draft.demonstrations] or None,
        "ability": request.data_set.ability,
        "reward_model": {
            "style": request.data_set.judged,
            "ground_truth": draft.truth or None,
            **draft.reward,
        },
        "extra_info": {
            "split": request.split,
            "index": context.index,
            "question": draft.question,
            **draft.extra,
        },
        **draft.columns,
    }
    return content_uid(source, user_turn(draft.question), draft.truth), row


def _messages(style: Style, draft: Draft) -> Messages:
    if draft.dialogue and (style is OWN or len(draft.dialogue) > 2):
        return styled(style, draft.dialogue)
    messages = styled(style, user_turn(draft.question))
    return ({"role": "system", "content": draft.system}, messages[-1]) if draft.system else messages


def _tables(rows: Iterator[Row]) -> Iterator[pa.Table]:
    chunk: list[Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            yield _table(chunk)
            chunk = []
    if chunk:
        yield _table(chunk)


def _table(rows: list[Row]) -> pa.Table:
    rewards = list(dict.fromkeys(key for row in rows for key in row["reward_model"]))
    types = {
        "uid": pa.string(),
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "target": MESSAGES,
        "ability": pa.string(),
        "reward_model": pa.struct([(key, pa.string()) for key in rewards]),
    }
    names = dict.fromkeys(key for row in rows for key in row)
    try:
        return pa.table(
            {name: pa.array([row.get(name) for row in rows], types.get(name)) for name in names}
        )
    except pa.ArrowException as error:
        raise ConfigError(
            f"values of one column have different types ({one_line(error)}); write them one way"
        ) from error


def _divided(request: PrepareRequest, table: pa.Table, tally: Tally) -> pa.Table:
    """The part of the table that is the split, where the set says so itself."""
    info = table["extra_info"].to_pylist()
    groups = [str(row.get(request.data_set.group)) for row in info]
    assert request.data_set.divide
    chosen = request.data_set.divide(
        [row["question"] for row in info], groups, request.options, request.split
    )
    for i in range(table.num_rows):
        if i not in chosen:
            tally.drop(f"in another split than {request.split}", f"row {info[i]['index']}")
    tally.kept = len(chosen)
    if not chosen:
        raise ConfigError(
            f"{request.name}: no problem is left for split={request.split}; give more rows or another split"
        )
    return table.take(pa.array(sorted(chosen)))


def _story(
    request: PrepareRequest, files: list[tuple[str, Path]], commit: str, tally: Tally
) -> dict[str, Any]:
    return {
        "set": request.name,
        "split": request.split,
        "style": request.style_name,
        "repo": request.data_set.repo if commit else "",
        "commit": commit,
        "files": {name: _digest(path) for name, path in files},
        "options": {key: value for key, value in request.options.items() if value not in ("", 0)},
        "read": tally.read,
        "kept": tally.kept,
        "dropped": tally.dropped,
    }


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _write(table: pa.Table, out: Path, overwrite: bool) -> bool:
    """Write the table atomically. Returns whether the file already existed with the same bytes."""
    try:
        with atomic_file(out) as temporary:
            parquet.write_table(table, temporary, compression="zstd")
            same = out.is_file() and _digest(out) == _digest(temporary)
            if out.exists() and not same and not overwrite:
                raise ConfigError(
                    f"out={out} exists with other content; give another out=, or overwrite=true"
                )
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written ({one_line(error)})") from error
    return same


def _by_count(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def describe(prepared: Prepared) -> list[str]:
    """What happened, line by line, for people."""
    provenance = prepared.provenance
    names = list(provenance["files"])
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    origin = (
        f"{provenance['repo']} at {provenance['commit'][:10]}: {shown}"
        if provenance["commit"]
        else shown
    )
    lines = [
        f"{provenance['set']} {provenance['split']}: {provenance['kept']} problems of {provenance['read']} rows from {origin}"
    ]
    for reason, count in _by_count(provenance["dropped"]):
        lines.append(f"  dropped {count}: {reason} (first: {prepared.first[reason]})")
    state = "unchanged" if prepared.unchanged else "written"
    size = prepared.path.stat().st_size
    lines.append(
        f"{state}: {prepared.path} ({size / 1e6:.2f} MB), prompt style {provenance['style']}"
    )
    return lines


def read_provenance(path: Path) -> dict[str, Any]:
    """What a prepared file says of itself; empty for other files."""
    if extension(path) != ".parquet":
        return {}
    try:
        metadata = parquet.read_schema(path).metadata or {}
        return json.loads(metadata.get(STORY, b"{}"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: not a readable parquet file ({one_line(error)}); write or download it again"
        ) from error
