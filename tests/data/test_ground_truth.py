"""A replaced ground truth is in every place where a verifier or a reward function reads it."""

from typing import Any

import pytest
from jsonl import write_jsonl
from tables import tabled
from tiny_runs import config_of

from postgrad.cli.main import main
from postgrad.data.ground_truth import with_ground_truth
from postgrad.data.pairs import paired_problem
from postgrad.data.problems import problems_of_rows
from postgrad.problem import Problem, Score
from postgrad.training.prepare import prepare
from postgrad.user_code import PythonObject
from postgrad.verifiers.expression import Term
from postgrad.verifiers.scorer import Scorer

ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "2+2=", "ground_truth": "4"}, "ground_truth"),
    ({"prompt": "2+2=", "answer": 4}, "answer"),
    ({"question": "2+2=", "answer": "two and two\n#### 4"}, "answer"),
    ({"instruction": "2+2=", "output": "It is 4.", "final_answer": "4"}, "final_answer"),
    ({"question": "2+2=", "choices": ["3", "4"], "answer": 1}, "answer"),
]
VERL = {
    "prompt": [{"role": "user", "content": "2+2="}],
    "reward_model": {"ground_truth": 4, "style": "rule"},
}


def seen_by_trl(problem: Problem) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def reward(completions, **columns):
        seen.update(columns)
        return [0.0]

    scorer = Scorer(PythonObject("test", [Term(1.0, "reward", function=reward)]))
    assert scorer.score([problem], ["x"]) == [Score(0.0)]
    return seen


@pytest.mark.parametrize(("row", "column"), ROWS)
def test_functions_of_trl_read_the_new_truth(row, column):
    (problem,) = problems_of_rows([row], "rows")
    before = dict(row)
    seen = seen_by_trl(with_ground_truth(problem, "five"))
    assert seen[column] == ["five"] == seen["ground_truth"]
    assert problem.row == before and problem.ground_truth != "five"


def test_functions_of_verl_and_trl_read_the_new_truth_of_verl_rows():
    (problem,) = problems_of_rows([VERL], "rows")
    changed = with_ground_truth(problem, "five")
    assert seen_by_trl(changed)["reward_model"] == [{"ground_truth": "five", "style": "rule"}]
    seen: list[Any] = []

    def verl(solution_str, ground_truth):
        seen.append(ground_truth)
        return 1.0

    scorer = Scorer(PythonObject("test", [Term(1.0, "reward", function=verl)]))
    scorer.score([problem, changed], ["x", "x"])
    assert seen == [4, "five"] and VERL["reward_model"]["ground_truth"] == 4


def test_a_generated_problem_has_no_row():
    problem = with_ground_truth(Problem("u", ({"role": "user", "content": "?"},), "4"), "five")
    assert seen_by_trl(problem)["ground_truth"] == ["five"] and problem.row == {}


def test_a_row_unlike_the_first_of_its_file():
    rows = [{"prompt": "2+2="}, {"prompt": "3+3=", "output": "6"}]
    for problem in problems_of_rows(rows, "rows"):
        assert with_ground_truth(problem, "five").row["ground_truth"] == "five"


def test_a_paired_problem_has_its_question_and_truth_in_the_columns():
    row = {"prompt": "2+2=", "answer": "4", "paired_similar_q": "3+3=", "paired_similar_q_gt": "6"}
    (problem,) = problems_of_rows([row], "rows")
    seen = seen_by_trl(paired_problem(problem))
    assert (seen["prompts"], seen["answer"], seen["ground_truth"]) == (["3+3="], ["6"], ["6"])


@pytest.mark.parametrize(
    ("value", "truth"),
    [(4.0, "4"), (-3.0, "-3"), (2.5, "2.5"), (1e16, "10000000000000000"), (7, "7"), (True, "True")],
)
def test_whole_numbers_have_no_fraction(value, truth):
    """pandas makes floats of integers where a cell is empty."""
    (problem,) = problems_of_rows([{"prompt": "2+2=", "ground_truth": value}], "rows")
    assert problem.ground_truth == truth


@tabled("verifier, truth, is_reported")
def test_json_that_a_verifier_takes_for_one_answer_is_reported(verifier, truth, is_reported):
    (problem,) = problems_of_rows([{"prompt": "2+2=", "ground_truth": truth}], "rows")
    with Scorer(verifier) as scorer:
        notes = scorer.notes([problem])
    assert any("ground truths are lists or objects" in note for note in notes) == is_reported


SOME_WITHOUT_TRUTH = [
    {"prompt": "2+2=", "ground_truth": "4"},
    {"prompt": "2+3=", "ground_truth": None},
    {"prompt": "2+4="},
]


def contains(response, problem):
    return float(problem.ground_truth in response)


@pytest.mark.parametrize(
    ("verifier", "is_reported"),
    [
        ("exact", True),
        ("format + 0.1*exact", True),
        (PythonObject("own", [Term(1.0, "own", function=contains)]), True),
        (PythonObject("own", [Term(1.0, "format")]), False),
        ("format", False),
        ("llm_judge", False),
        ("model:folder", False),
        ("environment", False),
    ],
)
def test_rows_without_a_truth_beside_others_are_reported(verifier, is_reported):
    problems = problems_of_rows(SOME_WITHOUT_TRUTH, "rows")
    with Scorer(verifier) as scorer:
        notes = scorer.truth_notes({"held": problems, "full": problems[:1], "none": problems[1:]})
    assert len(notes) == is_reported
    assert not notes or "no ground truth in 2 of 3 rows of held;" in notes[0]


def test_a_run_and_an_evaluation_report_rows_without_a_truth(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows.jsonl"
    write_jsonl(file, *SOME_WITHOUT_TRUTH)
    (tmp_path / "own.py").write_text("def score(response, problem):\n    return 1.0\n")
    overrides = [f"data.train={file}", f"data.validation={file}", "reward.verifier=own.py:score"]
    run = prepare(config_of("grpo", tiny, *overrides, "training.problems_per_step=1"))
    (note,) = [note for note in run.notes if "ground truth" in note]
    assert "in 2 of 3 rows of data.train, 2 of 3 rows of validation set rows;" in note
    short = ["rollout.max_response_tokens=2", "model.device=cpu"]
    settings = ["reward.verifier=own.py:score", *short]
    assert main(["eval", str(tiny), f"data={file}", *settings]) == 0
    assert "warning: no ground truth in 2 of 3 rows of rows;" in capsys.readouterr().out
