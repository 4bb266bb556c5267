"""Numbers and shapes drawn as pictures; digits have 5 x 7 dots, so no font file is needed.

Their colors and exact places differ from picture to picture, and are the same for the same content
in every process.
"""

import io
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from postgrad.pictures import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

CELL = 16  # pixels of one character or shape, in both directions
DOT = 2
# The seven lines of a character, each five dots as the bits of a number.
DOTS = {
    "0": (14, 17, 19, 21, 25, 17, 14),
    "1": (4, 12, 4, 4, 4, 4, 14),
    "2": (14, 17, 1, 2, 4, 8, 31),
    "3": (31, 2, 4, 2, 1, 17, 14),
    "4": (2, 6, 10, 18, 31, 2, 2),
    "5": (31, 16, 30, 1, 1, 17, 14),
    "6": (6, 8, 16, 30, 17, 17, 14),
    "7": (31, 1, 2, 4, 8, 8, 8),
    "8": (14, 17, 17, 14, 17, 17, 14),
    "9": (14, 17, 17, 15, 1, 2, 12),
    "+": (0, 4, 4, 31, 4, 4, 0),
    "-": (0, 0, 0, 31, 0, 0, 0),
    "*": (0, 4, 21, 14, 21, 4, 0),
    "(": (2, 4, 8, 8, 8, 4, 2),
    ")": (8, 4, 2, 2, 2, 4, 8),
}
NUM_COLUMNS = 3  # of a scene, which has as many lines of cells
NUM_CELLS = NUM_COLUMNS**2
SHAPES = ("circle", "square", "triangle")
COLORS = ("red", "green", "blue", "yellow")
Scene = tuple[tuple[str, str, int], ...]  # (shape, color, cell) of each


def draw_lines(lines: Sequence[str]) -> Picture:
    """Return lines of text as a picture, aligned on the right."""
    from PIL import Image, ImageDraw

    # Python guarantees the same numbers in every version for random() only.
    uniform = random.Random("\n".join(lines)).random
    paper, ink = ([int(low + 80 * uniform()) for _ in range(3)] for low in (176, 0))
    width = max(map(len, lines))
    image = Image.new("RGB", (width * CELL, len(lines) * CELL), tuple(paper))
    draw = ImageDraw.Draw(image)
    for row, line in enumerate(lines):
        for column, character in enumerate(line.rjust(width)):
            left = column * CELL + 2 + int(3 * uniform())
            top = row * CELL + int(3 * uniform())
            for y, dots in enumerate(DOTS.get(character, ())):
                for x in range(5):
                    if dots >> (4 - x) & 1:
                        corner = (left + DOT * x, top + DOT * y)
                        draw.rectangle((*corner, corner[0] + 1, corner[1] + 1), fill=tuple(ink))
    return _picture(image)


def draw_scene(scene: Scene) -> Picture:
    """Return a scene as a picture: shapes of 12 x 12 pixels on light paper, circles as rings."""
    from PIL import Image, ImageDraw

    uniform = random.Random(str(scene)).random
    paper = tuple(int(216 + 40 * uniform()) for _ in range(3))
    image = Image.new("RGB", (NUM_COLUMNS * CELL, NUM_COLUMNS * CELL), paper)
    draw = ImageDraw.Draw(image)
    for shape, color, cell in scene:
        row, column = divmod(cell, NUM_COLUMNS)
        left, top = column * CELL + 1 + int(3 * uniform()), row * CELL + 1 + int(3 * uniform())
        right, bottom = left + 11, top + 11
        if shape == "circle":
            draw.ellipse((left, top, right, bottom), outline=color, width=3)
        elif shape == "square":
            draw.rectangle((left, top, right, bottom), fill=color)
        else:
            draw.polygon([(left, bottom), (left + 6, top), (right, bottom)], fill=color)
    return _picture(image)


def _picture(image: "Image") -> Picture:
    file = io.BytesIO()
    image.save(file, "PNG")
    return Picture(file.getvalue())
