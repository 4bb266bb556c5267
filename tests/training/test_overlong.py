"""Encoder that are cut (data.overlong=left, right, middle).

Every method trains on the cut tokens, validation and evaluation see them, a note gives their
number once, and a resumed run uses the same tokens.
"""

import json

import pyarrow.parquet as pq
import pytest
from jsonl import write_jsonl
from refused import refused
from tables import table
from tiny_runs import NoteReporter, config_of, toy_run

from postgrad.cli.main import main
from postgrad.data.encode.limits import truncate
from postgrad.data.problems import load_problems
from postgrad.training.driver import train
from postgrad.training.prepare import prepare
from postgrad.training.report import Reporter

LIMIT = 4
SMALL = (
    *toy_run(samples=2, response_tokens=5),
    f"data.max_prompt_tokens={LIMIT}",
)
FIVE_TOKENS = [f"{n}+{n + 11}=" for n in range(9)]
FOUR_TOKENS = [f"{n}+{n}=" for n in range(3)]
EXTRA_SETTINGS = {
    "bupo": ("method.num_blocks=1", "method.phase_one_steps=1", "training.updates_per_step=1")
}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("verifier") / "odd.py"
    file.write_text(
        "def odd(response, problem):\n"
        "    return sum(c in '13579' for c in response) / 4 + 0.01 * len(response)\n"
    )
    return f"{file}:odd"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [
        {
            "data_source": "x",
            "prompt": [{"role": "user", "content": question}],
            "target": [{"role": "assistant", "content": "12"}],
            "reward_model": {"ground_truth": "12"},
        }
        for question in [*FIVE_TOKENS, *FOUR_TOKENS]
    ]
    write_jsonl(file, *rows)
    return str(file)


@pytest.fixture(scope="module")
def overrides(data, verifier):
    """A function of (recipe, runs folder) that returns the settings of a run."""
    return lambda recipe, runs: (
        *SMALL,
        *EXTRA_SETTINGS.get(recipe, ()),
        f"data.train={data}",
        f"runs={runs}",
        f"reward.verifier={verifier}",
    )


def rollouts(folder) -> list[dict]:
    """Return the rows of all steps."""
    rows = []
    for file in sorted((folder / "rollouts").glob("*.parquet")):
        rows += pq.read_table(file).to_pylist()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "side"),
    table(__file__, "every_method_trains_on_the_cut_tokens"),
)
def test_every_method_trains_on_the_cut_tokens(
    recipe, side, tiny, prompts, tmp_path, overrides, data
):
    reporter = NoteReporter()
    settings = [
        *overrides(recipe, tmp_path),
        f"data.validation=held={data}",
        "training.validation_problems=8",
    ]
    if recipe != "bupo":  # its recipe has data.overlong=left
        settings.append(f"data.overlong={side}")
    folder = train(config_of(recipe, tiny, *settings), reporter).folder
    expected = {}
    for problem in load_problems(data):
        expected[problem.uid] = truncate(prompts.prompt(problem), LIMIT, side)
    rows = rollouts(folder)
    assert len(rows) >= 8 and all(row["prompt"] == expected[row["uid"]] for row in rows)
    line = (
        "too long: 9 of 12 in data.train, 8 of 8 in validation set held; "
        f"cut to data.max_prompt_tokens=4 (data.overlong={side})"
    )
    assert [note for note in reporter.notes if note.startswith("too long")] == [line]
    assert line in (folder / "events.jsonl").read_text()


def test_number_of_dropped_problems_is_reported(tiny, tmp_path, overrides):
    config = config_of(
        "grpo",
        tiny,
        *overrides("grpo", tmp_path),
        "data.overlong=drop",
        "training.problems_per_step=2",
    )
    run = prepare(config)
    run.scorer.close()
    assert len(run.train) == 3
    columns, note = run.notes[:2]
    assert "verl rows: reads data_source, prompt" in columns
    assert "9 of 12 in data.train" in note and "data.overlong=drop" in note


@pytest.mark.slow
def test_resumed_run_uses_the_same_tokens_and_repeats_no_note(tiny, tmp_path, overrides):
    same = (*overrides("grpo", tmp_path), "data.overlong=middle", "optimizer.lr=1e-2")
    whole = train(config_of("grpo", tiny, *same, "name=whole"), Reporter()).folder
    train(config_of("grpo", tiny, *same, "name=parts", "training.steps=1"), Reporter())
    reporter = NoteReporter()
    parts = train(config_of("grpo", tiny, *same, "name=parts"), reporter).folder
    assert rollouts(whole) == rollouts(parts)
    assert not any(note.startswith("too long") for note in reporter.notes)
    with refused("changed", "data.overlong"):  # it changes what a step computes
        train(config_of("grpo", tiny, *same, "name=parts", "data.overlong=left"), Reporter())


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_evaluation_cuts_the_same_tokens_and_reports_their_number(
    side, tiny, prompts, tmp_path, verifier, data, capsys
):
    overrides = [
        "eval",
        str(tiny),
        f"data=sums={data}",
        "max_response_tokens=3",
        "threads=1",
        "device=cpu",
        "workers=1",
    ]
    out = tmp_path / "e"
    assert (
        main(
            [
                *overrides,
                f"verifier={verifier}",
                f"out={out}",
                f"max_prompt_tokens={LIMIT}",
                f"overlong={side}",
            ]
        )
        == 0
    )
    seen = [json.loads(line)["prompt"] for line in (out / "sums.jsonl").read_text().splitlines()]
    assert seen == [
        prompts.decode_raw(truncate(prompts.prompt(problem), LIMIT, side))
        for problem in load_problems(data)
    ]
    assert json.loads((out / "summary.json").read_text())["sets"]["sums"]["prompts_truncated"] == 9
    assert (
        "- answered with a truncated prompt because it is too long: 9 problems"
        in (out / "report.md").read_text()
    )
    printed = capsys.readouterr()
    assert (
        f"sums: 9 of 12 prompts were too long and truncated (overlong={side})"
        in printed.out + printed.err
    )
