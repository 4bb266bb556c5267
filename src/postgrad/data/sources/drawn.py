"""Numbers drawn as pictures, in digits of 5 x 7 dots: no font file is needed."""

import io
import random
from collections.abc import Sequence

from postgrad.pictures import Picture

CELL = 16  # pixels of one character, in both directions
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


def draw_lines(lines: Sequence[str]) -> Picture:
    """Return lines of text as a picture, aligned on the right.

    Colors and the exact places of the characters differ from text to text, and are the same for the
    same text in every process.
    """
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
    file = io.BytesIO()
    image.save(file, "PNG")
    return Picture(file.getvalue())
