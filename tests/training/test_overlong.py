"""Prompts that are cut (data.overlong=left, right, middle): every method trains on the cut tokens, validation and evaluation see them,
the count is told once, and a run that goes on goes on with the same."""

import json

import pyarrow.parquet as pq
import pytest
from world import config_of, toy_run

from postgrad.cli.main import main
from postgrad.data.problems import load_problems
from postgrad.data.truncate import truncate
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.training import prepare
from postgrad.training.driver import train
from postgrad.training.report import Reporter

LIMIT = 4
SMALL = (
    *toy_run(samples=2, response_tokens=5),
    f"data.max_prompt_tokens={LIMIT}",
)
QUESTIONS = [
    *(f"{n}+{n + 11}=" for n in range(9)),
    *(f"{n}+{n}=" for n in range(3)),
]  # of five tokens, nine, and of four, three
ASKED = {"bupo": ("method.num_blocks=1", "method.phase_one_steps=1", "training.updates_per_step=1")}


class Notes(Reporter):
    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("verifier") / "odd.py"
    file.write_text(
        "def odd(response, problem):\n    return sum(c in '13579' for c in response) / 4 + 0.01 * len(response)\n"
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
        for question in QUESTIONS
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def overrides(data, verifier):
    return lambda recipe, runs: (
        *(*SMALL, *ASKED.get(recipe, ()), f"data.train={data}"),
        *(f"runs={runs}", f"reward.verifier={verifier}"),
    )


def rollouts(folder) -> list[dict]:
    return [
        row
        for file in sorted((folder / "rollouts").glob("*.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]


@pytest.mark.parametrize(
    ("recipe", "way"),
    [
        *(("grpo", way) for way in ("left", "right", "middle")),
        *(
            ("luffy", "right"),
            ("exgrpo", "left"),
            ("bupo", "left"),
            ("classmate", "middle"),
            ("sft", "left"),
            ("ppo", "right"),
        ),
    ],
)
def test_every_method_trains_on_the_cut_tokens(
    recipe, way, tiny, prompts, tmp_path, overrides, data
):
    notes, more = Notes(), (f"data.validation=held={data}", "training.validation_problems=8")
    own = (
        () if recipe == "bupo" else (f"data.overlong={way}",)
    )  # the authors' recipe cuts left by itself
    folder = train(config_of(recipe, tiny, *overrides(recipe, tmp_path), *own, *more), notes).folder
    wanted = {
        problem.uid: truncate(prompts.encode(problem), LIMIT, way)
        for problem in load_problems(data)
    }
    rows = rollouts(folder)
    assert len(rows) >= 8 and all(row["prompt"] == wanted[row["uid"]] for row in rows)
    line = f"too long: 9 of 12 in data.train, 8 of 8 in validation set held; cut to data.max_prompt_tokens=4 (data.overlong={way})"
    assert [note for note in notes.told if note.startswith("too long")] == [line]
    assert line in (folder / "events.jsonl").read_text()


def test_what_is_dropped_is_told_too(tiny, tmp_path, overrides):
    config = config_of(
        "grpo",
        tiny,
        *overrides("grpo", tmp_path),
        "data.overlong=drop",
        "training.problems_per_step=2",
    )
    inputs = prepare.load_inputs(config, find_method("grpo")(config))
    inputs.scorer.close()
    assert (
        len(inputs.train) == 3
        and inputs.too_long == "too long: 9 of 12 in data.train; left out (data.overlong=drop)"
    )


def test_a_run_that_goes_on_sees_the_same_tokens_and_says_nothing_again(tiny, tmp_path, overrides):
    same = (*overrides("grpo", tmp_path), "data.overlong=middle", "optimizer.lr=1e-2")
    whole = train(config_of("grpo", tiny, *same, "name=whole"), Reporter()).folder
    train(config_of("grpo", tiny, *same, "name=parts", "training.steps=1"), Reporter())
    notes = Notes()
    parts = train(config_of("grpo", tiny, *same, "name=parts"), notes).folder
    assert rollouts(whole) == rollouts(parts) and not any(
        note.startswith("too long") for note in notes.told
    )
    with pytest.raises(ConfigError, match=r"data\.overlong"):  # it changes what a step computes
        train(config_of("grpo", tiny, *same, "name=parts", "data.overlong=left"), Reporter())


@pytest.mark.parametrize("way", ["left", "right", "middle"])
def test_evaluation_cuts_alike_and_says_how_many(
    way, tiny, prompts, tmp_path, verifier, data, capsys
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
                f"overlong={way}",
            ]
        )
        == 0
    )
    seen = [json.loads(line)["prompt"] for line in (out / "sums.jsonl").read_text().splitlines()]
    assert seen == [
        prompts.decode_raw(truncate(prompts.encode(problem), LIMIT, way))
        for problem in load_problems(data)
    ]
    assert json.loads((out / "summary.json").read_text())["sets"]["sums"]["prompts_truncated"] == 9
    assert (
        "- answered with a truncated prompt because it is too long: 9 problems"
        in (out / "report.md").read_text()
    )
    printed = capsys.readouterr()
    assert (
        f"sums: 9 of 12 prompts were too long and truncated (overlong={way})"
        in printed.out + printed.err
    )
