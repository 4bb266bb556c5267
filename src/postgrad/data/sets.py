"""Several data sets in one setting, each with a name: `a.jsonl,b.parquet` or `maths=a.jsonl,science=b.parquet`."""

import re
from collections.abc import Sequence
from pathlib import Path

from postgrad.data.readers import exists, extension
from postgrad.errors import ConfigError
from postgrad.problem import Problem

NAMED = re.compile(r"([A-Za-z0-9_.-]+)=(.+)", re.DOTALL)
# File names that say which part of a set it is but not which set: the folder's name is put before them.
PARTS = ("train", "test", "valid", "validation", "val", "dev", "data", "problems")


def split_sets(source: str) -> dict[str, str]:
    """Name -> source of each set. A set without a name is called after its file; gsm8k/test.jsonl is gsm8k-test.

    Raises:
        ConfigError: a part is empty, or two sets have one name.
    """
    if exists(Path(source).expanduser()):
        return {_name(source): source}
    sets: dict[str, str] = {}
    for part in (part.strip() for part in source.split(",")):
        if not part:
            raise ConfigError(
                f"data source {source!r} has an empty part; give files, folders or arithmetic:LEVEL with commas between"
            )
        named = None if exists(Path(part).expanduser()) else NAMED.fullmatch(part)
        name, place = (named[1], named[2]) if named else (_name(part), part)
        if name in sets:
            raise ConfigError(
                f"two data sets are called {name}; name them yourself: NAME1={sets[name]},NAME2={place}"
            )
        sets[name] = place
    return sets


def _name(part: str) -> str:
    if part.split(":")[0] == "arithmetic":
        return part.replace(":", "-")
    path = Path(part).expanduser()
    stem = path.name[: -len(extension(path))] if extension(path) else path.name
    parent = path.absolute().parent.name
    name = f"{parent}-{stem}" if stem.lower() in PARTS and parent else stem
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "data"


def find_test_set_evidence(source: str, problems: Sequence[Problem]) -> str:
    """How one can tell that this is a test set, in words; "" when nothing says so.

    Looked at are the rows' own `split` (also in `extra_info`), the split of an arithmetic source, and the word `test` in the file's name.
    """
    for problem in problems:
        info = problem.extra.get("extra_info")
        split = problem.extra.get("split") or (
            info.get("split") if isinstance(info, dict) else None
        )
        if isinstance(split, str) and split.strip().lower() == "test":
            return f"the split of problem {problem.uid} is test"
    if source.split(":")[0] == "arithmetic":
        return f"{source} is the split test" if source.split(":")[3:4] == ["test"] else ""
    words = re.split(r"[^a-z0-9]+", Path(source).name.lower())
    return f"the name {Path(source).name} says test" if "test" in words else ""
