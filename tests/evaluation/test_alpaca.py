"""`postgrad eval` on an AlpacaEval file: output file, verdicts of a pairwise judge, win rates."""

import json
import os
from pathlib import Path

import pytest
from jsonl import read_jsonl, write_jsonl
from openai_server import serve
from tiny_runs import metrics_of, overrides_of, toy_run

from postgrad.cli.main import main
from postgrad.data.problems import load_problems
from postgrad.evaluation.alpaca import is_alpaca, write_answers
from postgrad.view.evaluations import Evaluations
from postgrad.view.folder import Folder

DEFAULT_DATA = Path(__file__).parents[2].parent / "shared" / "data"
REAL = Path(os.environ.get("POSTGRAD_REAL_DATA", DEFAULT_DATA)) / "cs336" / "alpaca_eval.jsonl"
REFERENCES = ["1", "22", "333", "4444", "55555", "666666", "7777777", "88888888"]
SMALL = ("max_response_tokens=6", "threads=1", "device=cpu", "batch=3")
PAIRWISE = (
    "verifier=llm_judge",
    "reward.judge.template=pairwise",
    "reward.max_failure_rate=1",
    "reward.judge.retries=1",
)


def alpaca_file(folder: Path, references=REFERENCES) -> Path:
    rows = []
    for i, output in enumerate(references):
        dataset = "helpful_base" if i % 2 else "koala"
        row = {"instruction": f"{i}+{i}=", "output": output, "generator": "someone"}
        rows.append(row | {"dataset": dataset})
    return write_jsonl(folder / "alpaca_eval.jsonl", *rows)


def with_references(file: Path | str) -> str:
    """Return the source whose outputs are what a judge compares with."""
    return f"{file}:output=ground_truth"


def shown_answers(text: str) -> tuple[str, str]:
    """Returns the two answers in the judge's prompt."""
    first, second = text.split("Answer A:\n")[1].split("\n\nAnswer B:\n")
    return first.rpartition("\n===")[0], second.rpartition("\n===")[0]


def prefer_longer(text: str) -> str:
    """A judge that prefers the longer answer; it gives no ranking for the reference 333."""
    first, second = shown_answers(text)
    if "333" in (first, second):
        return "hard to say"
    if len(first) == len(second):
        return "Length.\nRANKING: A = B"
    return "Length.\nRANKING: A > B" if len(first) > len(second) else "Length.\nRANKING: B > A"


def evaluate(model: Path, data: Path | str, out: Path, *overrides: str) -> int:
    return main(["eval", str(model), f"data={data}", *SMALL, *overrides, f"out={out}"])


def read(file: Path):
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def compared(tiny, tmp_path_factory) -> tuple[Path, str, int]:
    """Returns folder, printed text and number of judge calls of an evaluation.

    The evaluation runs twice; the second run reads the stored verdicts.
    """
    import contextlib
    import io

    root = tmp_path_factory.mktemp("alpaca")
    out = root / "out"
    with serve(chat=prefer_longer) as served, contextlib.redirect_stdout(io.StringIO()) as printed:
        judge = f"reward.judge.model='{served.address}'"
        assert evaluate(tiny, with_references(alpaca_file(root)), out, *PAIRWISE, judge) == 0
        num_calls = len(served.asked)
        (out / "alpaca_eval.jsonl").unlink()
        assert evaluate(tiny, with_references(alpaca_file(root)), out, *PAIRWISE, judge) == 0
        assert len(served.asked) == num_calls + 2, "only failed verdicts are requested again"
    return out, printed.getvalue(), num_calls


@pytest.mark.slow
def test_each_answer_is_compared_with_the_output_of_its_row(compared):
    out, _, num_calls = compared
    rows = read_jsonl(out / "alpaca_eval.jsonl")
    assert [row["ground_truth"] for row in rows] == REFERENCES
    assert num_calls == 7 + 2
    for row in rows:
        own = len(row["response"])
        other = len(row["ground_truth"])
        if row["ground_truth"] == "333":
            assert row["score"] is None
            assert "no ranking in the judge's reply" in row["failure"]["reason"]
            assert not row["right"]
        else:
            expected = 1.0 if own > other else 0.0 if own < other else 0.5
            assert row["score"] == row["parts"]["win"] == expected
            assert row["right"] == (row["score"] == 1.0)
    assert len({row["score"] for row in rows}) >= 3, "wins, losses and the failure"


@pytest.mark.slow
def test_summary_table_and_report_have_the_win_rates(compared):
    out, printed, _ = compared
    rows = [row for row in read_jsonl(out / "alpaca_eval.jsonl") if not row["failure"]]
    win = read(out / "summary.json")["sets"]["alpaca_eval"]["win"]
    assert win["rate"]["value"] == pytest.approx(sum(row["score"] for row in rows) / 7)
    assert win["failed"] == 1
    assert win["won"] + win["tied"] + win["lost"] == win["problems"] == 7
    assert win["characters"]["own"] == pytest.approx(sum(len(row["response"]) for row in rows) / 7)
    low, value, high = (win["length_controlled"][name] for name in ("low", "value", "high"))
    assert 0 < low < value < high < 1
    for part in ("win rate", "length-controlled", f"{100 * win['rate']['value']:.1f}% ["):
        assert part in printed
    report = (out / "report.md").read_text()
    counts = f"{win['won']} won, {win['tied']} tied, {win['lost']} lost, 1 without a verdict"
    controlled = "- length-controlled win rate: "
    for part in (counts, controlled, "characters per answer: ", "shown first in"):
        assert part in report
    assert "avg@" not in printed and "pass@1" not in report


def test_output_file_is_in_the_official_format_and_can_be_a_set(compared, tiny, tmp_path, capsys):
    """Against its own outputs a greedy model ties on every problem, and no judge is called."""
    out, _, _ = compared
    array = read(out / "alpaca_eval.outputs.json")
    rows = read_jsonl(out / "alpaca_eval.jsonl")
    names = ["dataset", "generator", "instruction", "output"]
    assert [sorted(item) for item in array] == [names] * 8
    assert [item["instruction"] for item in array] == [f"{i}+{i}=" for i in range(8)]
    assert [item["output"] for item in array] == [row["response"] for row in rows]
    assert {item["generator"] for item in array} == {tiny.name}
    assert [item["dataset"] for item in array[:2]] == ["koala", "helpful_base"]
    data = with_references(f"self={out / 'alpaca_eval.outputs.json'}")
    with serve(chat=lambda text: "1") as served:
        judge = f"reward.judge.model='{served.address}'"
        assert evaluate(tiny, data, tmp_path / "self", *PAIRWISE, judge) == 0
    win = read(tmp_path / "self" / "summary.json")["sets"]["self"]["win"]
    assert (win["tied"], win["rate"]["value"], win["failed"]) == (8, 0.5, 0)
    assert not (tmp_path / "self" / "judge.jsonl").exists()


def test_both_orders_cancel_a_judge_that_prefers_the_first(tiny, tmp_path, capsys):
    with serve(chat=lambda text: "A > B") as served:
        judge = ("reward.judge.both_orders=true", f"reward.judge.model='{served.address}'")
        data = with_references(alpaca_file(tmp_path))
        assert evaluate(tiny, data, tmp_path / "out", *PAIRWISE, *judge) == 0
        assert len(served.asked) == 16
    result = read(tmp_path / "out" / "summary.json")["sets"]["alpaca_eval"]
    assert result["win"]["rate"]["value"] == 0.5
    assert result["parts"]["chose_first"] == 1.0
    assert result["win"]["tied"] == 8


def test_compare_uses_win_rates(compared, tiny, tmp_path, capsys):
    """Responses without a verdict are left out; the file of ratings is not a set."""
    out, _, _ = compared
    ties = tmp_path / "ties"
    with serve(chat=lambda text: "A = B") as served:
        judge = f"reward.judge.model='{served.address}'"
        assert evaluate(tiny, with_references(alpaca_file(tmp_path)), ties, *PAIRWISE, judge) == 0
        assert (ties / "judge.jsonl").is_file()
    assert main(["eval", "compare", str(out), str(ties), f"out={tmp_path / 'both.json'}"]) == 0
    assert "win rates" in capsys.readouterr().out
    sets = read(tmp_path / "both.json")["sets"]
    scores = [row["score"] for row in read_jsonl(out / "alpaca_eval.jsonl")]
    assert list(sets) == ["alpaca_eval"]
    result = sets["alpaca_eval"]
    assert (result["problems"], result["only_b"], result["b"]) == (7, 1, 0.5)
    assert result["a"] == pytest.approx(sum(one for one in scores if one is not None) / 7)


def test_judge_without_verdicts_gives_no_rate(tiny, tmp_path, capsys):
    data = with_references(alpaca_file(tmp_path))
    strict = "reward.max_failure_rate=0.5"
    with serve(chat=lambda text: "1") as served:
        judge = (*PAIRWISE, f"reward.judge.model='{served.address}'")
        assert evaluate(tiny, data, tmp_path / "out", *judge) == 0
        assert evaluate(tiny, data, tmp_path / "strict", *judge, strict) == 1
    assert strict in capsys.readouterr().err
    assert "8 without a verdict" in (tmp_path / "out" / "report.md").read_text()
    assert read(tmp_path / "out" / "summary.json")["sets"]["alpaca_eval"]["win"]["rate"] is None


def test_page_shows_the_evaluation_without_the_file_of_verdicts(compared):
    out, _, _ = compared
    (one,) = Evaluations(Folder(out.parent)).all()["evaluations"]
    assert one["sets"] == ["alpaca_eval"]
    assert one["summary"]["sets"]["alpaca_eval"]["win"]["rate"]["value"] >= 0


def test_stop_string_is_not_part_of_the_answer(compared, tiny, tmp_path, capsys):
    written = [row["response"] for row in read_jsonl(compared[0] / "alpaca_eval.jsonl")]
    stop = next(text[-1] for text in written if text[0] != text[-1])
    before = [text.partition(stop)[0] for text in written]
    with serve(chat=prefer_longer) as served:
        overrides = (
            *PAIRWISE,
            f"reward.judge.model='{served.address}'",
            f"rollout.stop=['{stop}']",
            "reward.judge.retries=0",
        )
        data = with_references(alpaca_file(tmp_path))
        assert evaluate(tiny, data, tmp_path / "out", *overrides) == 0
        judged_pairs = {
            frozenset(shown_answers(one["messages"][0]["content"])) for one in served.asked
        }
    rows = read_jsonl(tmp_path / "out" / "alpaca_eval.jsonl")
    array = read(tmp_path / "out" / "alpaca_eval.outputs.json")
    assert [row["response"] for row in rows] == [
        "".join(text.partition(stop)[:2]) for text in written
    ]
    assert [item["output"] for item in array] == before != written
    assert judged_pairs == {frozenset(pair) for pair in zip(before, REFERENCES, strict=True)}
    own = [len(text) for text, row in zip(before, rows, strict=True) if not row["failure"]]
    win = read(tmp_path / "out" / "summary.json")["sets"]["alpaca_eval"]["win"]
    assert win["characters"]["own"] == pytest.approx(sum(own) / len(own))


def test_output_file_needs_no_judge(tiny, tmp_path, capsys):
    data = with_references(alpaca_file(tmp_path))
    assert evaluate(tiny, data, tmp_path / "out", "verifier=length") == 0
    assert len(read(tmp_path / "out" / "alpaca_eval.outputs.json")) == 8
    assert "win" not in read(tmp_path / "out" / "summary.json")["sets"]["alpaca_eval"]
    assert evaluate(tiny, "arithmetic:1:digits:train", tmp_path / "sums", "limit=2") == 0
    assert not list((tmp_path / "sums").glob("*.outputs.json")), "not an AlpacaEval set"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("reward.judge.lowest=0",), "reward.judge.lowest=0"),
        (("reward.pass_score=0",), "reward.pass_score=0"),
        (("data=judge={file}",), "data=NAME=FILE"),
        (("data={bare}",), "reference answer"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(tiny, tmp_path, capsys, overrides, message):
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"prompt": "1+1="}\n')
    file = alpaca_file(tmp_path)
    overrides = [override.format(file=file, bare=bare) for override in overrides]
    with serve(chat=lambda text: "A = B") as served:
        judge = (*PAIRWISE, f"reward.judge.model='{served.address}'")
        assert evaluate(tiny, file, tmp_path / "out", *judge, *overrides) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not REAL.is_file(), reason=f"no real data at {REAL}")
@pytest.mark.parametrize("prepared", [False, True])
def test_output_file_of_the_real_set(prepared, tmp_path, monkeypatch, capsys):
    """The output has the instructions, datasets and order of the official file."""
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
    official = read_jsonl(REAL)
    outputs = read(tmp_path / "out.json")
    assert [(item["instruction"], item["dataset"]) for item in outputs] == [
        (row["instruction"], row["dataset"]) for row in official
    ]
    assert [item["output"] for item in outputs] == [f"answer {i}" for i in range(805)]
    assert {item["generator"] for item in outputs} == {"me"}


@pytest.mark.slow
def test_win_rate_is_the_reward_of_a_run(tiny, tmp_path, capsys):
    small = toy_run(steps=1, problems=2)
    with serve(chat=prefer_longer) as served:
        overrides = overrides_of(
            tiny,
            *small,
            *PAIRWISE[1:],
            "reward.verifier=llm_judge",
            f"reward.judge.model='{served.address}'",
        )
        file = alpaca_file(tmp_path, ["1", "1111111111"] * 4)
        run = (f"data.train={with_references(file)}", f"runs={tmp_path / 'runs'}", "name=won")
        assert main(["train", "grpo", *overrides, *run]) == 0
    (step,) = [line for line in metrics_of(tmp_path / "runs" / "won") if "reward/mean" in line]
    assert 0 <= step["reward/mean"] == step["reward/win"] <= 1
    assert 0 <= step["reward/chose_first"] <= 1
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1+1="}\n' * 4)
    run = (f"data.train={tmp_path / 'bare.jsonl'}", f"runs={tmp_path / 'none'}")
    assert main(["train", "grpo", *overrides, *run]) == 2
    assert "reference answer" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
