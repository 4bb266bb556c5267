"""Learning-rate factors of a model's blocks."""

import re
from collections.abc import Sequence


def scales_by_block(
    names: Sequence[str], num_blocks: int, below: float, above: float
) -> dict[str, float]:
    """Factors of the parameters in blocks, by name.

    Blocks 1..num_blocks get `below`; the other blocks and the final norm get `above`. Embeddings
    and the head are absent: their factor is 1.
    """
    scales: dict[str, float] = {}
    for name in names:
        block = re.search(r"\blayers\.(\d+)\.", name)
        if block and int(block[1]) < num_blocks:
            scales[name] = below
        elif block or re.search(r"(^|\.)norm\.", name):
            scales[name] = above
    return scales
