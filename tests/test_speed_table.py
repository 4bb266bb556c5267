"""The tables of results.md and NOTES.md are written from result files, and from nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks/gpu"))

import rows  # noqa: E402  # pyright: ignore[reportMissingImports]
import speed_table  # noqa: E402  # pyright: ignore[reportMissingImports]

STEP = speed_table.ROWS["step-4b"]
ROLLOUT = speed_table.ROWS["rollout-4b"]


def write_results(file: Path) -> None:
    step = {"step_s": 20.0, "memory_gib": 90.5}
    measured = {"memory_gib": 90.5, "sample_s": 9.0, "update_s": 11.0}
    estimated = {"memory_gib": 99.55, "sample_s": 9.9, "update_s": 11.0}
    figures = {"measured": measured, "estimated": estimated}
    rows.write_row(file, STEP.name, "postgrad", failed="time limit")
    rows.write_row(file, STEP.name, "postgrad", result=step, **figures)
    for number, seconds in ((1, 50.0), (2, 60.0)):
        peer = {"step": number, "step_s": seconds, "memory_gib": 100.0}
        rows.write_row(file, "step 4b 32 x 8 x 1024", "trl with vllm", **peer)
    speed = {"result": {"tokens_per_second": 25_000.4, "memory_gib": 44.0}, **figures}
    rows.write_row(file, ROLLOUT.name, "postgrad", **speed)
    name = "rollout 4b 32 x 8 x 1024"
    rows.write_row(file, name, "vllm", tokens_per_second=20_000.0, version="0.26.0")
    rows.write_row(file, name, "vllm without log-probs", failed="ImportError: no vllm")


def test_times_of_a_shared_gpu_are_not_shown(tmp_path: Path) -> None:
    row = speed_table.ROWS["row-8b-4bit-160k"]
    figures = {"memory_gib": 70.1, "update_s": 123.0}
    result = {"memory_gib": 70.1, "tokens_per_second": 1332.0}
    values = {"measured": figures, "estimated": figures, "result": result}
    rows.write_row(tmp_path / "a.jsonl", row.name, "postgrad", shared=True, **values)
    results = speed_table.Results(rows.read_rows([tmp_path / "a.jsonl"]))
    tables = [make(results) for make in speed_table.TABLES.values()]
    assert "70.1 GiB; others used the GPU" in tables[0] and "70.1 / 70.1 (+0%)" in tables[1]
    assert not any("1,332" in table or "123.0" in table for table in tables)


def test_figures_of_a_page_come_from_the_files(tmp_path: Path) -> None:
    write_results(tmp_path / "a.jsonl")
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"name": "cut')
    results = speed_table.Results(rows.read_rows([tmp_path / "a.jsonl", tmp_path / "none.jsonl"]))
    before = "".join(page.read_text() for page in speed_table.PAGES)
    assert all(f"<!-- speed: {name} -->" in before for name in speed_table.TABLES)
    page = speed_table.write_tables(before, results)
    assert "20.0 s (9.0 sampling, 11.0 update), 90.5 GiB" in page
    assert "TRL with vLLM: 60.0 s, 100.0 GiB (ratio 3.00)" in page
    assert "25,000 tokens/s, 44.0 GiB" in page and "vLLM 0.26: 20,000 tokens/s (ratio 1.25)" in page
    assert "vLLM without log-probs: failed: ImportError: no vllm" in page
    assert "99.5 / 90.5 (+10%)" in page
    # What has no results stays as it is.
    mark = "<!-- speed: serve -->"
    serve = before[before.index(mark) :].split("<!-- end of speed -->")[0]
    assert serve in page


def test_what_has_figures_is_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows.write_row(file, "work", "vllm", failed="time limit")
    assert not rows.is_measured(file, "work", "vllm")
    rows.write_row(file, "work", "vllm", seconds=1.0)
    assert rows.is_measured(file, "work", "vllm")
    assert not rows.is_measured(file, "work", "trl") and not rows.is_measured(None, "work", "vllm")
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows.read_rows([file])


def test_limits_are_those_of_the_hardware() -> None:
    """Bytes of weights and cache per decode step; operations of products and attention."""
    assert speed_table.parameters("4b") == pytest.approx(4.02e9, rel=0.01)
    assert speed_table.parameters("8b") == pytest.approx(8.19e9, rel=0.01)
    per_step = 8.04e9 + 147_456 * (256 * 512 + 32 * 100)
    assert speed_table.rollout_limit_s(ROLLOUT) == pytest.approx(1024 * per_step / 4.3e12, rel=0.01)
    products = 6 * 4.02e9 * 32 * (100 + 8 * 1024)
    attention = 3.5 * 4 * 256 * (100 + 512) * 1024 * 32 * 128 * 36
    limit = (products + attention) / 790e12
    assert speed_table.update_limit_s(STEP) == pytest.approx(limit, rel=0.01)


def test_the_script_repeats_no_load_and_blames_no_peer_for_its_own_end(tmp_path: Path) -> None:
    """Every program ends by its limit; that of one peer is below the time that is left."""
    programs = tmp_path / "bin"
    programs.mkdir()
    calls = tmp_path / "calls"
    python = f"""
    echo "$@" >> {calls}
    case "$*" in */rows.py*) exec {sys.executable} "$@";; esac
    """
    bodies = {"python3": python, "timeout": 'shift 3; "$@"; exit 124', "curl": "exit 0"}
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    file = tmp_path / "out" / "speed.jsonl"
    for system, measured in {"postgrad": (1, 16), "vllm": (1, 16, 128)}.items():
        for clients in measured:
            rows.write_row(file, f"serve {clients} clients x 128 tokens", system, figures={})
    script = ["bash", str(ROOT / "benchmarks/gpu/speed.sh"), str(tmp_path / "out"), "130", "a", "b"]
    environment = {"PATH": f"{programs}:/usr/bin:/bin"}
    subprocess.run(script, env=environment, check=True, capture_output=True, timeout=60)
    serve = [line for line in calls.read_text().splitlines() if "serve.py" in line]
    assert len(serve) == 1 and "--clients 128 " in serve[0], "the last load of Postgrad only"
    failed = [(row["name"], row["failed"]) for row in rows.read_rows([file]) if "failed" in row]
    assert failed == [("rollout 1.7b 128 x 8 x 512", "no step within 120 s")]
