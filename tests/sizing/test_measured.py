"""The formulas of `postgrad doctor --fit` for a GPU against what an H200 measured.

measured.json has the runs with the commands that measured them (sizes.py and update.py of commit
313122d7, in its benchmarks/gpu). `cache_stays` marks those from before the cache gave its memory to
the update, `is_first` a step that ran before there was an optimizer state.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen_runs import Run, estimate_gib, make_plan
from speed import make_vision_config
from transformers import Qwen3ForCausalLM

from postgrad.doctor.fit import describe, examine
from postgrad.sizing.choose import choose_passes
from postgrad.sizing.devices import find_gpu
from postgrad.sizing.memory import estimate
from postgrad.sizing.workload import GroupLengths, PictureSizes, Workload, plan_of_settings

MEASURED = json.loads(Path(__file__).with_name("measured.json").read_text())


def estimate_of(line: dict[str, Any]) -> float:
    keys = ("work", "shape", "problems", "samples", "tokens")
    run = Run(**{key: line[key] for key in keys}, overrides=tuple(line["overrides"]))
    gpu = replace(find_gpu("h200"), detachable=not line.get("cache_stays"))
    return estimate_gib(run, gpu)


def state_gib(shape: str) -> float:
    """Returns the memory of Adam's state in float32."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(make_plan(Run("step", shape, 1, 1, 1)).model)
    return 8 * model.num_parameters() / 2**30


def as_parameter(line: dict[str, Any]) -> Any:
    """Returns the measured run as a parameter; only the smallest model's are frequent."""
    mark = pytest.mark.slow if line["shape"] == "0.6b" else pytest.mark.nightly
    return pytest.param(line, id=line["name"], marks=mark)


@pytest.mark.parametrize("line", [as_parameter(line) for line in MEASURED])
def test_memory_is_within_10_percent(line: dict[str, Any]) -> None:
    memory = estimate_of(line)
    if line.get("is_first"):  # its passes run before there is an optimizer state
        memory -= state_gib(line["shape"])
    assert memory == pytest.approx(line["memory_gib"], rel=0.1)


@pytest.mark.parametrize(("image_tokens", "gib"), [(256, 44.10), (0, 43.43)])
def test_a_step_with_pictures_is_within_3_percent(image_tokens: int, gib: float) -> None:
    """The rows step-vl-2b and step-vl-2b-text of benchmarks/results/speed.jsonl."""
    group = GroupLengths(358, (), 8, 1, image_tokens)
    pictures = PictureSizes(160 * image_tokens, 4 * 4 * 3 * 2 * 16 * 16)
    workload = Workload([group] * 32, 358, pictures=pictures)
    plan = make_plan(Run("step", "vl-2b", 32, 8, 512))
    plan = replace(plan, model=make_vision_config("vl-2b"), workload=workload)
    assert estimate(plan, find_gpu("h200")).peak / 2**30 == pytest.approx(gib, rel=0.03)


def choose(run: Run, gib: float, budget: int = 0) -> tuple[int, bool]:
    plan = make_plan(run)
    plan = plan.changed("training.token_budget", budget)
    return choose_passes(plan, find_gpu("h200", gib), 8192, 16384)


@pytest.mark.nightly
def test_what_is_left_to_the_machine_follows_from_the_estimate() -> None:
    """First fewer tokens per pass; then, for a long row, activation checkpointing."""
    step = Run("step", "4b", 32, 8, 1024)
    assert choose(step, 139) == (8192, False)
    budget, recompute = choose(step, 90)
    assert 2048 <= budget < 8192 and not recompute
    assert choose(step, 90, budget=8192) == (8192, True)
    long_row = Run("step", "4b", 1, 1, 32_768)
    assert choose(long_row, 139) == (16384, True)
    too_large = Run("step", "8b", 16, 8, 512)
    assert choose(too_large, 79) == (8192, False)
    assert choose(Run("step", "0.6b", 1, 1, 256), 139) == (8192, False)


def test_settings_alone_bound_the_rows() -> None:
    plan = make_plan(Run("step", "0.6b", 3, 2, 150_000))
    bound = plan_of_settings(plan.config, plan.model, {})
    prompt = plan.config.data.max_prompt_tokens
    assert [(group.prompt, group.num_samples) for group in bound.workload.groups] == [
        (prompt, 2)
    ] * 3
    assert bound.config.rollout.max_response_tokens == 131_072 - prompt


@pytest.mark.nightly
def test_a_run_too_large_for_its_optimizer_is_told_to_offload_it() -> None:
    plan = make_plan(Run("step", "8b", 16, 8, 512))
    result = examine(plan, find_gpu("h200", 100), planned=True)
    assert result.suggestions[0][0] == "optimizer.kind=adamw_offloaded"
    advice = describe(result).problems[0]
    assert "optimizer.kind=adamw_offloaded (saves" in advice and "smaller model" not in advice
