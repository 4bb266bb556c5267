"""Real data files from ../shared/data beside the repository; skipped if they are missing."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from tables import table

from postgrad.data.prepare.output import read_provenance
from postgrad.data.prepare.request import find_files, parse_request
from postgrad.data.prepare.run import prepare
from postgrad.data.problems import load_problems, load_problems_with_locations
from postgrad.evaluation.data_check import check_data, question_key
from postgrad.verifiers.scorer import Scorer

DATA = Path(
    os.environ.get("POSTGRAD_REAL_DATA", Path(__file__).parents[2].parent / "shared" / "data")
)
# Rows whose gold answer the algebra parser cannot read: only the same text is accepted for them.
# `unread` is the part that it cannot read, `reason` says why, written by a person.
EXCEPTIONS = [
    json.loads(line)
    for line in (Path(__file__).parent / "gold_exceptions.jsonl").read_text().splitlines()
]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA}"),
]

# file, rows, data source of the first, its ground truth, distinct contents
FILES = table(__file__, "files")


@pytest.mark.parametrize(("name", "num_rows", "data_source", "truth", "num_distinct"), FILES)
def test_file_loads_without_changes(
    name: str, num_rows: int, data_source: str, truth: str, num_distinct: int
):
    problems = load_problems(str(DATA / name))
    assert len(problems) == num_rows == len({p.uid for p in problems})
    assert (problems[0].data_source, problems[0].ground_truth) == (data_source, truth)
    assert sum("-" not in p.uid for p in problems) == num_distinct
    assert all(p.ground_truth and p.messages[-1]["role"] == "user" for p in problems)


def test_alpaca_eval():
    problems = load_problems(str(DATA / "cs336" / "alpaca_eval.jsonl"))
    assert (len(problems), problems[0].data_source, problems[0].extra["dataset"]) == (
        805,
        "alpaca_eval",
        "helpful_base",
    )
    assert all(p.demonstrations and not p.ground_truth for p in problems)


def test_every_file_is_tested():
    files = {
        str(p.relative_to(DATA)) for p in DATA.rglob("*") if p.is_file() and p.name != "README.md"
    }
    assert files == {name for name, *_ in FILES} | {"cs336/alpaca_eval.jsonl"}


# data set, location of the rows, overrides, problems kept, rows read
PREPARED = table(__file__, "prepared")


@pytest.mark.parametrize(("name", "source", "overrides", "num_kept", "num_read"), PREPARED)
def test_prepared_in_one_schema(
    name: str, source: str, overrides: dict[str, str], num_kept: int, num_read: int, tmp_path: Path
):
    out = tmp_path / "out.parquet"
    request = parse_request(name, overrides)
    prepare(request, *find_files(request, str(DATA / source)), out)
    provenance = read_provenance(out)
    assert (provenance["kept"], provenance["read"]) == (num_kept, num_read)
    assert provenance["kept"] + sum(provenance["dropped"].values()) == provenance["read"]
    columns = "uid data_source prompt target ability reward_model extra_info"
    assert parquet.read_schema(out).names == columns.split()
    problems = load_problems(str(out))
    assert len({problem.uid for problem in problems}) == num_kept
    assert {problem.data_source for problem in problems} == {request.data_set.data_source}


def test_uid_is_the_same_in_every_layout(tmp_path: Path):
    """Three files hold MATH-500, in three layouts."""
    uids = []
    sources = [("bupo", {}), ("cs336", {}), ("luffy/valid.parquet", {"source": "math"})]
    for number, (source, overrides) in enumerate(sources):
        out = tmp_path / f"{number}.parquet"
        request = parse_request("math500", overrides)
        prepare(request, *find_files(request, str(DATA / source)), out)
        uids.append({problem.uid for problem in load_problems(str(out))})
    assert uids[0] == uids[1]
    assert len(uids[0] & uids[2]) >= 490  # LUFFY's file writes some answers differently


@pytest.mark.parametrize("name", [name for name, *_ in FILES])
def test_gold_answers_score_and_near_misses_do_not(name: str):
    """Gold answers, near misses and worked solutions, scored by the verifier of training."""
    problems, locations = load_problems_with_locations(str(DATA / name))
    with Scorer(timeout_s=30) as scorer:
        findings = check_data(problems, locations, scorer)
    assert findings.num_checked == len(problems)
    assert not findings.rejected_golds
    assert not findings.accepted_near_misses
    assert not findings.rejected_demonstrations
    assert findings.num_near_misses >= {"bupo/deepmath-5k.parquet": 2900}.get(
        name, len(problems) // 2
    )


def rewrite_answer(truth: str) -> str:
    """The same answer with other fractions, brackets and spaces, in the middle of a sentence."""
    text = truth.replace("\\frac", "\\dfrac").replace("\\left", "").replace("\\right", "")
    text = re.sub(r"(?<=[0-9A-Za-z}])\s*([-+=])\s*(?=[0-9A-Za-z\\])", r" \1 ", text)
    return (
        "First I thought of \\boxed{0.123}. "
        f"Then I saw it: the answer is $\\boxed{{ {text} }}$, which is what was asked."
    )


REWRITTEN = [
    "bupo/math500.parquet",
    "bupo/aime_2024.parquet",
    "bupo/amc2023.parquet",
    "luffy/valid.parquet",
    "bupo/deepmath-5k.parquet",
]


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten_gold_answers_score(name: str):
    problems = load_problems(str(DATA / name))
    with Scorer(timeout_s=30) as scorer:
        responses = [rewrite_answer(problem.ground_truth) for problem in problems]
        scores = scorer.score(problems, responses)
    assert [row for row, score in enumerate(scores, 1) if not is_accepted(score)] == []


def is_accepted(score: object) -> bool:
    return getattr(score, "value", 0.0) == 1.0


@pytest.mark.parametrize("name", REWRITTEN)
def test_gold_answers_that_only_text_can_match(name: str):
    """The rows that algebra alone cannot match are exactly the listed ones.

    The part that is listed as unreadable also fails by itself.
    """
    problems = load_problems(str(DATA / name))
    listed = [row for row in EXCEPTIONS if row["file"] == name]
    parts = [replace(problems[row["row"] - 1], ground_truth=row["unread"]) for row in listed]
    with Scorer(f"{Path(__file__).parent / 'reads_gold.py'}:reads_gold", timeout_s=30) as scorer:
        scores = scorer.score(problems, [""] * len(problems))
        part_scores = scorer.score(parts, [""] * len(parts))
    unread = []
    for row, (problem, score) in enumerate(zip(problems, scores, strict=True), 1):
        if not is_accepted(score):
            unread.append((row, problem.uid, problem.ground_truth))
    assert unread == [(row["row"], row["uid"], row["gold"]) for row in listed]
    assert all(row["reason"] and row["unread"] in row["gold"] for row in listed)
    assert not any(is_accepted(score) for score in part_scores)


def test_no_training_question_is_in_a_test_set():
    def keys(*names: str) -> set[str]:
        return {
            question_key(problem) for name in names for problem in load_problems(str(DATA / name))
        }

    assert not keys("gsm8k/train.jsonl") & keys("gsm8k/test.jsonl")
    tests = keys(
        "bupo/math500.parquet",
        "bupo/aime_2024.parquet",
        "bupo/amc2023.parquet",
        "luffy/valid.parquet",
    )
    assert not keys("bupo/deepmath-5k.parquet") & tests
