"""The files people really have, from ../shared/data beside the repository; skipped, visibly, where they are not."""

from pathlib import Path

import pytest

from postgrad.data.problems import load_problems

DATA = Path(__file__).parents[2].parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA}")

# file, rows, data source of the first, its ground truth, distinct contents
FILES = [
    ("gsm8k/train.jsonl", 7473, "openai/gsm8k", "72", 7473),
    ("gsm8k/test.jsonl", 1319, "openai/gsm8k", "18", 1319),
    ("bupo/deepmath-5k.parquet", 5000, "math_dapo", "\\infty", 4999),
    ("bupo/math500.parquet", 500, "qwen_math500", "\\left( 3, \\frac{\\pi}{2} \\right)", 500),
    ("bupo/aime_2024.parquet", 30, "qwen_aime_2024", "540", 30),
    ("bupo/amc2023.parquet", 40, "qwen_amc2023", "27", 40),
    ("luffy/valid.parquet", 2019, "aime", "204", 1560),
    ("luffy/valid.arc_c.parquet", 1172, "arc_c", "C", 1172),
    ("cs336/math500.jsonl", 500, "math500", "\\left( 3, \\frac{\\pi}{2} \\right)", 500),
    ("cs336/mmlu_abstract_algebra.csv", 100, "mmlu", "B", 100),
    ("cs336/mmlu_high_school_statistics.csv", 216, "mmlu", "B", 216),
    ("cs336/mmlu_nutrition.csv", 306, "mmlu", "C", 306),
]


@pytest.mark.parametrize(("name", "num_rows", "data_source", "truth", "num_distinct"), FILES)
def test_loads_as_it_is(name: str, num_rows: int, data_source: str, truth: str, num_distinct: int):
    problems = load_problems(str(DATA / name))
    assert len(problems) == num_rows == len({p.uid for p in problems})
    assert (problems[0].data_source, problems[0].ground_truth) == (data_source, truth)
    assert sum("-" not in p.uid for p in problems) == num_distinct
    assert all(p.ground_truth and p.messages[-1]["role"] == "user" for p in problems)


def test_alpaca_eval():
    problems = load_problems(str(DATA / "cs336" / "alpaca_eval.jsonl"))
    assert (len(problems), problems[0].data_source, problems[0].extra["dataset"]) == (805, "alpaca_eval", "helpful_base")
    assert all(p.demonstrations == (p.ground_truth,) for p in problems)


def test_gsm8k_truths_are_numbers():
    problems = load_problems(str(DATA / "gsm8k" / "train.jsonl"))
    assert all(float(p.ground_truth) is not None for p in problems)
    assert any("," in p.demonstrations[0].rpartition("####")[2] for p in problems)


def test_nothing_is_left_untested():
    files = {str(p.relative_to(DATA)) for p in DATA.rglob("*") if p.is_file() and p.name != "README.md"}
    assert files == {name for name, *_ in FILES} | {"cs336/alpaca_eval.jsonl"}
