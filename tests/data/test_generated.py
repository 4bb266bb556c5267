"""Generated data: seeds for environments, reasoning-gym with its own scorers; the hub by name."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from refused import refused
from tables import tabled

from postgrad.data.problems import load_problems
from postgrad.data.sources import hub as hub_data
from postgrad.errors import ConfigError
from postgrad.problem import Failure
from postgrad.verifiers.loading import load_verifier
from postgrad.verifiers.scorer import Scorer
from postgrad.verifiers.table import VERIFIERS

score = load_verifier(VERIFIERS["reasoning_gym"].path)


def test_seeds_are_problems_without_text():
    problems = load_problems("seeds:3")
    assert [problem.uid for problem in problems] == ["seed-0", "seed-1", "seed-2"]
    assert problems[0].messages == ({"role": "user", "content": ""},)
    held_out = load_problems("seeds:2:start=3")
    assert [problem.uid for problem in held_out] == ["seed-3", "seed-4"]


GENERATORS = ["countdown", "chain_sum", "zebra_puzzles", "n_queens", "dice"]
# Scores are computed in processes of their own in a run; other tests change sympy's state here.
SCORES = """
import json, sys
from postgrad.data.problems import load_problems
from postgrad.verifiers.grading.reasoning_gym import reasoning_gym as score

table = []
for name in sys.argv[1:]:
    for problem in load_problems(f"reasoning_gym:{name}:size=3:seed=5"):
        truth = problem.ground_truth
        right = score(f"so <answer>no</answer>: <answer>{truth}</answer>", problem)
        wrong = score("<answer>certainly not this</answer>", problem)
        bare = score(truth, problem)
        table.append([problem.uid, truth, right.value, right.parts, wrong.value, bare.value])
print(json.dumps(table))
"""


@pytest.mark.slow
def test_the_known_answer_of_a_generator_is_right():
    pytest.importorskip("reasoning_gym")
    done = subprocess.run(
        [sys.executable, "-c", SCORES, *GENERATORS], capture_output=True, text=True, check=True
    )
    table = json.loads(done.stdout)
    assert len({uid for uid, *_ in table}) == len(table) == 3 * len(GENERATORS)
    for uid, truth, right, parts, wrong, bare in table:
        assert (right, parts) == (1.0, {"answered": 1.0}), (uid, truth)
        assert wrong < 0.2 and bare == 0.0, (uid, truth)


@pytest.mark.slow
def test_the_scorer_of_generated_problems_is_chosen_by_itself():
    pytest.importorskip("reasoning_gym")
    problem = load_problems("reasoning_gym:dice:size=1")[0]
    assert Scorer("auto").name_for(problem) == "reasoning_gym"


@pytest.mark.slow
def test_a_generator_has_options_seeds_and_levels():
    pytest.importorskip("reasoning_gym")

    def texts(source):
        return [problem.messages[0]["content"] for problem in load_problems(source)]

    same = "reasoning_gym:chain_sum:size=4"
    assert texts(same) == texts(same) != texts(f"{same}:seed=1")
    assert all(text.count("+") + text.count("-") == 4 for text in
               texts(f"{same}:min_terms=5:max_terms=5:min_digits=1:max_digits=1"))  # fmt: skip
    easy, hard = texts(f"{same}:level=0"), texts(f"{same}:level=3")
    assert sum(map(len, hard)) > sum(map(len, easy))


@tabled("source, code, at, shows")
def test_sources_that_cannot_be_had_are_refused(source, code, at, shows):
    if source.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    with refused(code, at, shows=re.escape(shows)):
        load_problems(source)


def test_a_problem_of_another_source_has_no_generator():
    assert isinstance(score("<answer>1</answer>", load_problems("seeds:1")[0]), Failure)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A stand-in for the hub: one data set with two splits."""
    folder = tmp_path / "snapshot"
    (folder / "main").mkdir(parents=True)
    row = '{"query": "1+1?", "answer": "two #### 2", "note": 1}\n'
    (folder / "main" / "train-0.jsonl").write_text(row * 2)
    (folder / "main" / "test-0.jsonl").write_text(row)
    monkeypatch.setattr(hub_data, "fetch", lambda repo, patterns, **_: (folder, [], "abc"))
    return folder


def test_a_data_set_of_the_hub_by_name(hub):
    problems = load_problems("hub:openai/gsm8k:test:query=question")
    assert [(one.ground_truth, one.data_source) for one in problems] == [("2", "openai/gsm8k")]
    assert len(load_problems("hub:openai/gsm8k:query=question")) == 2
    with refused("unknown_name", "openai/gsm8k"):
        load_problems("hub:openai/gsm8k:dev")
    with pytest.raises(ConfigError, match="no column querry"):
        load_problems("hub:openai/gsm8k:test:querry=question")
