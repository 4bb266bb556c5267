"""benchmarks/speed.py: its tables are written from result files, and from nothing else."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Patch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import speed

STEP = speed.ROWS["step-4b"]
ROLLOUT = speed.ROWS["rollout-4b"]


def result(row: str, system: str, *seconds: float, **figures: Any) -> dict[str, Any]:
    return {"row": row, "system": system, "seconds": list(seconds), **figures}


RESULTS = [
    result("step-4b", "postgrad", 20.0, 21.0, memory_gib=90.5, commit="abc"),
    result("step-4b", "postgrad", 20.0, memory_gib=90.6, commit="abc"),
    result("step-4b", "trl", 60.0, label="TRL 1.16.0", memory_gib=100.0),
    {"row": "step-4b", "system": "verl", "failed": "log\nImportError: no verl"},
    result("rollout-4b", "postgrad", 10.0),
    result("rollout-4b", "vllm", 12.0, label="vLLM 0.26.0", seconds_without_logprobs=[11.0]),
]


def test_figures_of_a_table_come_from_the_results() -> None:
    head, line, rollout, step = speed.make_table(RESULTS).splitlines()
    assert head.startswith("| work") and line == "| --- | --- | --- | --- |"
    assert "25,166" not in rollout and "26,214 tokens/s |" in rollout
    assert "vLLM 0.26.0: 21,845 tokens/s, without log-probs 23,831 tokens/s (1.20)" in rollout
    assert step.startswith("| GRPO step, 4B, 32 x 8, 1,024 tokens (commit abc) | 20.0 s, 90.6 GiB")
    assert "TRL 1.16.0: 60.0 s, 100.0 GiB (3.00); failed: ImportError: no verl |" in step
    other = {"work": "a server", "postgrad": "2", "others": "1", "command": "serve.py"}
    short = speed.make_short_table(RESULTS, [other]).splitlines()
    assert len(short) == 3 + len(speed.SHORT_TABLE) and short[-1] == "| a server | 2 | 1 |"


def test_the_pages_have_what_the_script_writes(tmp_path: Path) -> None:
    """After new results: python benchmarks/speed.py table"""
    results = speed.read_results([speed.RESULTS])
    others = json.loads(speed.OTHERS.read_text())
    tables = speed.make_table(results), speed.make_short_table(results, others)
    for page, table in zip((speed.PAGE, speed.README), tables, strict=True):
        copy = tmp_path / page.name
        copy.write_text(page.read_text())
        speed.write_table(copy, table)
        assert copy.read_text() == page.read_text()
    (tmp_path / "page.md").write_text("no marks")
    with pytest.raises(SystemExit, match="no place"):
        speed.write_table(tmp_path / "page.md", "")


def test_what_has_a_result_is_not_measured_again(tmp_path: Path, monkeypatch: Patch) -> None:
    file = tmp_path / "speed.jsonl"
    file.write_text(json.dumps(RESULTS[-2]) + '\n{"row": "cut')
    assert speed.read_results([file, tmp_path / "none.jsonl"]) == [RESULTS[-2]]
    file.write_text(json.dumps(RESULTS[-2]) + "\n")
    calls: list[list[str]] = []

    def run_one(command: list[str], *args: Any) -> dict[str, Any]:
        calls.append(command[1:])
        return {"failed": "no GPU"}

    monkeypatch.setattr(speed, "run_one", run_one)
    names = Namespace(out=file, rows=["rollout-4b"], systems=["postgrad", "vllm"], code=[])
    names.rounds, names.limit_s, names.each_s, names.folder = 2, 1000.0, 100.0, tmp_path
    speed.run_rows(names)
    ours, peer = ["one", "rollout-4b"], ["vllm", "rollout-4b"]
    assert calls == [peer, ours, peer], "the first of our two rounds has a result"


@pytest.mark.parametrize(
    ("capacity", "fits", "fails"), [(200_000, 196_608, 204_800), (9_000, 8_704, 9_216)]
)
def test_the_longest_row_is_found(
    tmp_path: Path, monkeypatch: Patch, capacity: int, fits: int, fails: int
) -> None:
    tried: list[int] = []

    def train(row: Any, *args: Any) -> dict[str, Any]:
        tried.append(row.prompt + row.tokens)
        if tried[-1] > capacity:
            return {"failed": "exit code 1: step 1: out of memory for 2 GiB more"}
        return {"seconds": [1.0], "memory_gib": 78.5}

    monkeypatch.setattr(speed, "measure_training", train)
    found = speed.measure_longest(speed.ROWS["longest-sft"], tmp_path, 100.0)
    assert found == {"seconds": [1.0], "memory_gib": 78.5, "tokens": fits, "fails": fails}
    assert tried[0] == 131_072 and len(tried) < 10
    table = speed.make_table([found | {"row": "longest-sft", "system": "postgrad"}])
    assert f"{fits:,} tokens, 78.5 GiB | - | published, TRL 1.15: 107,520 tokens" in table


def test_a_search_ends_at_the_context_and_at_other_errors(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    row = speed.ALL_ROWS["try-longest-sft"]
    monkeypatch.setattr(speed, "measure_training", lambda *args: {"seconds": [1.0]})
    assert speed.measure_longest(row, tmp_path, 1.0)["tokens"] == 128
    monkeypatch.setattr(speed, "measure_training", lambda *args: {"failed": "exit code 2: a key"})
    found = speed.measure_longest(row, tmp_path, 1.0)
    assert found == {"failed": "64 tokens: exit code 2: a key", "fits": 0, "fails": 0}


def test_limits_are_those_of_the_hardware() -> None:
    """Bytes of weights and cache per decode step; operations of products and attention."""
    assert speed.parameters("4b") == pytest.approx(4.02e9, rel=0.01)
    assert speed.parameters("8b") == pytest.approx(8.19e9, rel=0.01)
    per_step = 8.04e9 + 147_456 * (256 * 512 + 32 * 100)
    assert speed.rollout_limit_s(ROLLOUT) == pytest.approx(1024 * per_step / 4.3e12, rel=0.01)
    products = 6 * 4.02e9 * 32 * (100 + 8 * 1024)
    attention = 3.5 * 4 * 256 * (100 + 512) * 1024 * 32 * 128 * 36
    limit = (products + attention) / 790e12
    assert speed.update_limit_s(STEP) == pytest.approx(limit, rel=0.01)
