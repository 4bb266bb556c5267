"""The data sets that `postgrad data prepare` knows: one table, one entry each, one converter for each layout of columns.

A set of your own needs no entry: `own` takes any file that load_problems reads.
"""

from postgrad.data.prepare.base import Context, DataSet, Draft, Option
from postgrad.data.prepare.chat import CHAT
from postgrad.data.prepare.choice import CHOICE
from postgrad.data.prepare.code import CODE
from postgrad.data.prepare.maths import MATHS
from postgrad.data.rows import Row
from postgrad.data.schemas import recognize
from postgrad.data.styles import question_of
from postgrad.errors import ConfigError, did_you_mean
from postgrad.problem import Problem


def problem_draft(problem: Problem) -> Draft:
    """A problem that was read from a file of a known schema."""
    extra, reward = dict(problem.extra), problem.extra.get("reward_model") or {}
    info = {
        key: value for key, value in (extra.get("extra_info") or {}).items() if value is not None
    }
    info |= {
        key: extra[key]
        for key in ("difficulty", "subject", "level", "topic", "options")
        if extra.get(key) is not None
    }
    turns = [message["role"] for message in problem.messages if message["role"] != "system"]
    return Draft(
        question_of(problem.messages) if turns == ["user"] else problem.messages[-1]["content"],
        problem.ground_truth,
        problem.demonstrations,
        {
            key: value
            for key, value in info.items()
            if key not in ("split", "index", "question", "raw_problem")
        },
        {key: str(value) for key, value in reward.items() if key != "style" and value is not None},
        {key: extra[key] for key in ("chosen", "rejected") if key in extra},
        dialogue=problem.messages,
        data_source=problem.data_source,
    )


def own(row: Row, context: Context) -> Draft:
    return problem_draft(recognize(row).convert(row, context.stem))


SETS: dict[str, DataSet] = {
    **MATHS,
    **CHOICE,
    **CHAT,
    **CODE,
    "own": DataSet(
        "files of your own in any schema that training reads", "", {"train": ()}, own, ""
    ),
}
# Words of every set.
COMMON: dict[str, Option] = {
    "split": Option("", "which split; the first of the table unless given"),
    "style": Option("", "prompt style; the set's own unless given"),
    "source": Option("", "keep the rows of one data_source, of files that hold several"),
    "n": Option(0, "keep the first so many problems; 0: all"),
    "duplicates": Option("drop", "problems that repeat another", ("drop", "keep")),
    "data_source": Option("", "write this name, which chooses the verifier, instead of the set's"),
}


def find_set(name: str) -> DataSet:
    """An entry of the table; `hh-rlhf` is `hh_rlhf`."""
    same = {known.replace("-", "_"): known for known in SETS}
    known = same.get(name.lower().replace("-", "_"))
    if known is None:
        raise ConfigError(f"no data set {name}; {did_you_mean(name, SETS)}")
    return SETS[known]
