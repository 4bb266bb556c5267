"""Drawn scenes: their pictures show what the answers say, splits are disjoint, lists are fixed."""

import hashlib

import pytest

from postgrad.data.problems import load_problems
from postgrad.pictures import Picture
from postgrad.verifiers.table import choose

CELL = 16
COLORS = {(255, 0, 0): "red", (0, 128, 0): "green", (0, 0, 255): "blue", (255, 255, 0): "yellow"}


def read_scene(picture: Picture) -> dict[int, tuple[str, str]]:
    """Return (shape, color) by cell: a square is full, a circle has no color in its middle."""
    image = picture.open()
    assert image.size == (3 * CELL, 3 * CELL)
    found: dict[int, tuple[str, str]] = {}
    for cell in range(9):
        left, top = cell % 3 * CELL, cell // 3 * CELL
        data = image.crop((left, top, left + CELL, top + CELL)).tobytes()
        pixels = [tuple(data[i : i + 3]) for i in range(0, len(data), 3)]
        inked = [place for place, pixel in enumerate(pixels) if pixel in COLORS]
        if inked:
            (color,) = {pixels[place] for place in inked}
            middle = (inked[0] // CELL + 6) * CELL + min(place % CELL for place in inked) + 6
            shape = "triangle" if middle in inked else "circle"
            found[cell] = ("square" if len(inked) == 12 * 12 else shape, COLORS[color])
    return found


def test_answers_are_what_the_pictures_show():
    problems = load_problems("scenes:count:test,scenes:color:test")
    kinds = [problem.data_source for problem in problems]
    assert kinds.count("scenes/count") > 400 and kinds.count("scenes/color") > 400
    answers = set()
    for problem in problems:
        ((image, question),) = (message["content"] for message in problem.messages)
        shown = list(read_scene(*problem.images).values())
        words = question["text"].removesuffix("?").split()
        if words[0] == "how":
            answer = str(sum(f"{shape}s" == words[2] for shape, _ in shown))
        else:
            (answer,) = (color for shape, color in shown if shape == words[4])
        assert image == {"type": "image"} and problem.ground_truth == answer
        assert problem.demonstrations == (answer,) and choose(problem) == "exact"
        answers.add(answer)
    assert answers == {*"123456", *COLORS.values()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["count", "color"])
def test_splits_are_disjoint_and_lists_never_change(kind):
    """No scene that is held out looks like one of training."""
    texts: list[str] = []
    seen: dict[str, set[str]] = {}
    for split in ("train", "validation", "test"):
        problems = load_problems(f"scenes:{kind}:{split}")
        scenes = [str(read_scene(*problem.images)) for problem in problems]
        asked = [problem.messages[0]["content"][1]["text"] for problem in problems]
        texts += [f"{scene}{question}" for scene, question in zip(scenes, asked, strict=True)]
        seen[split] = set(scenes)
    assert len(texts) == 10_000
    assert seen["train"].isdisjoint(seen["validation"] | seen["test"])
    assert seen["validation"].isdisjoint(seen["test"])
    golden = {"count": "4aac71b987872714", "color": "0f94e78b64a9da5b"}
    digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
    assert digest == golden[kind]
