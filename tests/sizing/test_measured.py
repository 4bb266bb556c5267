"""The formulas of `postgrad doctor --fit` for a GPU against what an H200 measured.

benchmarks/gpu/measured.json has the figures of docs/results.md and docs/lab.md with their commands.
`cache_stays` marks those from before the cache gave its memory to the update. Times are given only
where the kernels have not changed since by more than a quarter.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from postgrad.sizing import gpu_time
from postgrad.sizing.devices import find_gpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks/gpu"
sys.path.insert(0, str(BENCHMARKS))

import fit_check  # noqa: E402  # pyright: ignore[reportMissingImports]

MEASURED = json.loads((BENCHMARKS / "measured.json").read_text())


def estimate(line: dict[str, Any]) -> dict[str, float]:
    keys = ("work", "shape", "problems", "samples", "tokens")
    row = fit_check.Row(*(line[key] for key in keys), tuple(line["overrides"]))
    return fit_check.estimate(row, find_gpu("h200"), detachable=not line.get("cache_stays"))


@pytest.mark.parametrize("line", MEASURED, ids=[line["name"] for line in MEASURED])
def test_memory_is_within_10_and_time_within_30_percent(line: dict[str, Any]) -> None:
    estimated = estimate(line)
    assert estimated["memory_gib"] == pytest.approx(line["memory_gib"], rel=0.1)
    for stage in ("sample_s", "update_s"):
        if stage in line:
            assert estimated[stage] == pytest.approx(line[stage], rel=0.3)


@pytest.mark.parametrize(
    ("constant", "factor"), [("TRAINING_PRODUCTS", 0.5), ("ACTIVATION_TRAFFIC", 4.0)]
)
def test_wrong_constants_are_noticed(
    constant: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_time, constant, factor * getattr(gpu_time, constant))
    line = next(line for line in MEASURED if line["work"] == "update" and "update_s" in line)
    with pytest.raises(AssertionError):
        test_memory_is_within_10_and_time_within_30_percent(line)
