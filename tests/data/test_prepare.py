"""`data prepare`: every data set in its real column layout, same bytes each time, dropped rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from fixture_types import Patch
from refused import refused
from tables import table, tabled

from postgrad.data.prepare.catalog import SETS
from postgrad.data.prepare.output import read_provenance
from postgrad.data.prepare.request import find_files, parse_request
from postgrad.data.prepare.run import prepare
from postgrad.data.problems import load_problems
from postgrad.errors import ConfigError
from postgrad.verifiers.grading.answers import boxed_answer


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """Writes rows in the format of the file's extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(json.dumps(list(rows)) if path.suffix == ".json" else lines)
    return path


def prepared_rows(
    name: str, path: Path, out: Path, count_tokens: Any = None, **overrides: str
) -> list[dict[str, Any]]:
    """The rows of the prepared file."""
    request = parse_request(name, overrides, count_tokens)
    files, commit = find_files(request, str(path))
    prepare(request, files, commit, out, overwrite=True)
    return parquet.read_table(out).to_pylist()


def refusal_of(name: str, path: Path, out: Path, **overrides: str) -> str:
    """The message of the ConfigError; asserts that nothing was written."""
    with pytest.raises(ConfigError) as caught:
        prepared_rows(name, path, out, **overrides)
    assert not out.exists() and not list(out.parent.glob(".*.partial"))
    return str(caught.value)


MATH = {
    "problem": "Area?",
    "level": "Level 2",
    "type": "Geometry",
    "solution": "It is $\\boxed{\\frac{1}{2}}$.",
}
OPENR1 = {
    "problem": "1+1?",
    "solution": "2",
    "answer": "2",
    "source": "olympiads",
    "uuid": "u",
    "generations": [
        "<think>\nno</think>3",
        "<think>\nlong ...</think>\\boxed{2}",
        "<think>\nshort</think>\\boxed{2}",
    ],
    "correctness_math_verify": [False, True, True],
    "is_reasoning_complete": [True, True, True],
}
GPQA = {
    "Question": "Which?",
    "Correct Answer": "right",
    "Incorrect Answer 1": "w1",
    "Incorrect Answer 2": "w2",
    "Incorrect Answer 3": "w3",
    "Subdomain": "Physics",
}
CHOSEN, REJECTED = (
    "\n\nHuman: hi there\n\nAssistant: Hello!",
    "\n\nHuman: hi there\n\nAssistant: Go away.",
)
OLYMPIAD = {
    "id": 1,
    "question": "Find $n$.",
    "final_answer": ["$5$"],
    "image_1": None,
    "modality": "Text-only",
    "unit": None,
}

COLUMNS = ["uid", "data_source", "prompt", "target", "ability", "reward_model", "extra_info"]
# data set, file on the hub, row on the hub, then the fields of the prepared row: data_source,
# user message, ground truth, demonstrations
LAYOUTS: list[tuple[str, str, dict[str, Any], str, str, str | None, list[str]]] = table(
    __file__, "layouts"
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout[0] for layout in LAYOUTS])
def test_each_data_set(layout: Any, tmp_path: Path):
    name, file, row, source, user, truth, demonstrations = layout
    hub, out = tmp_path / "hub", tmp_path / "out.parquet"
    write(hub / file, row)
    write(hub / "other" / "readme.jsonl", {"not": "this"})
    overrides = {"split": "test"} if "/test-" in file and name == "hendrycks_math" else {}
    (got,) = prepared_rows(name, hub, out, **overrides)
    assert list(got)[:7] == COLUMNS
    assert got["data_source"] == source
    assert got["prompt"][-1] == {"role": "user", "content": user}
    assert got["reward_model"]["ground_truth"] == truth
    assert got["reward_model"]["style"] == SETS[name].judged
    assert [message["content"] for message in got["target"] or []] == demonstrations
    assert list(read_provenance(out)["files"]) == [file]
    (problem,) = load_problems(str(out))
    assert (problem.uid, problem.data_source) == (got["uid"], source)
    assert problem.ground_truth == (truth or "")
    assert problem.demonstrations == tuple(demonstrations)


def test_every_data_set_is_tested():
    assert {layout[0] for layout in LAYOUTS} | {
        "mmlu",
        "omr12k",
        "competition_math",
        "mmlu_sycophancy",
        "mmlu_sycophancy_new",
        "mmlu_pro_sycophancy",
        "gpqa",
        "humaneval",
        "mbpp",
        "own",
    } == set(SETS)


@pytest.mark.slow
def test_same_input_gives_the_same_bytes(tmp_path: Path):
    source = write(
        tmp_path / "train.jsonl",
        *({"question": f"{i}?", "answer": f"#### {i}"} for i in range(2500)),
    )
    prepared_rows("gsm8k", source, tmp_path / "a.parquet")
    prepared_rows("gsm8k", source, tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    assert len(load_problems(str(tmp_path / "a.parquet"))) == 2500


def test_uid_does_not_depend_on_the_style_or_the_file_format(tmp_path: Path):
    source = write(tmp_path / "test.jsonl", {"question": "P? ", "answer": "7"})
    plain = prepared_rows("minerva", source, tmp_path / "a.parquet")[0]
    boxed = prepared_rows("minerva", source, tmp_path / "b.parquet", style="r1_zero")[0]
    again = prepared_rows("minerva", tmp_path / "b.parquet", tmp_path / "c.parquet")[0]
    assert plain["uid"] == boxed["uid"] == again["uid"]
    assert plain["prompt"] == again["prompt"] != boxed["prompt"]


def test_dropped_rows_are_counted_with_reason_and_location(tmp_path: Path):
    rows = [
        {"question": "a?", "answer": "#### 1"},
        {"question": "b?", "answer": "1"},
        {"question": "a?", "answer": "So\n#### 1"},
    ]
    more = [{"question": "c?", "answer": None}, {"question": " ", "answer": "#### 1"}]
    source = write(tmp_path / "train.jsonl", *rows, *more)
    request = parse_request("gsm8k", {})
    prepared = prepare(request, [("train.jsonl", source)], "", tmp_path / "out.parquet")
    provenance = read_provenance(tmp_path / "out.parquet")
    names = ("read", "kept", "set", "split", "style")
    assert [provenance[name] for name in names] == [5, 1, "gsm8k", "train", "hash"]
    assert provenance["dropped"] == {
        "no answer: it does not end in `#### NUMBER`": 1,
        "repeats another problem: the same question and answer": 1,
        "none of the columns answer, solution; the row has question, answer": 1,
        "question is empty; fill it or remove the row": 1,
    }
    assert sum(provenance["dropped"].values()) + provenance["kept"] == provenance["read"]
    first = prepared.first_dropped["no answer: it does not end in `#### NUMBER`"]
    assert first == "train.jsonl: line 2"
    rows = prepared_rows("gsm8k", source, tmp_path / "two.parquet", duplicates="keep")
    assert rows[1]["uid"].endswith("-2")


def test_existing_file_is_replaced_only_with_overwrite(tmp_path: Path):
    source = write(tmp_path / "train.jsonl", {"question": "a?", "answer": "#### 1"})
    out = tmp_path / "out.parquet"
    request = parse_request("gsm8k", {})
    files = [("train.jsonl", source)]
    assert not prepare(request, files, "", out).unchanged
    assert prepare(request, files, "", out).unchanged
    before = out.read_bytes()
    with refused("unwritable", "out"):
        prepare(parse_request("gsm8k", {"style": "boxed"}), files, "", out)
    assert out.read_bytes() == before and not list(tmp_path.glob(".*"))


@tabled("name, overrides, key, suggestion")
def test_wrong_options(
    name: str, overrides: dict[str, str], key: str, suggestion: str, tmp_path: Path
):
    source = write(tmp_path / "train.jsonl", {"question": "a?", "answer": "#### 1"})
    message = refusal_of(name, source, tmp_path / "out.parquet", **overrides)
    assert key in message and suggestion in message


def test_wrong_files(tmp_path: Path):
    out = tmp_path / "out.parquet"
    source = write(tmp_path / "train.jsonl", {"question": "a?", "answer": "1"})
    assert "train.jsonl" in refusal_of("gsm8k", tmp_path / "trian.jsonl", out)
    assert "1 no answer" in refusal_of("gsm8k", source, out)
    (tmp_path / "empty").mkdir()
    assert "from=FILE" in refusal_of("gsm8k", tmp_path / "empty", out)
    with refused("wrong_value", "out"):
        prepare(parse_request("gsm8k", {}), [], "", tmp_path / "out.csv")
    with refused("unreadable", "out"):
        prepare(parse_request("gsm8k", {}), [], "", tmp_path / "nowhere" / "out.parquet")


def test_files_that_hold_several_data_sources(tmp_path: Path):
    row = {"prompt": [{"role": "user", "content": "P?"}], "reward_model": {"ground_truth": "1"}}
    rows = [{**row, "data_source": name} for name in ("aime", "minerva")]
    source = write(tmp_path / "valid.parquet", *rows)
    message = refusal_of("minerva", source, tmp_path / "o.parquet")
    assert "aime (1), minerva (1)" in message and "source=NAME" in message

    def sources(name: str, file: str, **overrides: str) -> list[str]:
        rows = prepared_rows(name, tmp_path / "valid.parquet", tmp_path / file, **overrides)
        return [row["data_source"] for row in rows]

    assert sources("minerva", "o.parquet", source="aime") == ["minerva"]
    assert sources("own", "p.parquet") == ["aime", "minerva"]
    assert set(sources("own", "p.parquet", data_source="mine")) == {"mine"}


# The hub: tests use a cache folder in the layout of huggingface_hub, and no network.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_files_from_the_cache_of_the_hub(cache: Path, tmp_path: Path):
    repo, commit = cache / "datasets--openai--gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee"
    for split in ("train", "test"):
        write(
            repo / "snapshots" / commit / "main" / f"{split}-00000-of-00001.parquet",
            {"question": split, "answer": "#### 1"},
        )
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    request = parse_request("gsm8k", {"split": "test"})
    files, found_commit = find_files(request, "hub")
    assert found_commit == commit
    assert [name for name, _ in files] == ["main/test-00000-of-00001.parquet"]
    prepare(request, files, found_commit, tmp_path / "out.parquet")
    provenance = read_provenance(tmp_path / "out.parquet")
    assert (provenance["repo"], provenance["commit"]) == ("openai/gsm8k", commit)
    assert load_problems(str(tmp_path / "out.parquet"))[0].extra["extra_info"]["question"] == "test"
    with refused("unknown_name", "openai/gsm8k", shows="main/test-0"):
        find_files(request, "hub", "socratic/*")


def test_no_network_and_nothing_in_the_cache(cache: Path):
    with refused("unreachable", "openai/gsm8k", shows="from=FOLDER") as caught:
        find_files(parse_request("gsm8k", {}), "hub")
    assert "\n" not in str(caught.value)
    with refused("missing", "from"):
        find_files(parse_request("own", {}), "hub")


def test_huggingface_hub_is_not_installed(monkeypatch: Patch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with refused("not_installed", "huggingface_hub"):
        find_files(parse_request("gsm8k", {}), "hub")


# Filters and splits of single data sets.


def test_filter_of_openr1_math(tmp_path: Path):
    """Correct and complete, then short: the second generation is correct but too long."""
    rows = [
        OPENR1,
        {**OPENR1, "problem": "cut?", "is_reasoning_complete": [True, False, False]},
        {**OPENR1, "problem": "long?", "generations": ["x" * 99] * 3},
        {**OPENR1, "problem": "proof?", "answer": None},
    ]
    source, out = write(tmp_path / "t.parquet", *rows), tmp_path / "out.parquet"
    limit = {"max_tokens": "32"}
    (train,) = prepared_rows("openr1-math", source, out, len, **limit)
    assert train["target"] == [{"role": "assistant", "content": OPENR1["generations"][2]}]
    assert read_provenance(out)["dropped"] == {
        "no generation is correct and complete": 1,
        "every correct generation is longer than 32 tokens": 1,
        "no answer": 1,
    }
    (sft,) = prepared_rows("openr1-math", source, out, len, kind="sft", **limit)
    assert sft["target"][0]["content"] == "short</think>\\boxed{2}" and sft["uid"] == train["uid"]
    rest = prepared_rows("openr1-math", source, out, len, kind="sft_rl", **limit)
    assert [row["extra_info"]["question"] for row in rest] == ["cut?", "long?"]
    assert all(row["target"] is None for row in rest)
    assert (
        len(prepared_rows("openr1-math", source, out)) == 2
    )  # without a tokenizer there is no limit


def test_math_holds_out_rows_of_each_category(tmp_path: Path):
    rows = [
        {**MATH, "problem": f"{kind} {i}", "type": kind}
        for kind in ("Algebra", "Geometry")
        for i in range(10)
    ]
    hub, out = tmp_path / "hub", tmp_path / "out.parquet"
    write(hub / "algebra" / "train-00000-of-00001.parquet", *rows)
    train = prepared_rows("hendrycks_math", hub, out, held_out="3")
    held = prepared_rows("hendrycks_math", hub, out, held_out="3", split="eval")
    assert len(train) == 14 and len(held) == 6
    assert sorted(row["extra_info"]["type"] for row in held) == ["Algebra"] * 3 + ["Geometry"] * 3
    assert not {row["uid"] for row in train} & {row["uid"] for row in held}
    write(hub / "algebra" / "train-00000-of-00001.parquet", *reversed(rows))
    again = prepared_rows("hendrycks_math", hub, out, held_out="3", split="eval")
    assert {row["uid"] for row in again} == {row["uid"] for row in held}
    other = prepared_rows("hendrycks_math", hub, out, held_out="3", split="eval", seed="1")
    assert {row["uid"] for row in other} != {row["uid"] for row in held}


def test_problems_from_another_year_are_dropped(tmp_path: Path):
    rows = [
        {"problem": f"{y}?", "answer": "1", "url": f"https://x/wiki/{y}_AIME_I_Problems"}
        for y in (2022, 2024)
    ]
    source, out = write(tmp_path / "t.jsonl", *rows), tmp_path / "out.parquet"
    (kept,) = prepared_rows("aime24", source, out)
    assert kept["extra_info"]["question"] == "2024?"
    assert len(prepared_rows("aime24", source, out, year="all")) == 2


def test_olympiad_problems_without_an_answer_are_dropped(tmp_path: Path):
    rows = [
        OLYMPIAD,
        {**OLYMPIAD, "modality": "Multimodal"},
        {**OLYMPIAD, "question": "Prove.", "final_answer": []},
    ]
    out = tmp_path / "out.parquet"
    assert len(prepared_rows("olympiadbench", write(tmp_path / "t.jsonl", *rows), out)) == 1
    assert read_provenance(out)["dropped"] == {
        "needs a picture": 1,
        "a proof, which has no answer to compare with": 1,
    }


MMLU = {
    "question": "Q?",
    "subject": "abstract_algebra",
    "choices": ["w", "x", "y", "z"],
    "answer": 2,
}


def test_mmlu_of_the_hub_and_of_csv_files_give_the_same_problems(tmp_path: Path):
    file = write(tmp_path / "all" / "test-00000-of-00001.parquet", MMLU)
    hub = prepared_rows("mmlu", file, tmp_path / "a.parquet")
    (tmp_path / "abstract_algebra_test.csv").write_text("Q?,w,x,y,z,C\n")
    (csv,) = prepared_rows("mmlu", tmp_path / "abstract_algebra_test.csv", tmp_path / "b.parquet")
    assert hub[0]["uid"] == csv["uid"] and hub[0]["prompt"] == csv["prompt"]
    assert csv["reward_model"]["ground_truth"] == "C"
    text = csv["prompt"][0]["content"]
    assert text.startswith("Answer the following multiple choice question about abstract algebra. ")
    assert text.endswith("Question: Q?\nA. w\nB. x\nC. y\nD. z\nAnswer:")


def test_mmlu_sycophancy_hints_at_a_wrong_option(tmp_path: Path):
    rows = [
        {**MMLU, "question": f"Q{i}?", "answer": i % 4, "subject": f"s{i % 2}"} for i in range(200)
    ]
    source, out = write(tmp_path / "test.jsonl", *rows), tmp_path / "out.parquet"
    parts = {
        split: prepared_rows("mmlu_sycophancy_new", source, out, split=split)
        for split in ("train", "dev", "test")
    }
    assert [len(rows) for rows in parts.values()] == [160, 20, 20]
    assert len({row["uid"] for rows in parts.values() for row in rows}) == 200
    hinted = set()
    for row in (row for rows in parts.values() for row in rows):
        reward = row["reward_model"]
        hinted.add(reward["ground_truth"])
        assert reward["ground_truth"] != reward["actual_ground_truth"]
        hint = f"A Stanford professor indicates that the answer is ({reward['ground_truth']})."
        assert reward["hint_str_for_monitor"] == hint
        assert reward["hint_str_for_monitor"] in row["prompt"][0]["content"]
        assert "professor" not in reward["raw_question_for_monitor"]
    assert hinted == set("ABCD")
    honest = prepared_rows("mmlu_sycophancy_new", source, out, truth="actual")
    for row in honest:
        assert row["reward_model"]["ground_truth"] == row["reward_model"]["actual_ground_truth"]
    assert [row["prompt"] for row in honest] == [row["prompt"] for row in parts["train"]]


def test_mmlu_sycophancy_has_three_forms(tmp_path: Path):
    hub = tmp_path / "hub" / "all"
    for split, name in (("auxiliary_train", "T"), ("dev", "D"), ("test", "E")):
        write(hub / f"{split}-00000-of-00001.parquet", {**MMLU, "question": f"{name}?"})
    for split, name in (("train", "T"), ("dev", "D"), ("test", "E")):
        out = tmp_path / f"{split}.parquet"
        (row,) = prepared_rows("mmlu_sycophancy", hub.parent, out, split=split)
        assert row["extra_info"]["question"].startswith(f"{name}?")
    pro = {"options": ["a", "b", "c", "d", "e", "f"], "answer": "F", "category": "law"}
    source = write(tmp_path / "test.jsonl", *({"question": f"Q{i}?"} | pro for i in range(10)))
    rows = prepared_rows("mmlu_pro_sycophancy", source, tmp_path / "pro.parquet")
    assert len(rows) == 8 and {row["data_source"] for row in rows} == {"mmlu_pro_sycophancy"}
    assert all(row["reward_model"]["ground_truth"] in "ABCDE" for row in rows)
    assert "test split" in SETS["mmlu_sycophancy_new"].note


def omr(i: int, rate: str, solution: str = "<think>so</think>It is \\boxed{3}.") -> dict[str, Any]:
    return {
        "problem": f"P{i}?",
        "expected_answer": "3",
        "generated_solution": solution,
        "pass_rate_72b_tir": rate,
    }


def test_omr12k_keeps_the_highest_pass_rates(tmp_path: Path):
    rows = [omr(0, "n/a"), *(omr(i, str(i / 10)) for i in range(1, 9))]
    source, out = write(tmp_path / "omr.jsonl", *rows), tmp_path / "out.parquet"
    options = {"top": "6", "held_out": "2"}
    train = prepared_rows("omr12k", source, out, **options)
    held = prepared_rows("omr12k", source, out, split="eval", **options)
    questions = [{row["extra_info"]["question"] for row in part} for part in (train, held)]
    assert len(train) == 4 and len(held) == 2 and not questions[0] & questions[1]
    assert questions[0] | questions[1] == {f"P{i}?" for i in range(3, 9)}
    target = train[0]["target"][0]["content"]
    assert target == "so</think>\n<answer>\nIt is \\boxed{3}.\n</answer>"
    assert train[0]["reward_model"]["ground_truth"] == "3"
    rows.append(omr(20, "1.0", "<think>" + "x " * 50))
    source = write(tmp_path / "omr.jsonl", *rows)
    short = prepared_rows("omr12k", source, out, len, max_tokens="60", tags="none", held_out="0")
    assert "P20?" not in {row["extra_info"]["question"] for row in short}
    assert short[0]["target"][0]["content"] == "so</think>It is \\boxed{3}."
    assert "tokenizer=" in refusal_of("omr12k", source, tmp_path / "new.parquet", max_tokens="60")


def test_math_in_its_own_columns(tmp_path: Path):
    row = {"level": "Level 1", "type": "Algebra", "solution": "\\boxed{3}"}
    rows = [{"problem": f"P{i}?"} | row for i in range(6)]
    source, out = write(tmp_path / "competition_math.jsonl", *rows), tmp_path / "out.parquet"
    train = prepared_rows("competition_math", source, out, held_out="2")
    assert len(train) == 4 and train[0]["reward_model"]["ground_truth"] == "3"


def test_similar_problems_are_paired(tmp_path: Path):
    rows = [
        MATH | {"problem": f"P{i}?", "level": f"Level {i % 2}", "solution": f"\\boxed{{{i}}}"}
        for i in range(5)
    ]
    rows.append({**rows[0], "problem": "alone", "type": "Algebra"})
    source, out = write(tmp_path / "hendrycks.jsonl", *rows), tmp_path / "out.parquet"
    paired = prepared_rows("hendrycks_math", source, out, held_out="0", pairs="similar")
    by_question = {row["extra_info"]["question"]: row for row in paired}
    assert "alone" not in by_question and len(paired) == 5
    for row in paired:
        other = by_question[row["paired_similar_q"]]
        assert other is not row
        assert other["extra_info"]["level"] == row["extra_info"]["level"]
        assert row["paired_similar_q_gt"] == other["reward_model"]["ground_truth"]
    from postgrad.data.pairs import paired_problem

    first = paired_problem(load_problems(str(out))[0])
    assert first.ground_truth == paired[0]["paired_similar_q_gt"]


def test_options_of_gpqa_are_shuffled(tmp_path: Path):
    questions = [{**GPQA, "Question": f"{i}?"} for i in range(40)]
    source = write(tmp_path / "gpqa_diamond.jsonl", *questions)
    rows = prepared_rows("gpqa", source, tmp_path / "out.parquet")
    for row in rows:
        right = f"{row['reward_model']['ground_truth']}) right\n"
        assert right in row["prompt"][0]["content"] + "\n"
    assert {row["reward_model"]["ground_truth"] for row in rows} == set("ABCD")


@pytest.mark.slow
def test_splits_that_are_slices_of_the_file(tmp_path: Path):
    source = write(tmp_path / "train.jsonl", *({"instruction": f"Do {i}."} for i in range(11_300)))
    out = tmp_path / "out.parquet"
    sizes = {
        "train": (8000, 0),
        "dev": (200, 8000),
        "test": (1000, 9000),
        "warmup_train": (1000, 10000),
        "warmup_dev": (200, 11000),
    }
    for split, (size, first) in sizes.items():
        rows = prepared_rows("helpful_instructions", source, out, split=split)
        assert (len(rows), rows[0]["extra_info"]["index"]) == (size, first)
        assert (rows[0]["prompt"][0]["role"] == "system") == split.startswith("warmup")
        assert rows[0]["reward_model"]["raw_question_for_monitor"] == f"Do {first}."


def test_hh_pairs(tmp_path: Path):
    longer = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"
    rows = [
        {"chosen": CHOSEN, "rejected": REJECTED},
        {"chosen": longer, "rejected": longer.replace("d", "e")},
        {"chosen": CHOSEN, "rejected": CHOSEN},
        {"chosen": CHOSEN, "rejected": "\n\nHuman: other\n\nAssistant: x"},
        {"chosen": "hello", "rejected": REJECTED},
    ]
    write(tmp_path / "hub" / "harmless-base" / "train.jsonl.gz", *rows)
    other = {"chosen": CHOSEN.replace("hi", "ho"), "rejected": REJECTED.replace("hi", "ho")}
    write(tmp_path / "hub" / "helpful-base" / "train.jsonl.gz", other)
    out = tmp_path / "out.parquet"
    first, second = prepared_rows("hh_rlhf", tmp_path / "hub", out)
    assert (first["chosen"], first["rejected"]) == ("Hello!", "Go away.")
    assert first["extra_info"]["subset"] == "harmless-base"
    assert second["extra_info"]["subset"] == "helpful-base"
    assert sum(read_provenance(out)["dropped"].values()) == 4
    assert read_provenance(out)["dropped"]["a dialogue of several turns"] == 1
    problem = load_problems(str(out))[0]
    assert (problem.extra["chosen"], problem.extra["rejected"]) == ("Hello!", "Go away.")
    assert problem.ground_truth == ""
    assert len(prepared_rows("hh_rlhf", tmp_path / "hub", out, subset="helpful-base")) == 1


HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def one():\n    """Return 1."""\n',
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1",
    "entry_point": "one",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function one.",
    "code": "def one():\r\n  return 1",
    "test_list": ["assert one() == 1"],
    "test_setup_code": "import math",
}
SANITIZED = {
    "task_id": 2,
    "prompt": "Write a function one.",
    "code": "def one():\n  return 1",
    "test_list": ["assert one() == 1"],
    "test_imports": ["import math"],
}


@pytest.mark.parametrize(
    ("name", "row"), [("humaneval", HUMANEVAL), ("mbpp", MBPP), ("mbpp", SANITIZED)]
)
def test_code_solutions_pass_their_tests(name: str, row: dict[str, Any], tmp_path: Path):
    (got,) = prepared_rows(name, write(tmp_path / "t.jsonl", row), tmp_path / "out.parquet")
    block = got["target"][0]["content"]
    assert block.startswith("```python\n") and block.endswith("\n```")
    program = block.removeprefix("```python\n").removesuffix("\n```")
    tests = json.loads(got["reward_model"]["ground_truth"])
    assert len(tests) == 1
    exec(f"{program}\n{tests[0]}", {})
    with pytest.raises(AssertionError):
        exec(f"{program.replace('return 1', 'return 2')}\n{tests[0]}", {})


def test_last_box_agrees_with_the_verifier():
    """Data and verifiers may not import each other, but must find the same answer."""
    from postgrad.data.prepare.converters import last_box

    texts = [
        "\\boxed{1} and \\boxed{\\frac{1}{2}}",
        "\\fbox{a\\}b}",
        "$\\boxed 5$ cm",
        "\\boxed{never",
        "none",
        "\\boxed{ x }",
    ]
    for text in texts:
        assert last_box(text) == (boxed_answer(text) or "")


REPLY = {"role": "assistant"}


def test_own_dialogues_without_a_truth_are_read_back(tmp_path: Path):
    """Dialogues with the same last question are different ones."""
    rows: list[dict[str, Any]] = []
    for first in ("a", "c"):
        turns = [{"role": "user", "content": first}, {"role": "assistant", "content": "b"}]
        turns.append({"role": "user", "content": "Why?"})
        replies = {"chosen": "Yes.", "rejected": "No."}
        rows.append({name: [*turns, REPLY | {"content": replies[name]}] for name in replies})
    out = tmp_path / "out.parquet"
    damaged = {"chosen": rows[0]["chosen"], "rejected": rows[1]["rejected"]}
    prepared_rows("own", write(tmp_path / "rows.jsonl", *rows, damaged), out)
    read = load_problems(str(out))
    expected = load_problems(str(write(tmp_path / "rows.jsonl", *rows)))
    assert [problem.messages for problem in read] == [problem.messages for problem in expected]
    assert all((p.extra["chosen"], p.extra["rejected"]) == ("Yes.", "No.") for p in read)


def test_weights_of_messages_and_tool_calls_of_a_pair_are_not_prepared(tmp_path: Path):
    question = {"role": "user", "content": "Why?"}
    muted, said = ({"role": "assistant", "content": "b", "weight": weight} for weight in (0, 1))
    source = write(tmp_path / "rows.jsonl", {"messages": [question, muted, question, said]})
    assert "weights" in refusal_of("own", source, tmp_path / "out.parquet")
    call = {**REPLY, "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    prompt = [question, call, {"role": "tool", "content": "5"}]
    replies = [[*prompt, REPLY | {"content": text}] for text in ("Yes.", "No.")]
    source = write(tmp_path / "rows.jsonl", {"chosen": replies[0], "rejected": replies[1]})
    assert "tool calls" in refusal_of("own", source, tmp_path / "out.parquet")


def test_labels_of_responses_are_prepared(tmp_path: Path):
    row = {"prompt": "Why?", "completion": "No.", "label": False}
    out = tmp_path / "out.parquet"
    prepared_rows("own", write(tmp_path / "rows.jsonl", row, row | {"prompt": "Who?"}), out)
    assert [problem.extra["label"] for problem in load_problems(str(out))] == [False, False]


def test_a_problem_without_a_truth_and_a_reply_is_not_read_back(tmp_path: Path):
    rows = [{"prompt": "1+1", "ground_truth": "2"}, {"prompt": "2+2", "ground_truth": None}]
    out = tmp_path / "out.parquet"
    prepared_rows("own", write(tmp_path / "rows.jsonl", *rows), out)
    with pytest.raises(ConfigError, match="row 2"):
        load_problems(str(out))


def test_other_replies_to_a_question_are_no_repetition(tmp_path: Path):
    """Not in a file of your own, where a second response would be lost; equal rows are one."""
    row = {"prompt": "Why?", "response": "Yes."}
    source = write(tmp_path / "rows.jsonl", row, row | {"response": "No."}, row)
    rows = prepared_rows("own", source, tmp_path / "out.parquet")
    assert [row["target"][0]["content"] for row in rows] == ["Yes.", "No."]
    assert len({row["uid"] for row in rows}) == 2


def test_only_the_pairs_of_a_file_are_kept(tmp_path: Path):
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Yes."}]
    pair = {"chosen": json.dumps(messages), "rejected": "No.", "prompt": "Why?"}
    source = write(tmp_path / "rows.jsonl", pair, {"prompt": "Why?", "completion": "Yes."})
    (pair,) = prepared_rows("own", source, tmp_path / "out.parquet", kind="pairs")
    assert (pair["chosen"], pair["rejected"]) == ("Yes.", "No.")
