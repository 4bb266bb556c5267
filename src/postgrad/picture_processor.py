"""The stock processor of a model of text and images: pictures become placeholder tokens and pixels.

It is always the processor that computes with Pillow; torchvision is not needed. Imported only when
a problem or a request has pictures.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from postgrad.errors import NotInstalled, Unsupported, first_line
from postgrad.pictures import Picture

if TYPE_CHECKING:
    from torch import Tensor

KEPT_SIZES = 256  # whose tokens stay in memory; a server's clients may send many


class PictureProcessor:
    """The processor of the folder or hub id that a tokenizer was loaded from.

    Attributes:
        placeholder: what a chat template writes where a picture is.
        image_token_id: the token that `expand` repeats; each stands for one feature of a picture.

    Raises:
        ConfigError: there are no processor files, or transformers cannot read them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.stock = _load_stock(tokenizer)
        defaults = self.stock.valid_processor_kwargs._defaults
        self.options = dict(defaults.get("images_kwargs", {}))
        self.placeholder: str = self.stock.image_token
        image_token_id = self.stock.image_token_ids[0]
        if image_token_id is None:
            raise Unsupported(
                f"the tokenizer of {tokenizer.name_or_path} has no token {self.placeholder}, which "
                "stands for a picture; use the stock model's tokenizer"
            )
        self.image_token_id = int(image_token_id)
        self.image_token: str = tokenizer.convert_ids_to_tokens(self.image_token_id)
        self._by_size: dict[tuple[int, int], str] = {}  # the tokens of a picture

    def expand(self, text: str, pictures: Sequence[Picture]) -> str:
        """Return a rendered text with each placeholder replaced by the tokens of its picture.

        Raises: ConfigError unless there is one placeholder per picture.
        """
        num_places = text.count(self.placeholder)
        if num_places != len(pictures):
            raise Unsupported(
                f"a prompt has {num_places} placeholders {self.placeholder} and {len(pictures)} "
                "pictures; there must be one for each"
            )
        if self.image_token != self.placeholder and self.image_token in text:
            raise Unsupported(
                f"a prompt with pictures has {self.image_token} in its text, which stands for a "
                "part of a picture; leave it out"
            )
        replacements = [self.tokens_of(picture) for picture in pictures]
        return self.stock.get_text_with_replacements([text], replacements)[0][0]

    def collapse(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Return a prompt with one placeholder per picture, for engines that expand it themselves.

        Raises: ConfigError where a token stands for text and for a part of a picture.
        """
        ids = list(ids)
        collapsed: list[int] = []
        start = 0
        for picture in pictures:
            tokens = self.tokenizer.encode(self.tokens_of(picture), add_special_tokens=False)
            places = range(start, len(ids) - len(tokens) + 1)
            place = next((i for i in places if ids[i : i + len(tokens)] == tokens), None)
            if place is None:
                raise Unsupported(
                    "the tokens of a picture join those of the text before it; "
                    "use rollout.engine=native"
                )
            collapsed += [*ids[start:place], self.tokenizer.convert_tokens_to_ids(self.placeholder)]
            start = place + len(tokens)
        return collapsed + ids[start:]

    def places_fit(
        self, ids: Sequence[int], pictures: Sequence[Picture], may_follow: bool = False
    ) -> bool:
        """Return whether the image tokens of a row are those of its pictures, and no others.

        Those that `may_follow` were written by a policy and show nothing.
        """
        ids = list(ids)
        start = 0
        for picture in pictures:
            tokens = self.tokenizer.encode(self.tokens_of(picture), add_special_tokens=False)
            places = [i for i, token in enumerate(tokens) if token == self.image_token_id]
            # What is before and after the image tokens may join the text beside it.
            shown = tokens[places[0] : places[-1] + 1]
            if self.image_token_id not in ids[start:]:
                return False
            start = ids.index(self.image_token_id, start)
            if ids[start : start + len(shown)] != shown:
                return False
            start += len(shown)
        return may_follow or self.image_token_id not in ids[start:]

    def num_tokens(self, pictures: Sequence[Picture]) -> int:
        """Return how many image tokens the pictures of a row have."""
        return sum(self.tokens_of(picture).count(self.image_token) for picture in pictures)

    def bytes_per_token(self, picture: Picture) -> float:
        """Return how many bytes the vision tower reads for one image token of a picture."""
        pixels = self.pixels([picture]).values()
        num_bytes = sum(value.nbytes for value in pixels if hasattr(value, "nbytes"))
        return num_bytes / self.num_tokens([picture])

    def pixels(self, pictures: Sequence[Picture]) -> "dict[str, Tensor]":
        """Return what the vision tower reads: pixel_values, and image_grid_thw or the like."""
        images = [picture.open() for picture in pictures]
        return dict(self.stock.image_processor(images, **self.options, return_tensors="pt"))

    def tokens_of(self, picture: Picture) -> str:
        """Return the tokens of a picture as text; they depend on its size only."""
        tokens = self._by_size.get(picture.size)
        if tokens is None:
            try:
                _, texts = self.stock._process_images([picture.open()], **self.options)[:2]
            except ValueError as error:  # such as one that is 300 times as high as wide
                raise Unsupported(
                    f"the model cannot read a picture: {first_line(error)}"
                ) from error
            if len(self._by_size) >= KEPT_SIZES:
                self._by_size.clear()
            tokens = self._by_size[picture.size] = texts[0]
        return tokens


def _load_stock(tokenizer: Any) -> Any:
    """Return transformers' processor of the tokenizer's source, without a video processor."""
    from transformers import AutoConfig

    # From `transformers` itself it needs torchvision, in versions before 5.19.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    source = str(tokenizer.name_or_path)
    problem = f"{source} cannot read pictures"
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:  # the folder of an adapter
        raise Unsupported(f"{problem}: {first_line(error)}") from error
    if type(config) not in PROCESSOR_MAPPING:
        raise Unsupported(f"{problem}: {config.model_type} is a model of text only")
    try:
        kind: Any = PROCESSOR_MAPPING[type(config)]
    except ImportError as error:
        reason = first_line(error.__cause__ or error)
        raise NotInstalled(f"{problem}: its processor needs another package ({reason})") from error
    module: Any = sys.modules[kind.__module__]
    if hasattr(module, "num2words"):  # a package that SmolVLM needs for videos only
        module.num2words = module.num2words or str

    class WithoutVideos(kind):
        """The stock class with its check of types, which a missing video processor fails."""

        def check_argument_for_proper_class(self, _name: str, argument: Any) -> type:
            return type(argument)

    try:
        parts = {
            "image_processor": AutoImageProcessor.from_pretrained(source, backend="pil"),
            "tokenizer": tokenizer,
        }
        settings, _ = kind.get_processor_dict(source)
        names = kind.get_attributes()
        return WithoutVideos.from_args_and_dict([parts.get(name) for name in names], settings)
    except Exception as error:  # files of other people fail in many ways
        raise Unsupported(
            f"{problem} ({first_line(error)}); copy preprocessor_config.json and the other "
            "processor files of the stock model into the folder"
        ) from error
