"""`postgrad data prepare`: reads the files of a data set and writes one parquet file.

    files ─► rows ─► the data set's converter (a PreparedRow, or dropped with a reason)
          ─► prompt style ─► uid ─► one parquet file with its provenance

The same input gives the same bytes.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from postgrad import phases
from postgrad.data.encode.styles import OWN, Messages, Style, styled
from postgrad.data.prepare.base import Context, Drop, PreparedRow
from postgrad.data.prepare.converters import draft_of_problem
from postgrad.data.prepare.output import (
    Prepared,
    RowCounts,
    make_provenance,
    sort_by_count,
    write_table,
)
from postgrad.data.prepare.request import PrepareRequest
from postgrad.data.rows.files import extension, read_rows
from postgrad.data.rows.shapes import VERL, read_row
from postgrad.data.rows.values import Row, RowError, rename_columns, user_turn
from postgrad.data.uid import content_uid
from postgrad.errors import (
    ConfigError,
    Conflict,
    Damaged,
    Missing,
    Unreadable,
    Unsupported,
    WrongValue,
    first_line,
)

# Rows that are Python objects at the same time: they take ten times the memory of an Arrow table.
CHUNK = 1000
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def prepare(
    request: PrepareRequest,
    files: list[tuple[str, Path]],
    commit: str,
    out: Path,
    overwrite: bool = False,
) -> Prepared:
    """Read, convert and write.

    Args:
        request: what to prepare.
        files: (name, path) of the input files.
        commit: their commit on the hub, or "".
        out: the parquet file to write.
        overwrite: replace a file with other content.

    Raises:
        ConfigError: a file cannot be read, no row is left, or `out` exists with other content and
            `overwrite` is False.
    """
    if extension(out) != ".parquet":
        raise WrongValue(
            f"out={out} must end in .parquet; `postgrad data export` writes csv and jsonl"
        )
    if not out.absolute().parent.is_dir():
        raise Unreadable(f"out={out}: no folder {out.parent}; make it first")
    counts = RowCounts()
    phases.begin(f"reading {request.name}, rows")
    tables = list(_make_tables(_convert_rows(request, files, counts)))
    counts.kept = sum(table.num_rows for table in tables)
    if not tables:
        reasons = [f"{count} {reason}" for reason, count in sort_by_count(counts.dropped)]
        why = "; ".join(reasons) or "the files have no rows"
        raise Damaged(f"{request.name}: none of {counts.read} rows can be kept: {why}"[:600])
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise Damaged(
            f"{request.name}: a column has different types in different rows ({first_line(error)})"
        ) from error
    if request.data_set.select_split:
        table = _select_split(request, table, counts)
    if request.options["n"]:
        table = table.slice(0, request.options["n"])
        counts.kept = table.num_rows
    if request.options.get("pairs") == "similar":
        table = _add_pairs(request, table, counts)
    provenance = make_provenance(request, files, commit, counts)
    unchanged = write_table(table, provenance, out, overwrite)
    return Prepared(out, provenance, counts.first_dropped, unchanged)


def _convert_rows(
    request: PrepareRequest,
    files: list[tuple[str, Path]],
    counts: RowCounts,
) -> Iterator[Row]:
    """Yield the rows of the new file; count what is read and dropped."""
    used_uids: set[str] = set()
    seen: set[tuple[str, str]] = set()
    sources: dict[str, int] = {}
    for name, path in files:
        for location, row in read_rows(path):
            context = Context(
                *(request.options, request.split, counts.read, name),
                *(request.count_tokens, path.parent),
            )
            counts.read += 1
            phases.count(counts.read, 0)
            try:
                if request.columns:
                    row = rename_columns(row, request.columns)
                draft = _make_draft(request, row, context, sources)
                uid, new_row = _make_row(request, draft, context)
                replies = (new_row["target"], *draft.columns.values())
                key = (uid, repr(replies) if request.data_set.compares_replies else "")
                if key in seen and request.options["duplicates"] == "drop":
                    same = "question, answer and replies" if key[1] else "question and answer"
                    raise Drop(f"repeats another problem: the same {same}")
            except (Drop, RowError, ConfigError) as reason:
                counts.drop(str(reason), f"{name}: {location}")
                continue
            new_row["uid"] = _unique_uid(uid, used_uids)
            used_uids.add(new_row["uid"])
            seen.add(key)
            yield new_row
    if len(sources) > 1 and request.data_set.data_source and not request.options["source"]:
        listed = ", ".join(f"{source} ({count})" for source, count in sorted(sources.items()))
        raise Conflict(
            f"the files hold several data sources: {listed}; "
            f"say which one is {request.name} with source=NAME",
            at="source",
        )


def _unique_uid(uid: str, used: set[str]) -> str:
    unique = uid
    copy = 1
    while unique in used:
        copy += 1
        unique = f"{uid}-{copy}"
    return unique


def _make_draft(
    request: PrepareRequest, row: Row, context: Context, sources: dict[str, int]
) -> PreparedRow:
    """Prepare a row in the set's own layout, or in verl's, which `prepare` writes."""
    if not VERL.fits(tuple(row)):
        first, end = request.data_set.slices.get(request.split, (0, None))
        if context.index < first or (end is not None and context.index >= end):
            split = f"which are the split {request.split}"
            raise Drop(f"not in the rows {first} to {(end or 0) - 1}, {split}")
        return request.data_set.convert(row, context)
    problem = read_row(row, context.stem, context.folder)
    sources[problem.data_source] = sources.get(problem.data_source, 0) + 1
    if request.options["source"] not in ("", problem.data_source):
        raise Drop("of another data_source")
    return draft_of_problem(problem)


def _make_row(request: PrepareRequest, draft: PreparedRow, context: Context) -> tuple[str, Row]:
    """(uid, row of the new file). The uid does not depend on the prompt style."""
    data_set = request.data_set
    source = request.options["data_source"] or data_set.data_source or draft.data_source
    draft = replace(draft, question=draft.question.strip())
    target = [{"role": "assistant", "content": text} for text in draft.demonstrations]
    has_replies = bool(target) or "chosen" in draft.columns
    row = {
        "uid": "",
        "data_source": source,
        "prompt": list(_make_messages(request.style, draft)),
        "target": target or None,
        "ability": data_set.ability,
        "reward_model": {
            "style": "model" if has_replies and not draft.truth else data_set.judged,
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
    if draft.images:
        row["images"] = [
            {"bytes": picture.data, "path": picture.place or None} for picture in draft.images
        ]
    return content_uid(source, _asked(draft), draft.truth, draft.images), row


def _asked(draft: PreparedRow) -> Messages:
    """Return the question after the turns before it: a dialogue may end with "Why?"."""
    turns = tuple(message for message in draft.dialogue if message["role"] != "system")
    return turns if len(turns) > 1 else user_turn(draft.question)


def _make_messages(style: Style, draft: PreparedRow) -> Messages:
    if draft.dialogue and (style is OWN or len(draft.dialogue) > 2):
        return styled(style, draft.dialogue)
    messages = styled(style, user_turn(draft.question))
    if draft.system:
        return ({"role": "system", "content": draft.system}, messages[-1])
    return messages


def _make_tables(rows: Iterator[Row]) -> Iterator[pa.Table]:
    chunk: list[Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            yield _make_table(chunk)
            chunk = []
    if chunk:
        yield _make_table(chunk)


def _make_table(rows: list[Row]) -> pa.Table:
    reward_fields = dict.fromkeys(key for row in rows for key in row["reward_model"])
    types = {
        "uid": pa.string(),
        "data_source": pa.string(),
        "prompt": MESSAGES,
        "target": MESSAGES,
        "ability": pa.string(),
        "images": pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        "reward_model": pa.struct([(key, pa.string()) for key in reward_fields]),
    }
    names = dict.fromkeys(key for row in rows for key in row)
    try:
        return pa.table(
            {name: pa.array([row.get(name) for row in rows], types.get(name)) for name in names}
        )
    except pa.ArrowException as error:
        raise Damaged(
            f"a column has values of different types ({first_line(error)}); use one type per column"
        ) from error


def _select_split(request: PrepareRequest, table: pa.Table, counts: RowCounts) -> pa.Table:
    """Return the rows of the split, where the data set's own function says which they are."""
    select_split = request.data_set.select_split
    assert select_split
    info = table["extra_info"].to_pylist()
    questions = [row["question"] for row in info]
    groups = [str(row.get(request.data_set.group)) for row in info]
    selected = select_split(questions, groups, request.options, request.split)
    for i in range(table.num_rows):
        if i not in selected:
            counts.drop(f"in another split than {request.split}", f"row {info[i]['index']}")
    counts.kept = len(selected)
    if not selected:
        raise Missing(
            f"{request.name}: no problem is left for split={request.split}; "
            "give more rows or another split",
            at="split",
        )
    return table.take(pa.array(sorted(selected)))


def _add_pairs(request: PrepareRequest, table: pa.Table, counts: RowCounts) -> pa.Table:
    """Add paired_similar_q and paired_similar_q_gt; drop problems without a similar one.

    The problems that are equal in `pair_by` form a cycle: each is paired with the next.
    """
    if "images" in table.column_names:
        raise Unsupported("pairs=similar: a similar problem cannot bring its own pictures")
    rows = table.to_pylist()
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        key = tuple(row["extra_info"].get(name) for name in request.data_set.pair_by)
        groups.setdefault(key, []).append(i)
    partner: dict[int, int] = {}
    for members in groups.values():
        if len(members) > 1:
            partner |= dict(zip(members, [*members[1:], members[0]], strict=True))
    kept = [i for i in range(len(rows)) if i in partner]
    for i in range(len(rows)):
        if i not in partner:
            place = f"row {rows[i]['extra_info']['index']}"
            counts.drop("no other problem of its type and level", place)
    counts.kept = len(kept)
    if not kept:
        raise Missing(f"{request.name}: no two problems are similar; give more rows")
    others = [rows[partner[i]] for i in kept]
    table = table.take(pa.array(kept))
    questions = pa.array([other["extra_info"]["question"] for other in others])
    truths = pa.array([other["reward_model"]["ground_truth"] for other in others])
    table = table.append_column("paired_similar_q", questions)
    return table.append_column("paired_similar_q_gt", truths)
