"""`postgrad eval` on an AlpacaEval file: answers, the official array, verdicts of a judge on two answers, and what is shown of them."""

import json
import os
from pathlib import Path

import pytest
from served import serve
from world import overrides_of

from postgrad.cli.main import main
from postgrad.data.problems import load_problems
from postgrad.evaluation.alpaca import is_alpaca, write_answers
from postgrad.view.evaluations import Evaluations
from postgrad.view.folder import Folder

REAL = (
    Path(os.environ.get("POSTGRAD_REAL_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
    / "cs336"
    / "alpaca_eval.jsonl"
)
REFERENCES = ["1", "22", "333", "4444", "55555", "666666", "7777777", "88888888"]
SMALL = ("max_response_tokens=6", "threads=1", "device=cpu", "batch=3")
COMPARED = (
    "verifier=llm_judge",
    "reward.judge.template=pairwise",
    "reward.max_failure_rate=1",
    "reward.judge.retries=1",
)


def alpaca_file(folder: Path, references=REFERENCES) -> Path:
    rows = [
        {
            "instruction": f"{i}+{i}=",
            "output": output,
            "generator": "someone",
            "dataset": "helpful_base" if i % 2 else "koala",
        }
        for i, output in enumerate(references)
    ]
    file = folder / "alpaca_eval.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def shown(text: str) -> tuple[str, str]:
    first, second = text.split("Answer A:\n")[1].split("\n\nAnswer B:\n")
    return first, second.split("\n\nEnd with")[0]


def likes_long(text: str) -> str:
    """Prefers the longer answer; has no word for the reference 333."""
    first, second = (len(answer) for answer in shown(text))
    if "333" in shown(text):
        return "hard to say"
    return (
        f"Length.\nRANKING: {'A > B' if first > second else 'B > A' if second > first else 'A = B'}"
    )


def read(file: Path):
    return json.loads(file.read_text())


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def compared(tiny, tmp_path_factory) -> tuple[Path, str, int]:
    """(folder, what was printed, number of questions) of an evaluation that was run twice, the second time from the kept verdicts."""
    import contextlib
    import io

    root = tmp_path_factory.mktemp("alpaca")
    with serve(chat=likes_long) as served, contextlib.redirect_stdout(io.StringIO()) as said:
        overrides = [
            "eval",
            str(tiny),
            f"data={alpaca_file(root)}",
            *SMALL,
            *COMPARED,
            f"reward.judge.model='{served.address}'",
        ]
        assert main([*overrides, f"out={root / 'out'}"]) == 0
        asked = len(served.asked)
        (root / "out" / "alpaca_eval.jsonl").unlink()
        assert main([*overrides, f"out={root / 'out'}"]) == 0 and len(served.asked) == asked + 2, (
            "only what has no verdict is asked again"
        )
    return root / "out", said.getvalue(), asked


def test_each_answer_is_compared_with_the_rows_own_output(compared):
    out, _, asked = compared
    rows = lines(out / "alpaca_eval.jsonl")
    assert [row["ground_truth"] for row in rows] == REFERENCES and asked == 7 + 2
    for row in rows:
        own, other = len(row["response"]), len(row["ground_truth"])
        if row["ground_truth"] == "333":
            assert (
                row["score"] is None
                and "no ranking in the judge's reply" in row["failure"]["reason"]
                and not row["right"]
            )
        else:
            assert (
                row["score"]
                == row["parts"]["win"]
                == (1.0 if own > other else 0.0 if own < other else 0.5)
            )
            assert row["right"] == (row["score"] == 1.0)
    assert len({row["score"] for row in rows}) >= 3, "wins, losses and the failure"


def test_the_summary_the_table_and_the_report_say_so(compared):
    out, said, _ = compared
    rows = [row for row in lines(out / "alpaca_eval.jsonl") if not row["failure"]]
    win = read(out / "summary.json")["sets"]["alpaca_eval"]["win"]
    assert (
        win["rate"]["value"] == pytest.approx(sum(row["score"] for row in rows) / 7)
        and win["failed"] == 1
    )
    assert win["won"] + win["tied"] + win["lost"] == win["problems"] == 7
    assert win["characters"]["own"] == pytest.approx(sum(len(row["response"]) for row in rows) / 7)
    assert (
        0
        < win["length_controlled"]["low"]
        < win["length_controlled"]["value"]
        < win["length_controlled"]["high"]
        < 1
    )
    assert (
        "win rate" in said
        and "length-controlled" in said
        and f"{100 * win['rate']['value']:.1f}% [" in said
        and "avg@" not in said
    )
    report = (out / "report.md").read_text()
    assert (
        f"{win['won']} won, {win['tied']} tied, {win['lost']} lost, 1 without a verdict" in report
    )
    assert "- length-controlled win rate: " in report and "pass@1" not in report
    assert "characters of an answer: " in report and "saw first in" in report


def test_the_official_array_can_be_read_by_others_and_by_us(compared, tiny, tmp_path, capsys):
    """The answers of one evaluation are the reference of the next: against itself a greedy model ties, and nobody is asked."""
    out, _, _ = compared
    array, rows = read(out / "alpaca_eval.outputs.json"), lines(out / "alpaca_eval.jsonl")
    assert [sorted(item) for item in array] == [
        ["dataset", "generator", "instruction", "output"]
    ] * 8
    assert [item["instruction"] for item in array] == [f"{i}+{i}=" for i in range(8)]
    assert [item["output"] for item in array] == [row["response"] for row in rows]
    assert {item["generator"] for item in array} == {tiny.name} and [
        item["dataset"] for item in array[:2]
    ] == [
        "koala",
        "helpful_base",
    ]
    again = [
        "eval",
        str(tiny),
        f"data=self={out / 'alpaca_eval.outputs.json'}",
        *SMALL,
        *COMPARED,
        "reward.judge.model=fake:1",
    ]
    assert main([*again, f"out={tmp_path / 'self'}"]) == 0
    win = read(tmp_path / "self" / "summary.json")["sets"]["self"]["win"]
    assert (win["tied"], win["rate"]["value"], win["failed"]) == (8, 0.5, 0) and not (
        tmp_path / "self" / "judge.jsonl"
    ).exists()


def test_both_orders_and_a_judge_that_always_says_first(tiny, tmp_path, capsys):
    with serve(chat=lambda text: "A > B") as served:
        more = [
            "reward.judge.both_orders=true",
            f"reward.judge.model='{served.address}'",
            f"out={tmp_path / 'out'}",
        ]
        assert (
            main(["eval", str(tiny), f"data={alpaca_file(tmp_path)}", *SMALL, *COMPARED, *more])
            == 0
        )
        assert len(served.asked) == 16
    result = read(tmp_path / "out" / "summary.json")["sets"]["alpaca_eval"]
    assert (
        result["win"]["rate"]["value"] == 0.5
        and result["parts"]["chose_first"] == 1.0
        and result["win"]["tied"] == 8
    )


def test_two_such_results_differ_by_what_they_won(compared, tiny, tmp_path, capsys):
    """Responses without a verdict are left out; ratings are no set."""
    out, _, _ = compared
    file = alpaca_file(tmp_path)
    with serve(chat=lambda text: "A = B") as served:
        overrides = [
            "eval",
            str(tiny),
            f"data={file}",
            *SMALL,
            *COMPARED,
            f"reward.judge.model='{served.address}'",
        ]
        assert (
            main([*overrides, f"out={tmp_path / 'ties'}"]) == 0
            and (tmp_path / "ties" / "judge.jsonl").is_file()
        )
    assert (
        main(["eval", "compare", str(out), str(tmp_path / "ties"), f"out={tmp_path / 'both.json'}"])
        == 0
    )
    assert "A and B are win rates against the reference" in capsys.readouterr().out
    sets = read(tmp_path / "both.json")["sets"]
    wins = [row["score"] for row in lines(out / "alpaca_eval.jsonl") if row["score"] is not None]
    assert (
        list(sets) == ["alpaca_eval"]
        and sets["alpaca_eval"]["problems"] == 7
        and sets["alpaca_eval"]["only_b"] == 1
    )
    assert (
        sets["alpaca_eval"]["a"] == pytest.approx(sum(wins) / 7) and sets["alpaca_eval"]["b"] == 0.5
    )


def test_a_judge_that_never_answers_gives_no_rate(tiny, tmp_path, capsys):
    overrides = [
        "eval",
        str(tiny),
        f"data={alpaca_file(tmp_path)}",
        *SMALL,
        *COMPARED,
        "reward.judge.model=fake:1",
    ]
    assert main([*overrides, f"out={tmp_path / 'out'}"]) == 0
    assert "8 without a verdict" in (tmp_path / "out" / "report.md").read_text()
    assert read(tmp_path / "out" / "summary.json")["sets"]["alpaca_eval"]["win"]["rate"] is None
    assert main([*overrides, "reward.max_failure_rate=0.5", f"out={tmp_path / 'strict'}"]) == 1
    assert "100% of the responses could not be judged" in capsys.readouterr().err


def test_the_page_shows_it_and_takes_the_verdicts_for_no_set(compared):
    out, _, _ = compared
    (one,) = Evaluations(Folder(out.parent)).all()["evaluations"]
    assert (
        one["sets"] == ["alpaca_eval"]
        and one["summary"]["sets"]["alpaca_eval"]["win"]["rate"]["value"] >= 0
    )


def test_the_string_that_ended_an_answer_is_left_out_of_it(compared, tiny, tmp_path, capsys):
    written = [row["response"] for row in lines(compared[0] / "alpaca_eval.jsonl")]
    stop = next(text[-1] for text in written if text[0] != text[-1])
    before = [text.partition(stop)[0] for text in written]
    with serve(chat=likes_long) as served:
        overrides = [
            "eval",
            str(tiny),
            f"data={alpaca_file(tmp_path)}",
            *SMALL,
            *COMPARED,
            f"reward.judge.model='{served.address}'",
        ]
        assert (
            main(
                [
                    *overrides,
                    f"rollout.stop=['{stop}']",
                    "reward.judge.retries=0",
                    f"out={tmp_path / 'out'}",
                ]
            )
            == 0
        )
        asked = {frozenset(shown(one["messages"][0]["content"])) for one in served.asked}
    rows, array = (
        lines(tmp_path / "out" / "alpaca_eval.jsonl"),
        read(tmp_path / "out" / "alpaca_eval.outputs.json"),
    )
    assert [row["response"] for row in rows] == [
        "".join(text.partition(stop)[:2]) for text in written
    ]
    assert [item["output"] for item in array] == before != written
    assert asked == {frozenset(pair) for pair in zip(before, REFERENCES, strict=True)}
    own = [len(text) for text, row in zip(before, rows, strict=True) if not row["failure"]]
    win = read(tmp_path / "out" / "summary.json")["sets"]["alpaca_eval"]["win"]
    assert win["characters"]["own"] == pytest.approx(sum(own) / len(own))


def test_answers_alone_need_no_judge(tiny, tmp_path, capsys):
    assert (
        main(
            [
                "eval",
                str(tiny),
                f"data={alpaca_file(tmp_path)}",
                *SMALL,
                "verifier=length",
                f"out={tmp_path / 'out'}",
            ]
        )
        == 0
    )
    assert len(read(tmp_path / "out" / "alpaca_eval.outputs.json")) == 8
    assert "win" not in read(tmp_path / "out" / "summary.json")["sets"]["alpaca_eval"]
    assert (
        main(
            [
                "eval",
                str(tiny),
                "data=arithmetic:1:digits:train",
                "limit=2",
                *SMALL,
                f"out={tmp_path / 'sums'}",
            ]
        )
        == 0
    )
    assert not list((tmp_path / "sums").glob("*.outputs.json")), "a set of another kind"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("reward.judge.lowest=0",), "reward.judge.lowest=0 has no use"),
        (
            ("reward.pass_score=0",),
            "every rating of a judge reaches reward.pass_score=0; say from which rating on",
        ),
        (("data=judge={file}",), "a set cannot be called judge"),
        (("data={bare}",), "compares with a reference answer, and problem"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_nothing_is_written(
    tiny, tmp_path, capsys, overrides, says
):
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"prompt": "1+1="}\n')
    file = alpaca_file(tmp_path)
    given = [word.format(file=file, bare=bare) for word in overrides]
    data = [] if any(word.startswith("data=") for word in given) else [f"data={file}"]
    assert (
        main(
            [
                "eval",
                str(tiny),
                *data,
                *SMALL,
                *COMPARED,
                "reward.judge.model=fake:A = B",
                *given,
                f"out={tmp_path / 'out'}",
            ]
        )
        == 2
    )
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.skipif(not REAL.is_file(), reason=f"no real data at {REAL}")
@pytest.mark.parametrize("prepared", [False, True])
def test_the_real_805(prepared, tmp_path, monkeypatch, capsys):
    """As downloaded and as prepared: the array has the instructions, sets and order of the official file."""
    monkeypatch.chdir(tmp_path)
    if prepared:
        assert main(["data", "prepare", "alpaca_eval", f"from={REAL}"]) == 0
    problems = load_problems(str(tmp_path / "alpaca_eval-test.parquet" if prepared else REAL))
    rows = [
        {"uid": problem.uid, "sample": 0, "response": f"answer {i}"}
        for i, problem in enumerate(problems)
    ]
    assert is_alpaca(problems)
    write_answers(tmp_path / "out.json", problems, rows, "me", "set")
    wanted = [json.loads(line) for line in REAL.read_text().splitlines()]
    got = read(tmp_path / "out.json")
    assert [(item["instruction"], item["dataset"]) for item in got] == [
        (row["instruction"], row["dataset"]) for row in wanted
    ]
    assert [item["output"] for item in got] == [f"answer {i}" for i in range(805)] and {
        item["generator"] for item in got
    } == {"me"}


def test_a_run_is_rewarded_for_what_it_wins(tiny, tmp_path, capsys):
    small = (
        "training.problems_per_step=2",
        "rollout.samples=4",
        "rollout.max_response_tokens=4",
        "training.steps=1",
    )
    with serve(chat=likes_long) as served:
        overrides = overrides_of(
            tiny,
            *small,
            *COMPARED[1:],
            "reward.verifier=llm_judge",
            f"reward.judge.model='{served.address}'",
        )
        file = alpaca_file(tmp_path, ["1", "1111111111"] * 4)
        assert (
            main(
                [
                    "train",
                    "grpo",
                    *overrides,
                    f"data.train={file}",
                    f"runs={tmp_path / 'runs'}",
                    "name=won",
                ]
            )
            == 0
        )
    (step,) = [
        line for line in lines(tmp_path / "runs" / "won" / "metrics.jsonl") if "reward/mean" in line
    ]
    assert (
        0 <= step["reward/mean"] == step["reward/win"] <= 1 and 0 <= step["reward/chose_first"] <= 1
    )
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1+1="}\n' * 4)
    assert (
        main(
            [
                "train",
                "grpo",
                *overrides,
                f"data.train={tmp_path / 'bare.jsonl'}",
                f"runs={tmp_path / 'none'}",
            ]
        )
        == 2
    )
    assert (
        "compares with a reference answer, and problem" in capsys.readouterr().err
        and not (tmp_path / "none").exists()
    )
