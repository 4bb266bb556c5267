"""benchmarks/research.py: all its commands compose, and its tables and figures are right."""

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_for_end

from postgrad.config.compose import compose
from postgrad.methods import find_method
from postgrad.problem import Problem
from postgrad.training.warmup import warmup_config
from postgrad.verifiers.scorer import Scorer

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CLAIMS = [
    "grpo",
    "math",
    "minutes",
    "luffy",
    "secret",
    "exgrpo",
    "environments",
    "bupo",
    "classmate",
    "collapse",
    "losses",
    "mismatch",
]


pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def research():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("research")
    sys.path.remove(str(BENCHMARKS))


def make_runs(research, claim, folder, *more):
    arguments = [claim, "--model=tiny", f"--out={folder}", "--depths=6,14,25", *more]
    options = research.parse_options(arguments)
    return research.make_runs(claim, research.CLAIMS[claim], options)


def composed(run):
    _, recipe, *overrides = run.arguments
    return compose(recipe, overrides, lambda name: find_method(name).Settings)


def test_every_claim_is_tested(research):
    assert set(research.CLAIMS) == set(CLAIMS)


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
def test_the_commands_of_a_claim_pass_the_checks(research, tmp_path, claim):
    runs = make_runs(research, claim, tmp_path, "--seeds=7")
    assert len(runs) >= 2
    for run in runs:
        if run.script:
            continue
        config = composed(run)
        find_method(config.method.name)(config).check()
        if config.warmup.recipe:
            warmup = warmup_config(config)
            find_method(warmup.method.name)(warmup).check()
        assert config.seed == 7
        assert config.name == run.label
        assert config.training.steps == run.last_step


@pytest.mark.slow
def test_arms_differ_only_in_what_is_compared(research, tmp_path):
    runs = make_runs(research, "losses", tmp_path, "--seeds=0")
    configs = [composed(run) for run in runs]
    for section in ("optimizer", "training", "rollout", "data", "reward", "model"):
        values = [getattr(config, section) for config in configs]
        assert all(value == values[0] for value in values), section


@pytest.mark.parametrize("claim", ["grpo", "math"])
def test_trl_has_the_sizes_of_postgrad(research, tmp_path, claim):
    runs = make_runs(research, claim, tmp_path, "--seeds=0", "--test-problems=9")
    postgrad, *others = runs
    uncorrected = ["TRL with vLLM, no correction"] if claim == "grpo" else []
    assert [run.arm for run in others] == ["TRL with vLLM", *uncorrected]
    config = composed(postgrad)
    sizes = {
        "steps": config.training.steps,
        "problems": config.training.problems_per_step,
        "samples": config.rollout.samples,
        "tokens": config.rollout.max_response_tokens,
        "prompt-tokens": config.data.max_prompt_tokens,
        "lr": config.optimizer.lr,
        "validate-every": config.training.validate_every,
        "test-problems": config.training.validation_problems,
        "train": config.data.train,
        "test": config.data.validation,
        "token-budget": config.training.token_budget,
        "cache-gib": config.rollout.cache_gib,
        "engine": "vllm",
    }
    for run in others:
        given = dict(word.removeprefix("--").partition("=")[::2] for word in run.arguments)
        assert {name: given[name] for name in sizes} == {k: str(v) for k, v in sizes.items()}


def test_accuracies_within_minutes_count_no_validations(research, tmp_path):
    """The start is 90 s, a step 10 s and a validation 40 s: step 9 ends at second 180."""
    (run,) = [
        run
        for run in make_runs(research, "minutes", tmp_path)
        if (run.arm, run.seed) == ("Postgrad", 0)
    ]
    folder = tmp_path / "runs" / run.label
    folder.mkdir(parents=True)
    lines, now = [], 1090.0
    for step in range(1, 60):
        now += 10.0 + (40.0 if step % 3 == 0 else 0.0)
        line = {"step": step, "time": now, "step_s": 10.0}
        lines.append(line | ({"validation/accuracy": step / 100} if step % 3 == 0 else {}))
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = research.Results(tmp_path)
    results.follow(run, start=1000.0, num_running=1)
    assert results.clocks[run.label] == pytest.approx(90 + 59 * 10)
    assert run.seconds == 540
    text = research.draw.table(research.CLAIMS["minutes"], results.read())
    assert "| Postgrad | 0.090 | 0.270 | 0.450 |" in text
    assert "artial" not in text


def test_passes_of_trl_make_up_a_whole_update(research, monkeypatch):
    """TRL's update has all rows of a step, whatever the length of the responses."""
    stub = SimpleNamespace(GRPOConfig=None, GRPOTrainer=None, Dataset=None)
    monkeypatch.setitem(sys.modules, "trl", stub)
    monkeypatch.setitem(sys.modules, "datasets", stub)
    make = importlib.import_module("claims.trl_grpo")
    sizes = {256: 16, 768: 8, 1024: 4, 8192: 1}
    assert {tokens: make.divide_update(256, tokens, 6144) for tokens in sizes} == sizes
    assert make.divide_update(256, 512, 2048) == 4
    assert make.divide_update(36, 256, 6144) == 12


def test_math_has_problems_of_deepmath_and_math_500(research, tmp_path):
    import pandas

    for name, question in (("deepmath-5k", "1 + 1"), ("math500", "2 + 2")):
        row = {
            "prompt": [{"role": "user", "content": question}],
            "data_source": "math_dapo",
            "reward_model": {"ground_truth": "4"},
            "difficulty": 3.5,
        }
        rows = [row, row | {"difficulty": 7.0}] if name == "deepmath-5k" else [row]
        pandas.DataFrame(rows).to_parquet(tmp_path / f"{name}.parquet")
    arguments = ["math", "--model=tiny", f"--out={tmp_path}", f"--data={tmp_path}"]
    options = research.parse_options(arguments)
    research.CLAIMS["math"].prepare(options)
    for name, question in (("train", "1 + 1"), ("test", "2 + 2")):
        row = json.loads((tmp_path / f"{name}.jsonl").read_text())
        assert row["prompt"] == [{"role": "user", "content": question}]
        assert row["reward_model"]["ground_truth"] == "4"


@pytest.mark.slow
def test_a_monitor_reads_the_policys_thoughts_before_and_after(research, tmp_path):
    for more, monitor in ((), "tiny"), (("--monitor=gemma",), "gemma"):
        for run in make_runs(research, "classmate", tmp_path, *more):
            assert composed(run).reward.judge.monitor == monitor
    shown = [(c.key, c.first) for c in research.CLAIMS["classmate"].columns]
    assert {("validation/monitor/f1", first) for first in (True, False)} <= set(shown)


def test_a_run_is_validated_once_per_part(research, tmp_path):
    """25 steps in 2 parts: after 13 and 25, not after 12, 24 and 25."""
    for run in make_runs(research, "classmate", tmp_path, "--steps=25"):
        assert composed(run).training.validate_every == 13


def test_only_chooses_arms_and_refuses_unknown_ones(research, tmp_path):
    runs = make_runs(research, "losses", tmp_path, "--only=GRPO,DAPO", "--seeds=0,1")
    expected = [(arm, seed) for seed in (0, 1) for arm in ("GRPO", "DAPO")]
    assert [(run.arm, run.seed) for run in runs] == expected
    with pytest.raises(SystemExit, match="PPO"):
        make_runs(research, "losses", tmp_path, "--only=PPO")


def test_the_table_has_means_and_t_intervals_over_seeds(research):
    entries = [
        {"arm": "GRPO", "seed": seed, "label": f"losses-grpo-{seed}", "metrics": metrics}
        for seed, right in enumerate([0.5, 0.6, 0.7])
        for metrics in ({"step": 1, "reward/right": 9.0}, {"step": 1, "reward/right": right})
    ]
    text = research.draw.table(research.CLAIMS["mismatch"], entries)
    # Student's t with 2 degrees of freedom: 4.303 * 0.1 / sqrt(3) = 0.248.
    value = "0.600 ± 0.248 (0.500 0.600 0.700)"
    assert f"| GRPO | {value} | {value} | - |" in text


def test_one_seed_has_the_wilson_interval_of_its_accuracy(research):
    """A reward, and a mean of samples, have none."""

    def table(claim: str, arm: str, **metrics: float) -> str:
        entries = [
            {"claim": claim, "label": "", "options": {"test_problems": 4}},
            {"arm": arm, "seed": 0, "label": f"{claim}-{arm.lower()}-0", "metrics": metrics},
        ]
        return research.draw.table(research.CLAIMS[claim], entries)

    right = {"step": 0, "validation/accuracy": 0.5}
    assert "| TRL | 0.500 (Wilson 0.150 to 0.850) |" in table("grpo", "TRL", **right)
    reward = {"step": 0, "validation/accuracy": -0.25, "validation/sampled_accuracy": 0.5}
    assert "| guess | -0.250 | - | 0.500 | - |" in table("environments", "guess", **reward)


def test_seconds_are_those_of_runs_that_had_the_gpu_alone(research):
    """Accuracies are of all runs, also of those that shared the GPU for a step."""
    entries = [
        {
            "arm": "TRL",
            "seed": seed,
            "label": f"grpo-trl-{seed}",
            "elapsed_s": 1.0,
            "running": running[step - 1],
            "metrics": {"step": step, "step_s": seconds, "validation/accuracy": 0.5},
        }
        for seed, seconds, running in ((0, 4.0, (1, 1)), (1, 9.0, (2, 1)))
        for step in (1, 2)
    ]
    text = research.draw.table(research.CLAIMS["grpo"], entries)
    assert text.endswith("| 4 | 8 | 2 |")
    assert "0.500 ± 0.000 (0.500 0.500)" in text
    shared = [entry for entry in entries if entry["seed"] == 1]
    assert research.draw.table(research.CLAIMS["grpo"], shared).endswith("| - | - | 2 |")


def partial_entries(num_steps: int = 4) -> list[dict]:
    """Seed 0 of one arm has ended, seed 1 was stopped after step 2, seed 2 was not run."""
    options = {"steps": num_steps, "seeds": [0, 1, 2], "arms": ["Postgrad", "TRL"]}
    entries = [{"claim": "grpo", "label": "", "options": options | {"model": "tiny"}}]
    for seed, last in ((0, num_steps), (1, 2)):
        for step in range(last + 1):
            metrics = {"step": step, "step_s": 1.0, "reward/mean": 0.1 * step + seed}
            if step in (0, num_steps):
                metrics["validation/accuracy"] = 0.25 + 0.1 * step
            label = f"grpo-postgrad-{seed}"
            entries.append({"arm": "Postgrad", "seed": seed, "label": label, "metrics": metrics})
    return entries


def test_stopped_runs_are_said_to_be_partial(research):
    """A run that was stopped before its last validation has no accuracy after training."""
    text = research.draw.table(research.CLAIMS["grpo"], partial_entries())
    assert "| Postgrad | 0.250 ± 0.000 (0.250 0.250) | 0.650 |" in text
    assert text.splitlines()[2].endswith("| 4 2 |")
    assert text.endswith(
        "Partial: not all runs reached step 4 (TRL: not run; "
        "Postgrad, seed 1: step 2; Postgrad, seed 2: not run)."
    )
    assert "partial" in research.draw.caption(partial_entries())
    whole = [e for e in partial_entries() if e.get("seed") != 1]
    whole[0]["options"] |= {"seeds": [0], "arms": ["Postgrad"]}
    assert "artial" not in research.draw.table(research.CLAIMS["grpo"], whole)


def test_a_mean_without_all_seeds_is_dashed(research):
    import matplotlib.figure

    entries = partial_entries()
    axis = matplotlib.figure.Figure().add_subplot()
    runs = [research.draw.series(entries, f"grpo-postgrad-{seed}") for seed in (0, 1)]
    research.draw.draw_curve(axis, "Postgrad", runs, "step", "reward/mean")
    solid, dashed = axis.get_lines()
    assert list(solid.get_xdata()) == [0, 1, 2]
    assert list(solid.get_ydata()) == pytest.approx([0.5, 0.6, 0.7])
    assert (dashed.get_linestyle(), list(dashed.get_xdata())) == ("--", [2, 3, 4])
    assert list(dashed.get_ydata()) == pytest.approx([0.7, 0.3, 0.4])


def test_metrics_that_no_run_records_are_named(research):
    claim = research.CLAIMS["bupo"]
    line = dict.fromkeys([*claim.curves, "validation/best@4"], 0.0)
    assert research.draw.unrecorded(claim, [{"metrics": line}]) == []
    assert research.draw.unrecorded(claim, [{"metrics": {"validation/best@4": 0.0}}])
    column = next(column for column in claim.columns if column.key.endswith("@"))
    lines = [{"step": 0, "validation/best@4": 0.5}, {"step": 2, "validation/best@4": 0.75}]
    assert research.draw.column_values(lines, column) == [0.5]


def test_several_folders_become_one_claim(research):
    """Of a run that is in two folders, the last counts; seeds are those of both."""
    first = partial_entries()
    second = [first[0] | {"options": {"steps": 4, "seeds": [3]}}, first[-1] | {"seed": 3}]
    merged = research.keep.merged([first, second])
    assert [entry["metrics"]["step"] for entry in merged if entry.get("seed") == 3] == [2]
    assert not [entry for entry in merged if entry.get("seed") == 1]
    assert research.draw.last_options(merged)["seeds"] == [0, 1, 2, 3]


def test_kept_values_have_a_figure_and_redraw_the_table(research, tmp_path):
    """A step that was computed twice counts once; the page's block is replaced."""
    folder = tmp_path / "out"
    folder.mkdir()
    lines = [{"claim": "losses", "label": "", "options": {"model": "tiny"}}]
    for right in (0.1, 0.25):
        metrics = {"step": 1, "step_s": 2.0, "validation/part/right": right, "unread": 1.0}
        lines.append({"arm": "GRPO", "seed": 0, "label": "losses-grpo-0", "metrics": metrics})
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "results.md").write_text("before\n<!-- losses -->\nold\n<!-- end -->\nafter\n")
    claims = research.CLAIMS
    assert research.keep.keep(claims, [str(folder), f"--docs={docs}"]) == 0
    kept = research.keep.read_kept(docs / "research" / "losses.jsonl")
    assert [line["metrics"] for line in kept[1:]] == [{"step": 1, "validation/part/right": 0.25}]
    assert research.draw.main(claims, [f"--docs={docs}"]) == 0
    page = (docs / "results.md").read_text()
    assert page.startswith("before\n<!-- losses -->\n| arm |")
    assert page.endswith("\n<!-- end -->\nafter\n")
    assert "| GRPO | 0.250 | 0.250 |" in page
    assert (docs / "research" / "losses.png").stat().st_size > 1000


@pytest.mark.slow
def test_kept_entropies_redraw_their_figures(research, tmp_path):
    one = {"mean": 1.234567, "std": 0.5}
    module = {"input": one, "output": one, "change": one}
    layers = [
        {"number": number, "attention": module, "ffn": module, "layer": module} for number in (1, 2)
    ]
    report = {"model": "m", "rows": 1, "tokens": 2, "ceiling": 3.0, "num_layers": 2}
    report |= {"boundary_layer": 1, "boundary_threshold": 0.1, "full_policy": one}
    (tmp_path / "entropy.json").write_text(json.dumps(report | {"layers": layers}))
    assert research.entropies.main([str(tmp_path), "--name=tiny", f"--docs={tmp_path}"]) == 0
    folder = tmp_path / "research" / "entropy"
    kept = json.loads((folder / "tiny.json").read_text())
    assert kept["model"] == "tiny" and kept["layers"][1]["ffn"]["change"] == {"mean": 1.2346}
    (folder / "tiny-changes.png").unlink()
    research.draw.main(research.CLAIMS, [f"--docs={tmp_path}"])
    assert (folder / "tiny-changes.png").stat().st_size > 1000


def test_later_runs_are_added_to_kept_ones_of_the_same_sizes(research, tmp_path):
    docs = tmp_path / "docs"

    def keep(seed: int, num_steps: int, *words: str, steps: int = 2) -> int:
        folder = tmp_path / f"{seed}-{num_steps}-{steps}"
        folder.mkdir()
        header = {"claim": "losses", "label": "", "options": {"steps": steps, "seeds": [seed]}}
        run = {"arm": "GRPO", "seed": seed, "label": f"losses-grpo-{seed}"}
        entries = [
            run | {"metrics": {"step": n + 1, "entropy": seed + n}} for n in range(num_steps)
        ]
        lines = [json.dumps(entry) + "\n" for entry in (header, *entries)]
        (folder / "results.jsonl").write_text("".join(lines))
        return research.keep.keep(research.CLAIMS, [str(folder), f"--docs={docs}", *words])

    def kept() -> dict[int, list[float]]:
        entries = research.keep.read_kept(docs / "research" / "losses.jsonl")
        assert research.draw.last_options(entries)["seeds"] == [0, 1]
        found: dict[int, list[float]] = {}
        for entry in entries[1:]:
            found.setdefault(entry["seed"], []).append(entry["metrics"]["entropy"])
        return found

    keep(0, 2)
    keep(1, 1, "--add")
    assert kept() == {0: [0, 1], 1: [1]}
    keep(0, 1, "--add")
    assert kept() == {0: [0, 1], 1: [1]}, "a run that was stopped does not replace a complete one"
    keep(1, 2, "--add")
    assert kept() == {0: [0, 1], 1: [1, 2]}
    with pytest.raises(SystemExit, match="losses: kept runs have steps = 2, these 3"):
        keep(2, 3, "--add", steps=3)
    assert kept() == {0: [0, 1], 1: [1, 2]}


def test_added_runs_have_the_model_of_the_kept_ones(research):
    """Options that an older version did not write are not compared."""
    kept = {"claim": "losses", "label": "", "options": {"model": "SmolLM2", "steps": 2}}
    new = kept | {"options": {"model": "SmolLM2", "steps": 2, "engine": "vllm"}}
    research.keep.check_sizes(kept, [[new]], None)
    other = new | {"options": new["options"] | {"model": "model-folder"}}
    with pytest.raises(SystemExit, match="model = SmolLM2, these model-folder; --model"):
        research.keep.check_sizes(kept, [[other]], None)
    research.keep.check_sizes(kept, [[other]], "SmolLM2")
    with pytest.raises(SystemExit, match="steps = 2, these 3"):
        research.keep.check_sizes(kept, [[new | {"options": new["options"] | {"steps": 3}}]], None)


def test_a_run_is_over_at_its_last_step_and_validation(research, tmp_path):
    """Only lines that this call's process wrote count: an earlier one may have been stopped."""
    runs = importlib.import_module("claims.runs")
    results = research.Results(tmp_path)
    run = runs.Run("GRPO", 0, "label", [], last_step=1, validates=True)
    folder = tmp_path / "runs" / "label"
    folder.mkdir(parents=True)
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n{"step": 1, "validation/accuracy": 0.5}\n')
    results.follow(run, start=metrics.stat().st_mtime + 10)
    assert not results.has_step("label", 1, validated=True)
    results.follow(run, start=metrics.stat().st_mtime - 10)
    assert results.has_step("label", 1, validated=True)
    assert not results.has_step("label", 2, validated=False)
    assert len(results.read()) == 2
    results.add(label="label", exit_code=1)
    assert results.finished() == set()
    results.add(label="label", exit_code=0)
    assert results.finished() == {"label"}


FAILING = """
import pathlib, sys
count = pathlib.Path(sys.argv[1])
tries = int(count.read_text()) if count.exists() else 0
count.write_text(str(tries + 1))
print("CUDA out of memory" if sys.argv[2] == "memory" else "another error")
sys.exit(0 if tries else 1)
"""


def test_runs_without_memory_are_tried_once_more(research, tmp_path):
    """Another failure is not, and the folder of a run that did not finish is removed."""
    runs = importlib.import_module("claims.runs")
    script = tmp_path / "fail.py"
    script.write_text(FAILING)
    cases = [
        runs.Run(kind, 0, kind, [str(tmp_path / f"{kind}.count"), kind], script=str(script))
        for kind in ("memory", "other")
    ]
    stale = tmp_path / "runs" / "memory" / "config.yaml"
    stale.parent.mkdir(parents=True)
    stale.write_text("seed: 1")
    results = research.Results(tmp_path)
    assert runs.run_all(cases, tmp_path, results, 2, float("inf")) == ["other"]
    assert results.finished() == {"memory"}
    assert not stale.exists()


def test_a_run_of_two_places_has_no_neighbor(research, tmp_path):
    runs = importlib.import_module("claims.runs")
    script = tmp_path / "ok.py"
    script.write_text("")
    given = {"script": str(script)}
    cases = [runs.Run("a", i, f"a-{i}", [], places=n, **given) for i, n in enumerate((2, 1, 3))]
    num_running: list[int] = []
    results = research.Results(tmp_path)
    results.follow = lambda run, start, num: num_running.append(num)
    assert runs.run_all(cases, tmp_path, results, 2, float("inf")) == []
    assert set(num_running) == {1}


def test_the_operation_is_that_of_its_demonstrations(research):
    problems = importlib.import_module("claims.problems")
    row = problems.operation_row(17, 25)
    assert row["reward_model"]["ground_truth"] == "86"  # 2 * 17 + 52
    assert row["target"][0]["content"].endswith("\\boxed{86}.")
    assert problems.apply_operation(10, 30) == 23


def test_wrong_depths_are_far_from_the_chosen_one(research):
    choose = research.bupo.choose_depths
    assert choose(5, 28) == [5, 14, 25]
    assert choose(13, 28) == [13, 4, 25]
    assert choose(None, 28) == [5, 14, 25]
    assert choose(28, 28) == [27, 4, 14]
    assert choose(1, 2) == [1]


def test_graders_are_counted_against_the_reference(research):
    scores = {"reference": [1.0, 1.0, 0.0, None], "other": [1.0, 0.0, 1.0, 1.0]}
    table = research.graders.confusion(scores)
    assert table.splitlines()[-1] == "| other | 1 | 1 | 1 | 0 | 1 |"
    classes = research.graders.disagreements([None] * 4, scores)
    assert classes == {("reference",): [1], ("other",): [2, 3]}


def test_final_answers_are_found_in_any_form(research):
    answer = research.graders.final_answer
    assert answer("so \\boxed{\\frac{1}{2}} #### 3") == "\\frac{1}{2}"
    assert answer("5 and 6\n#### 1,000\nend") == "1,000"
    assert answer("first 5, then 6.") == "6"
    assert answer("none") == "" == answer("####")
    assert answer("3 + 4 = 7\n#### and the number.") == "7"


def test_values_after_training_are_those_of_the_runs_that_came_furthest(research):
    """A run that was stopped at step 2 has an entropy of a start, which is no end's."""
    entries = []
    for seed, last, entropy in ((0, 4, 0.125), (1, 2, 0.75)):
        for step in range(1, last + 1):
            metrics = {"step": step, "entropy": entropy}
            label = f"losses-dapo-{seed}"
            entries.append({"arm": "DAPO", "seed": seed, "label": label, "metrics": metrics})
    row = research.draw.table(research.CLAIMS["losses"], entries).splitlines()[2]
    assert row == "| DAPO | - | - | 0.125 | - | - | 4 2 |"


def test_verls_rule_is_the_original(research):
    """Rows of verl's own behavior: a dollar, a full stop, 42.0 and early answers are refused."""
    rewards = importlib.import_module("claims.rewards")
    problem = Problem("p", (), "42")
    right = ("#### 42", "#### 41 #### 42", "#### 4,2")
    wrong = ("####42", "#### $42", "#### 42.", "#### 42.0", "#### 42" + " " * 300, "42", "")
    assert [rewards.verl_gsm8k(text, problem) for text in right] == [1.0] * 3
    assert [rewards.verl_gsm8k(text, problem) for text in wrong] == [0.0] * 7


def test_responses_are_read_from_files_too(research, tmp_path):
    row = {"uid": "a", "ground_truth": "7", "data_source": "openai/gsm8k", "response": "#### 7"}
    file = tmp_path / "responses.jsonl"
    file.write_text((json.dumps(row) + "\n") * 3 + json.dumps(row | {"response": "8"}) + "\n")
    found = research.graders.read_generated(file, 0)
    assert [one.text for one in research.graders.distinct(found)] == ["#### 7", "8"]
    assert found[0].problem.ground_truth == "7"
    assert [one.text for one in research.graders.spaced(found, 2)] == ["#### 7", "#### 7"]


def test_demonstrations_are_summarized_by_places(research):
    """Numbers of other lengths do not move the words after them."""
    make = research.demonstrations
    texts = ["Add", " ", "1", "2", " and", "3"], ["Add", " ", "9", " and", "3"]
    assert make.places(texts[0]) == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0)]
    assert make.places(texts[1])[-1] == (3, 0)
    rows = []
    for some, p in zip(texts, (0.1, 0.3), strict=True):
        pairs = zip(make.places(some), some, strict=True)
        rows.append([make.TokenProb(place, word, p) for place, word in pairs])
    summary = make.summary(rows)
    assert summary["tokens"] == 11
    assert summary["quantile 0"] == 0.1
    assert summary["mean p/(p+0.1)"] == pytest.approx((6 * 0.5 + 5 * 0.75) / 11)
    assert [token.prob for token in make.lowest(rows, 1)] == [0.1]
    assert make.shaped_grad(0.1) == pytest.approx(0.25)
    assert make.shaped_grad(1e-5) == pytest.approx(1e-4, rel=1e-3)


def test_continuations_start_from_the_first_words_of_a_solution(research, tmp_path, capsys):
    make = research.continuations
    solution = "16 - 3 = <<16-3=13>>13 eggs.\nShe sells 13.\n#### 13"
    assert make.first_words(solution, 0.6) == "16 - 3 = 13 eggs."
    assert make.first_words(solution, 0.05) == ""
    data = tmp_path / "test.jsonl"
    data.write_text(json.dumps({"question": "How many eggs?", "answer": solution}) + "\n")
    (problem,) = make.read_problems(str(data), 8)
    assert problem.messages[-1]["content"].startswith("How many eggs?\nThink step by step")
    assert make.main(["tiny", f"--data={data}", "--shown=0.5"]) == 0
    assert "tiny: 50% of the words shown, 0.0% right" in capsys.readouterr().out


def test_secret_problems_show_the_form_and_not_the_numbers(research):
    problems = importlib.import_module("claims.problems")
    row = problems.secret_row(25, 60, random.Random(0))
    assert row["reward_model"]["ground_truth"] == "(61, 118)"
    solution = "25 + 36 = 61 and 60 + 58 = 118. So 25 @ 60 = \\boxed{(61, 118)}."
    assert row["target"][0]["content"] == solution
    prompt = row["prompt"][0]["content"]
    assert prompt.endswith("What is 25 @ 60?")
    assert prompt.count("boxed") == 3
    problem = Problem("p", (), "(61, 118)", "arithmetic/boxed")
    with Scorer("auto") as scorer:
        scores = scorer.score([problem] * 3, [solution, "\\boxed{(61, 117)}", prompt])
    assert [score.value for score in scores] == [1.0, 0.0, 0.0]


def test_a_column_may_read_some_lines_only(research):
    column = research.bupo.CLAIM.columns[-2]
    lines = [{"step": i, "phase": 1 + i // 4, "stage/update_s": float(i)} for i in range(8)]
    assert research.draw.column_values(lines, column) == [1.0, 2.0, 3.0]


SLEEPER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from claims.runs import Run, start_run
script = Path(sys.argv[2]) / "sleep.py"
script.write_text("import time; time.sleep(600)")
item = start_run(Run("arm", 0, "label", [], script=str(script)), Path(sys.argv[2]))
print(item.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is a call of Linux")
def test_runs_end_when_the_benchmark_is_killed(tmp_path):
    arguments = [sys.executable, "-c", SLEEPER, str(BENCHMARKS), str(tmp_path)]
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = iter(parent.stdout.readline, "")
    pid = next(int(line) for line in lines if line.strip().isdigit())
    parent.kill()
    parent.wait()
    wait_for_end(pid)
