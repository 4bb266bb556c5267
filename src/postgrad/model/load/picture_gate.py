"""The numeric gate of pictures: may a model of text and images be trained on them, and how.

Rows with one and with two pictures go through the stock model, which reads their pixels itself.
Our passes must give the same log-probs (gate.py); two rows have equal ids and different pictures.
A model that fails is trained on text only.
"""

import random
from pathlib import Path
from typing import Any

import torch

from postgrad.errors import Unsupported, first_line
from postgrad.model.load.formats import Loaded
from postgrad.model.load.gate import (
    Gate,
    fingerprint,
    read_verdict,
)
from postgrad.model.passes.support import (
    PASS_KINDS,
    STOCK_ATTENTION,
    set_attention,
    support_of,
)
from postgrad.model.vision import SIZES, Vision, noise
from postgrad.picture_processor import PictureProcessor
from postgrad.pictures import Picture
from postgrad.types import Batch, Trajectory


def enable_pictures(loaded: Loaded, trained: bool, cache: Path) -> None:
    """Let a model see pictures; `vision_of` says what is wrong where it cannot."""
    model = loaded.model
    text_attention = model.config._attn_implementation
    # In TF32 the patches of one picture differ from those of the same picture among others.
    torch.backends.cudnn.allow_tf32 = False
    try:
        vision = Vision(model, PictureProcessor(loaded.tokenizer), trained)
        model.postgrad_vision = vision
        gate = PictureGate(model, cache, loaded.tokenizer, vision)
        gate.measure()
        passes, reasons, _ = gate.find_verdict()
        if passes is None:
            raise Unsupported("; ".join(reasons), at="model.path")
        vision.passes = passes
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # code of other people fails in many ways
        model.postgrad_vision = first_line(error)
    finally:
        set_attention(model, text_attention)


class PictureGate(Gate):
    """The gate of passes with pictures; the model's text passes are decided already."""

    def __init__(self, model: Any, cache: Path, tokenizer: Any, vision: Vision) -> None:
        super().__init__(model, cache)
        self.tokenizer = tokenizer
        self.vision = vision
        if self.stock_attention != "eager":
            self.stock_attention = STOCK_ATTENTION
        name = f"{fingerprint(model, [Path(__file__)])}-{vision.fingerprint}-pictures"
        self.file = cache / "gate" / f"{name}.json"
        self.verdict = read_verdict(self.file)
        # The stock attention sees other masks than ours; a model that needs it has it for text.
        of_text = support_of(model).passes
        self.kinds = [kind for kind in PASS_KINDS if kind != "rows" or of_text == "rows"]
        self.kinds = self.kinds[self.kinds.index(of_text) :]
        if vision.sees_both_ways:
            self.kinds = [kind for kind in self.kinds if kind != "packed"]
        set_attention(model, self.stock_attention)

    def probe_rows(self) -> Batch:
        return picture_rows(self.vision.processor, self.tokenizer)


def picture_rows(processor: PictureProcessor, tokenizer: Any) -> Batch:
    """Return rows with one and with two pictures that share prompts, and one without any."""
    rng = random.Random(0)
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    known = [token for token in range(len(tokenizer)) if token not in special]

    def text(count: int) -> list[int]:
        return [rng.choice(known) for _ in range(count)]

    def shown(picture: Picture) -> list[int]:
        return tokenizer(processor.tokens_of(picture), add_special_tokens=False)["input_ids"]

    one, two, three = (noise(number, size) for number, size in enumerate(SIZES))
    single = [*text(3), *shown(one), *text(2)]
    double = [*text(2), *shown(one), *text(1), *shown(two), *text(2)]
    rows = [
        Trajectory("single", single, text(4), 0, images=(one,)),
        Trajectory("single", single, text(2), 0, 1, images=(one,)),
        Trajectory("other", single, text(3), 1, images=(three,)),
        Trajectory("double", double, text(2), 2, images=(one, two)),
        Trajectory("double", double, text(5), 2, 1, images=(one, two)),
        Trajectory("text", text(5), text(3), 3),
    ]
    return Batch.of(rows)
