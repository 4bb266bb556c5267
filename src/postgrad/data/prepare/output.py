"""The prepared parquet file: its provenance, writing it, describing it.

The provenance is JSON in the file's metadata under `postgrad`: the data set, the files and their
digests, the options, and how many rows were dropped for which reason.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

from postgrad.data.prepare.request import PrepareRequest
from postgrad.data.rows.files import extension
from postgrad.errors import Unreadable, Unwritable, first_line
from postgrad.files import atomic_file

METADATA_KEY = b"postgrad"


@dataclass
class RowCounts:
    """How many rows were read, kept and dropped.

    Attributes:
        read: rows of the input files.
        kept: problems in the prepared file.
        dropped: reason -> number of rows.
        first_dropped: reason -> location of the first row that was dropped for it.
    """

    read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first_dropped: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, location: str) -> None:
        """Count one dropped row."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.first_dropped.setdefault(reason, location)


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`.

    Attributes:
        path: the file that was written.
        provenance: what its metadata hold.
        first_dropped: reason -> location of the first row that was dropped for it.
        unchanged: the file existed with the same bytes.
    """

    path: Path
    provenance: dict[str, Any]
    first_dropped: dict[str, str]
    unchanged: bool


def make_provenance(
    request: PrepareRequest, files: list[tuple[str, Path]], commit: str, counts: RowCounts
) -> dict[str, Any]:
    """Return the provenance of a prepared file; `columns` only if some were renamed."""
    renamed = {"columns": request.columns} if request.columns else {}
    return {
        "set": request.name,
        "split": request.split,
        "style": request.style_name,
        "repo": request.data_set.repo if commit else "",
        "commit": commit,
        "files": {name: _digest(path) for name, path in files},
        "options": {key: value for key, value in request.options.items() if value not in ("", 0)},
        **renamed,
        "read": counts.read,
        "kept": counts.kept,
        "dropped": counts.dropped,
    }


def read_provenance(path: Path) -> dict[str, Any]:
    """Return the provenance of a prepared file; empty for other files."""
    if extension(path) != ".parquet":
        return {}
    try:
        metadata = parquet.read_schema(path).metadata or {}
        return json.loads(metadata.get(METADATA_KEY, b"{}"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Unreadable(
            f"{path}: not a readable parquet file ({first_line(error)}); write or download it again"
        ) from error


def write_table(table: pa.Table, provenance: dict[str, Any], out: Path, overwrite: bool) -> bool:
    """Write the table atomically; return whether the file existed with the same bytes.

    Raises:
        ConfigError: `out` exists with other content and `overwrite` is False, or cannot be written.
    """
    text = json.dumps(provenance, ensure_ascii=False, sort_keys=True)
    table = table.replace_schema_metadata({METADATA_KEY: text})
    try:
        with atomic_file(out) as temporary:
            parquet.write_table(table, temporary, compression="zstd")
            unchanged = out.is_file() and _digest(out) == _digest(temporary)
            if out.exists() and not unchanged and not overwrite:
                raise Unwritable(
                    f"out={out} exists with other content; give another out=, or overwrite=true"
                )
    except OSError as error:
        raise Unwritable(f"out={out} cannot be written ({first_line(error)})") from error
    return unchanged


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sort_by_count(counts: dict[str, int]) -> list[tuple[str, int]]:
    """(reason, count) pairs, the most frequent first."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def describe(prepared: Prepared) -> list[str]:
    """Lines for the terminal: problems kept, rows dropped and why, the file written."""
    provenance = prepared.provenance
    names = list(provenance["files"])
    origin = ", ".join(names[:3])
    if len(names) > 3:
        origin += f" and {len(names) - 3} more"
    if provenance["commit"]:
        origin = f"{provenance['repo']} at {provenance['commit'][:10]}: {origin}"
    lines = [
        f"{provenance['set']} {provenance['split']}: "
        f"{provenance['kept']} problems of {provenance['read']} rows from {origin}"
    ]
    for reason, count in sort_by_count(provenance["dropped"]):
        lines.append(f"  dropped {count}: {reason} (first: {prepared.first_dropped[reason]})")
    state = "unchanged" if prepared.unchanged else "written"
    size = prepared.path.stat().st_size / 1e6
    lines.append(f"{state}: {prepared.path} ({size:.2f} MB), prompt style {provenance['style']}")
    return lines
