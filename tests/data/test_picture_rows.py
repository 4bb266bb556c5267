"""Rows with pictures: the forms of verl, TRL and LLaVA become the same problem."""

import base64
import io
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from jsonl import write_jsonl
from PIL import Image
from tables import tabled

from postgrad.api.rows import as_problems, as_rows, to_jsonl
from postgrad.data.problems import load_problems, problems_of_rows
from postgrad.errors import ConfigError, RunError
from postgrad.pictures import Picture, text_of_content

IMAGE = {"type": "image"}
TEXT = {"type": "text", "text": "Find x."}
PARTS = [IMAGE, TEXT]


def encoded(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def png(color="red"):
    return encoded(Image.new("RGB", (4, 4), color))


RED, BLUE = png(), png("blue")


def user(content):
    return {"role": "user", "content": content}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "red.png").write_bytes(RED)
    (tmp_path / "images" / "blue.png").write_bytes(BLUE)
    return tmp_path


def load(folder, *rows):
    return load_problems(str(write_jsonl(folder / "rows.jsonl", *rows)))


RED_PATH = "images/red.png"
ONE_PICTURE = [
    {"prompt": "<image>Find x.", "images": [RED_PATH]},
    {"prompt": [user("<image>Find x.")], "image": RED_PATH},
    {"prompt": "Find x.", "images": [{"bytes": None, "path": RED_PATH}]},  # pictures go first
    {"prompt": [user([IMAGE, TEXT])], "images": [{"image": RED_PATH}]},
    {"prompt": [user([{**IMAGE, "text": None}, TEXT])], "image": RED_PATH},
    {"prompt": [user([{**IMAGE, "image": RED_PATH}, TEXT])]},
    {"prompt": [user([{"type": "image_url", "image_url": {"url": RED_PATH}}, TEXT])]},
]


@pytest.mark.parametrize("row", ONE_PICTURE)
def test_one_picture_in_every_form_is_the_same_problem(folder, row):
    first, problem = load(folder, {**ONE_PICTURE[0], "uid": "a"}, {**row, "uid": "b"})
    for one in (first, problem):
        assert one.messages == (user(PARTS),)
        assert [picture.data for picture in one.images] == [RED] == [one.prompt_images[0].data]


def test_the_parquet_of_verl_has_bytes_and_places_between_texts(folder):
    row = {
        "data_source": "geometry3k",
        "prompt": [{"role": "system", "content": "Box it."}, user("A <image> or <image>?")],
        "images": [{"bytes": RED, "path": "a.png"}, {"bytes": BLUE, "path": None}],
        "reward_model": {"ground_truth": "7"},
    }
    parquet.write_table(pa.Table.from_pylist([row]), folder / "train.parquet")
    (problem,) = load_problems(str(folder / "train.parquet"))
    parts = [{"type": "text", "text": text} for text in ("A ", " or ", "?")]
    assert problem.messages[0]["content"] == "Box it."
    assert problem.messages[1]["content"] == [parts[0], IMAGE, parts[1], IMAGE, parts[2]]
    assert [picture.data for picture in problem.images] == [RED, BLUE]


def test_a_conversation_of_llava_has_its_picture_in_the_first_turn(folder):
    row = {
        "image": "images/red.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": "An <image>."},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "Yes."},
        ],
    }
    (problem,) = load(folder, row)
    conversation = problem.conversation
    assert conversation.messages[0]["content"] == [IMAGE, {"type": "text", "text": "\nWhat is it?"}]
    assert conversation.messages[1]["content"] == "An <image>."
    assert problem.messages == conversation.messages[:3]
    assert problem.demonstrations == ("Yes.",) and len(problem.images) == 1


def test_a_preference_pair_and_a_completion_have_pictures(folder):
    reply = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    no = {"role": "assistant", "content": "No."}
    prompt = [user([IMAGE, TEXT])]
    pair, dialogues, completion = load(
        folder,
        {"prompt": prompt, "chosen": [reply], "rejected": [no], "images": [RED_PATH]},
        {
            "prompt": prompt,
            "chosen": [*prompt, reply],
            "rejected": [*prompt, no],
            "images": RED_PATH,
        },
        {"prompt": prompt, "chosen": "a", "rejected": "b", "images": RED_PATH},
    )
    for problem in (pair, dialogues, completion):
        assert problem.messages == (user(PARTS),) and len(problem.images) == 1
    assert pair.extra["chosen"] == "Yes."


def test_only_what_was_read_as_a_picture_leaves_the_row(folder):
    url = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    drawn = Image.new("RGB", (4, 4), "red")
    nested: list = []
    for _ in range(900):
        nested = [nested]
    others = {"reference": url, "raw": b"bytes", "drawing": drawn, "nested": nested}
    turns = [user([{"type": "image_url", "image_url": {"url": url}, "note": 1}, TEXT])]
    column, inside = problems_of_rows(
        [
            {"prompt": "data:image/ is what?", "image": RED, "answer": url, **others},
            {"prompt": turns, "answer": url, **others},
        ],
        "rows",
    )
    for problem in (column, inside):
        assert problem.images[0].data == RED
        assert problem.extra == others and problem.ground_truth == url
        assert {**problem.row, **others, "answer": url} == problem.row
    assert column.row["prompt"] == "data:image/ is what?" and column.row["image"].data == RED
    assert inside.row["prompt"] == [user(PARTS)]


def test_the_picture_is_a_part_of_the_uid_and_texts_alone_are_as_before(folder):
    red, blue, text = load(
        folder,
        {"prompt": "What?", "images": [RED_PATH]},
        {"prompt": "What?", "images": ["images/blue.png"]},
        {"prompt": "What?", "images": []},
    )
    assert len({red.uid, blue.uid, text.uid}) == 3
    assert text.messages == (user("What?"),) and text.images == ()
    (plain,) = problems_of_rows([{"prompt": "An <image> is written here"}], "rows", "rows")
    assert plain.messages[0]["content"] == "An <image> is written here"


@tabled("row, sentence")
def test_what_is_refused_names_file_and_row(folder, row, sentence):
    with pytest.raises(ConfigError) as caught:
        load(folder, {**row, "prompt": "x", "images": []} if "prompt" in row else row, row)
    message = str(caught.value)
    assert "rows.jsonl: line " in message and sentence in message
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize("kind", ["paths", "bytes", "urls"])
def test_pictures_are_read_when_they_are_used(folder, kind):
    noise = [encoded(Image.frombytes("RGB", (256, 256), os.urandom(3 << 16))) for _ in range(12)]
    values = noise
    if kind == "urls":
        values = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in noise]
    if kind == "paths":
        values = [str(folder / f"{i}.png") for i in range(len(noise))]
        for path, data in zip(values, noise, strict=True):
            Path(path).write_bytes(data)
    rows = [{"prompt": "Find x.", "answer": "7", "images": [value]} for value in values]
    content = [{**IMAGE, "image": values[0]}, TEXT]
    rows.append({"prompt": "Find x.", "answer": "7", "images": [values[0]]})
    if kind == "bytes":
        parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=3)
    else:
        rows[-1] = {"prompt": [user(content)], "answer": "7"}
        write_jsonl(folder / "rows.jsonl", *rows)
    del values, rows, content
    tracemalloc.start()
    problems = load_problems(str(next(folder.glob("rows.*"))))
    (held, _), num_bytes = tracemalloc.get_traced_memory(), sum(map(len, noise))
    tracemalloc.stop()
    assert held < num_bytes / 4
    assert [problem.images[0].data for problem in problems] == [*noise, noise[0]]
    assert problems[0].images[0].open().size == (256, 256)
    assert problems[0].row.get("images") == problems[0].images and "images" not in problems[0].extra
    if kind == "paths":
        (folder / "0.png").write_bytes(RED)
        with pytest.raises(RunError, match=r"0\.png was changed after it was read"):
            _ = problems[0].images[0].data
        (folder / "0.png").unlink()
        with pytest.raises(RunError, match=r"0\.png cannot be read"):
            problems[0].images[0].open()


def test_rows_in_memory_hold_pictures_of_pillow(folder, monkeypatch):
    monkeypatch.chdir(folder)
    rows = [
        {"prompt": "x", "image": Image.open("images/red.png")},
        {"prompt": "x", "images": [RED]},
        {"prompt": "x", "images": ["images/red.png"]},
        {"prompt": [user([{**IMAGE, "image": Image.open("images/red.png")}, TEXT])]},
    ]
    problems = as_problems(rows)
    assert all(problem.images[0].open().getpixel((0, 0)) == (255, 0, 0) for problem in problems)
    elsewhere = folder / "run" / "train.jsonl"
    elsewhere.parent.mkdir()
    elsewhere.write_text(to_jsonl(as_rows(rows[:3])))
    assert [one.images for one in load_problems(str(elsewhere))] == [
        problem.images for problem in problems[:3]
    ]
    again = as_problems(problems)
    assert [(one.uid, one.images, one.messages) for one in again] == [
        (one.uid, one.images, one.messages) for one in problems
    ]


def test_a_prepared_set_keeps_its_pictures(folder, capsys):
    from postgrad.cli.data import prepare

    load(folder, {"prompt": "Find <image> x.", "answer": "7", "images": [RED_PATH]})
    out = folder / "out" / "set.parquet"
    out.parent.mkdir()
    prepare("own", "style=boxed", from_=str(folder / "rows.jsonl"), out=str(out))
    (problem,) = load_problems(str(out))
    content = problem.messages[0]["content"]
    assert content[:2] == [{"type": "text", "text": "Find "}, IMAGE]
    assert content[2]["text"].startswith(" x.") and "boxed" in content[2]["text"]
    assert [picture.data for picture in problem.images] == [RED]


def test_show_and_check_describe_the_pictures(folder, capsys):
    from vision_models import save_vision_model

    from postgrad.cli.data import check, show

    model = str(save_vision_model(folder / "model", "qwen2_5_vl"))
    load(folder, {"prompt": "1+2=", "answer": "3", "images": [RED_PATH, "images/blue.png"]})
    show(folder / "rows.jsonl")
    shown = capsys.readouterr().out
    assert "    <image><image>1+2=" in shown
    assert f"picture 2: 4 x 4 pixels, png, 0.1 KiB, {folder / 'images' / 'blue.png'}" in shown
    show(folder / "rows.jsonl", model=model)
    assert "tokens, " in capsys.readouterr().out
    check([str(folder / "rows.jsonl")], model=model, verifier="exact")
    line = "pictures: 2 in 1 problems, 4 x 4 to 4 x 4 pixels, 0.0 MiB; tokens each: "
    assert line in capsys.readouterr().out


def sft_rows(folder, problem, *rollouts):
    """Return what from-rollouts makes of trajectories of the problem: columns with `images`."""
    from postgrad.data.from_rollouts import select_rollouts
    from postgrad.training.log import RunLog
    from postgrad.types import Batch, Trajectory

    batch = Batch.of(
        [
            Trajectory(problem.uid, [1], [2], index=i, images=one["images"])
            for i, one in enumerate(rollouts)
        ]
    )
    for name, value in {"text": "7", "reward": 1.0, "failure": "", "messages": ""}.items():
        batch.rows[name] = [one.get(name, value) for one in rollouts]
    batch.rows["question"] = [one["question"] for one in rollouts]
    (folder / "run" / "rollouts").mkdir(parents=True)
    (folder / "run" / "config.yaml").write_text(f"data: {{train: {folder}/rows.jsonl}}\n")
    RunLog(folder / "run", 0).write_rollouts(1, [batch])
    return list(select_rollouts(folder / "run", ()))


def test_equal_texts_with_other_pictures_are_other_trajectories(folder):
    (problem,) = load(folder, {"prompt": "Find x.", "ground_truth": "7"})
    rollout = {"question": "Find x.\n\n<image>"}
    red, blue = Picture(RED), Picture(BLUE)
    shown = [(red,), (blue,), (red,)]
    rows = sft_rows(folder, problem, *({**rollout, "images": one} for one in shown))
    assert [one.images for one in load(folder, *rows)] == [(red,), (blue,)]


@tabled("prompt, num_given, added, num_shown, turn, question")
def test_image_in_a_text_of_rollouts_is_no_picture(
    folder, prompt, num_given, added, num_shown, turn, question
):
    row = {"prompt": prompt, "ground_truth": "7"}
    row |= {"images": num_given * [RED_PATH]} if num_given else {}
    (problem,) = load(folder, row)
    asked = text_of_content(problem.messages[-1]["content"])
    turns = [{"role": "assistant", "content": "Look."}, {"role": "tool", "content": turn}]
    turns.append({"role": "assistant", "content": "7"})
    shown = (*problem.images, *[Picture(BLUE)] * num_shown)
    rollout = {"question": asked + added, "images": shown, "messages": json.dumps(turns)}
    (again,) = load(folder, *sft_rows(folder, problem, rollout))
    assert again.images == shown
    assert [again.messages[i]["content"] for i in (0, 2)] == [question, turn]


def test_rows_from_rollouts_and_from_generate_keep_the_pictures(folder):
    from postgrad.evaluation.generate import output_row

    (problem,) = load(folder, {"prompt": "Find <image>x.", "images": [RED_PATH]})
    rollout = {"question": "Find <image>x.", "images": problem.images}
    (row,) = sft_rows(folder, problem, rollout)
    written = output_row(problem, [{"response": "7", "finish": "stop", "length": 1}])
    for again in load(folder, row) + load(folder, json.loads(json.dumps(written))):
        assert again.messages == problem.messages and again.images == problem.images
