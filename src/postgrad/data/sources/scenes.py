"""Questions about drawn shapes: how many there are of one, or which color it has.

The list is the same in every process and every Python version. Each kind of question has 10,000
scenes; one of the training split is in no other split.
"""

import random

from postgrad.data.sources.arithmetic import RandomBelow, in_split
from postgrad.data.sources.drawn import COLORS, NUM_CELLS, SHAPES, Scene, draw_scene
from postgrad.errors import UnknownName, WrongValue, did_you_mean
from postgrad.problem import Problem

NUM_SCENES = 10_000
MAX_COUNT = 6
MAX_OTHERS = 3
QUESTIONS = {"count": "how many {}s?", "color": "what color is the {}?"}


def scenes_source(source: str) -> list[Problem]:
    """Return the problems of `scenes:KIND[:SPLIT]`; default split train.

    Raises:
        ConfigError: the source is not of this form, or names an unknown kind or split.
    """
    parts = source.split(":")[1:]
    if not 1 <= len(parts) <= 2:
        raise WrongValue(
            f"data source {source!r} is not scenes:KIND[:SPLIT]; "
            "type for example scenes:count:train"
        )
    kind, split = [*parts, "train"][:2]
    if kind not in QUESTIONS:
        raise UnknownName(
            f"scenes have no kind {kind!r}; {did_you_mean(kind, QUESTIONS)}", at="kind"
        )
    # Python guarantees the same numbers in every version for random() only.
    uniform = random.Random(kind).random
    scenes: dict[Scene, None] = {}
    while len(scenes) < NUM_SCENES:
        scenes[_sampled_scene(kind, lambda n: int(uniform() * n))] = None
    return [_problem(kind, scene) for scene in scenes if in_split(_key(scene), split)]


def _sampled_scene(kind: str, below: RandomBelow) -> Scene:
    """Return a scene whose first shape is asked for; if for its color, no other is like it."""
    asked = below(len(SHAPES))
    count = 1 + below(MAX_COUNT) if kind == "count" else 1
    names = [SHAPES[asked]] * count
    for _ in range(below(MAX_OTHERS + 1)):
        names.append(SHAPES[(asked + 1 + below(len(SHAPES) - 1)) % len(SHAPES)])
    cells = list(range(NUM_CELLS))
    return tuple((name, COLORS[below(len(COLORS))], cells.pop(below(len(cells)))) for name in names)


def _key(scene: Scene) -> str:
    """Return a text that is the same for scenes that look alike."""
    return str(sorted(scene))


def _problem(kind: str, scene: Scene) -> Problem:
    asked, color, _ = scene[0]
    answer = str(sum(name == asked for name, _, _ in scene)) if kind == "count" else color
    question = {"type": "text", "text": QUESTIONS[kind].format(asked)}
    messages = ({"role": "user", "content": [{"type": "image"}, question]},)
    images = (draw_scene(scene),)
    return Problem("", messages, answer, f"scenes/{kind}", (answer,), images=images)
