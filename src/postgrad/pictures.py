"""Pictures of problems: read from files, bytes and data URLs, checked before they are decoded.

Imports Pillow when a picture is opened, and nothing else of weight.
"""

import base64
import binascii
import hashlib
import io
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from postgrad.errors import RunError, Unwritable, first_line
from postgrad.files import open_regular_file

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 32 << 20  # of one file; photos have up to 20 MB
MAX_PIXELS = 1 << 26  # 64 megapixels: 192 MiB when they are decoded
MAX_SCANS = 100  # of a JPEG; each takes as long as the whole picture, and encoders write about 10
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow tries no other decoder
# The kind of a file by its first bytes; nothing else is shown on the page or sent to a server.
FIRST_BYTES = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"RIFF": "webp",
    b"GIF8": "gif",
    b"BM": "bmp",
}
# What an object has a picture in: the columns of parquet files, and parts of messages in the forms
# of Qwen, transformers and OpenAI.
VALUE_FIELDS = ("bytes", "path", "image", "url", "image_url")
IMAGE_TYPES = ("image", "image_url")  # of the parts of messages
ORIENTATION = 0x0112  # the tag of EXIF; from 5 on, width and height are exchanged
PLACEHOLDER = "<image>"  # marks a picture in the text of a data file


class PictureError(ValueError):
    """What is wrong with a picture; the caller adds the file and the row."""


class Picture:
    """One picture as the data give it: an encoded file, equal to every copy of it.

    Attributes:
        place: the path it was read from; "" for bytes inside a data file.
        digest: the SHA-256 of the file, in hex digits.
        kind: `png`, `jpeg`, `webp`, `gif` or `bmp`: image/KIND is its content type.
        num_bytes: the length of the file.
    """

    def __init__(self, data: bytes, place: str = "") -> None:
        self.place = place
        self.digest = hashlib.sha256(data).hexdigest()
        starts = (kind for start, kind in FIRST_BYTES.items() if data.startswith(start))
        self.kind = next(starts, "")  # of a file that is no picture we read
        self.num_bytes = len(data)
        # the data, or where they are: a file, or a temporary one and the offset in it
        self._source: bytes | Path | tuple[IO[bytes], int] = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type["Picture"], tuple[bytes, str]]:
        return Picture, (self.data, self.place)  # another process has no temporary file

    def __repr__(self) -> str:
        return f"Picture({self.place or self.key})"

    @property
    def key(self) -> str:
        """16 hex digits of the SHA-256 of the data."""
        return self.digest[:16]

    @property
    def data(self) -> bytes:
        """The encoded file. Raises RunError if its file is no longer as it was."""
        if isinstance(self._source, bytes):
            return self._source
        try:
            if isinstance(self._source, Path):
                data = read_regular_file(self._source)
            else:
                file, offset = self._source
                data = os.pread(file.fileno(), self.num_bytes, offset)
        except (OSError, PictureError) as error:
            raise RunError(f"a picture is gone: {first_line(error)}; restore it") from error
        if hashlib.sha256(data).hexdigest() != self.digest:
            name = self.place or self.key
            raise RunError(f"the picture {name} was changed after it was read; restore it")
        return data

    def leave_memory(self) -> "Picture":
        """Read the data from disk from now on; data that no file holds go to a temporary one."""
        if isinstance(self._source, bytes):
            _ = self.size  # stays known
            self._source = Path(self.place).absolute() if self.place else _append(self._source)
        return self

    @cached_property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels as a person sees it; decodes nothing."""
        from PIL import Image

        image = _open(self)
        exif = Image.Exif()
        with suppress(Exception):  # damaged notes beside the picture
            exif.load(image.info.get("exif", b""))  # getexif() would decode a PNG
        width, height = image.size
        return (height, width) if exif.get(ORIENTATION, 1) >= 5 else (width, height)

    def open(self) -> "Image":
        """Return the picture in RGB, turned as EXIF says, on white where it is transparent.

        Raises PictureError if it is broken or larger than the limits.
        """
        return _decoded(_open(self))

    def data_url(self) -> str:
        """Return the picture as OpenAI's clients send it."""
        return f"data:image/{self.kind};base64,{base64.b64encode(self.data).decode()}"


def read_picture(value: Any, folder: Path | None = None) -> Picture:
    """Return the checked picture of a value of a row.

    Args:
        value: an encoded file as bytes, `{"bytes": ..., "path": ...}` as parquet files hold it, a
            path, a data URL, a picture of Pillow, or a Picture.
        folder: the folder of relative paths: that of the data file.

    Raises:
        PictureError: the file is missing, no picture, broken, animated, or beyond the limits.
    """
    if isinstance(value, Mapping):
        for name in VALUE_FIELDS:
            if value.get(name) is not None:
                return read_picture(value[name], folder)
        raise PictureError("a picture {bytes, path} has neither bytes nor a path")
    if isinstance(value, Picture):
        picture = value
    elif isinstance(value, bytes | bytearray):
        picture = Picture(bytes(value))
    elif isinstance(value, str):
        picture = _read_text(value, folder or Path())
    elif type(value).__module__.startswith("PIL."):
        picture = Picture(_encoded(value))
    else:
        raise PictureError(
            f"a picture is a path, bytes, {{bytes, path}} or a data URL, not {type(value).__name__}"
        )
    return check_picture(picture)


def check_picture(picture: Picture) -> Picture:
    """Return the picture if it can be decoded. Raises PictureError.

    A JPEG is decoded at an eighth of its size, which reads all of its data.
    """
    image = _open(picture)
    image.draft("L", (1, 1))
    _load(image)
    return picture


def picture_of_data_url(text: str) -> Picture:
    """Return the picture of `data:image/...;base64,...`, not yet checked. Raises PictureError."""
    head, comma, encoded = text.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PictureError("a data URL of a picture starts with data:image/png;base64,")
    if len(encoded) > MAX_BYTES * 4 // 3 + 4:
        raise PictureError(f"larger than {MAX_BYTES >> 20} MiB")
    try:
        return Picture(base64.b64decode(encoded, validate=True))
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"a data URL that is not base64 ({first_line(error)})") from error


# ---- pictures in messages


def text_of_content(content: Any) -> str:
    """Return the content of a message as text, with `<image>` where a picture is; null is ""."""
    if isinstance(content, list):
        return "".join(part.get("text", PLACEHOLDER) for part in content)
    return content or ""


def add_content(content: Any, shown: Any) -> Any:
    """Return the content of a message with a text in a paragraph of its own, or parts, after it."""
    if isinstance(shown, str):
        if isinstance(content, list):
            return [*content, {"type": "text", "text": f"\n\n{shown}"}]
        return f"{content}\n\n{shown}" if content else shown
    if isinstance(content, str):
        content = [{"type": "text", "text": f"{content}\n\n"}] if content else []
    return [*content, *shown]


def image_parts(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts {type: image} of messages, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part["type"] == "image"]


def without_pictures(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message, or a turn {from, value}, whose pictures are parts {type: image} only."""
    light = dict(message)
    for name in ("content", "value"):
        if isinstance(message.get(name), list):
            light[name] = [
                {"type": "image"} if part["type"] in IMAGE_TYPES else part for part in message[name]
            ]
    return light


def with_pictures(
    messages: Iterable[Mapping[str, Any]], pictures: Iterable[Picture]
) -> list[dict[str, Any]]:
    """Return messages whose parts {type: image} hold the pictures, as `image`."""
    pictures = iter(pictures)
    filled: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [
                {"type": "image", "image": next(pictures)} if part["type"] == "image" else part
                for part in content
            ]
        filled.append({**message, "content": content})
    return filled


def with_urls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its pictures as OpenAI's clients send them."""
    content = message["content"]
    if isinstance(content, list):
        content = [
            {"type": "image_url", "image_url": {"url": part["image"].data_url()}}
            if part["type"] == "image"
            else part
            for part in content
        ]
    return {**message, "content": content}


def shown_parts(value: Any) -> list[dict[str, Any]] | None:
    """Return what a tool or an environment shows as parts; None for a value without pictures.

    The value is a picture of Pillow, or a list of parts as in messages. Their pictures become data
    URLs, which JSON can hold. Paths and addresses show none: the policy may have chosen them.

    Raises: PictureError if a picture cannot be shown.
    """
    if isinstance(value, Picture) or type(value).__module__.startswith("PIL."):
        value = [{"type": "image", "image": value}]
    parts = [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
    if all(_picture_data(part) is None for part in parts if part.get("type") in IMAGE_TYPES):
        return None
    shown: list[dict[str, Any]] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            shown.append({"type": "text", "text": str(part.get("text") or "")})
        elif kind in IMAGE_TYPES:
            shown.append({"type": "image", "image": read_picture(_picture_data(part)).data_url()})
        else:
            raise PictureError("beside pictures, parts are {type: text, text}")
    return shown


def _picture_data(value: Any) -> Any:
    """Return what a part has its picture in; None unless it is the picture itself."""
    while isinstance(value, Mapping):
        value = next((value[name] for name in VALUE_FIELDS if value.get(name) is not None), None)
    if isinstance(value, str):
        return value if value.startswith("data:") else None
    is_picture = isinstance(value, bytes | bytearray | Picture)
    return value if is_picture or type(value).__module__.startswith("PIL.") else None


# ---- reading and decoding

_appending = threading.Lock()


@cache
def _temporary_file(process: int) -> IO[bytes]:
    """Return the file of what was inside data files; it ends with the process.

    A forked process needs a file of its own: it shares the position in its parent's.
    """
    return tempfile.TemporaryFile("a+b")


def _append(data: bytes) -> tuple[IO[bytes], int]:
    """Write data to the temporary file; return it and their offset. Raises ConfigError."""
    with _appending:
        try:
            file = _temporary_file(os.getpid())
            file.write(data)
            file.flush()
        except OSError as error:
            raise Unwritable(
                "the pictures inside data files cannot be kept in a temporary file "
                f"({first_line(error)}); set TMPDIR to a folder with space for them"
            ) from error
        return file, file.tell() - len(data)


def _read_text(text: str, folder: Path) -> Picture:
    """Return the picture of a data URL or a path. Nothing is fetched."""
    if text.startswith("data:"):
        return picture_of_data_url(text)
    if "://" in text[:16] and not text.startswith("file://"):
        raise PictureError(
            f"{text[:80]} is not fetched; download the pictures and give their paths"
        )
    path = folder / text.removeprefix("file://")
    return Picture(read_regular_file(path), place=str(path))


def read_regular_file(path: Path) -> bytes:
    """Return the bytes of a file, without waiting at a pipe or device. Raises PictureError."""
    try:
        with open_regular_file(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise PictureError(f"{str(path)[:200]} cannot be read ({reason})") from error
    if len(data) > MAX_BYTES:
        raise PictureError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
    return data


def _open(picture: Picture) -> "Image":
    """Return an image whose pixels are not decoded yet. Raises PictureError."""
    from PIL import Image

    if picture.num_bytes > MAX_BYTES:
        raise PictureError(f"larger than {MAX_BYTES >> 20} MiB")
    kinds = "PNG, JPEG, WebP, GIF and BMP are read"
    if not picture.kind:
        raise PictureError(f"not a picture ({kinds})")
    data = picture.data
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise PictureError(f"more than {MAX_PIXELS >> 20} megapixels") from error
    except Exception as error:  # decoders raise many types for damaged data
        raise PictureError(f"a broken picture, or of another format ({kinds})") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise PictureError(
            f"{width} x {height} pixels are more than {MAX_PIXELS >> 20} megapixels; shrink it"
        )
    if image.format in ("JPEG", "MPO") and data.count(b"\xff\xda") > MAX_SCANS:
        raise PictureError(f"a JPEG of more than {MAX_SCANS} scans; save it again")
    if image.tile and image.tile[0][0] == "bmp_rle":  # decoded by slow code
        raise PictureError("a compressed BMP; save it as PNG")
    return image


def _load(image: "Image") -> None:
    if getattr(image, "is_animated", False) and image.format != "MPO":  # a photo with a preview
        raise PictureError("an animated picture; save the frame that is meant")
    try:
        image.load()
    except Exception as error:  # decoders raise many types for damaged data
        raise PictureError(f"a broken picture ({first_line(error)})") from error


def _decoded(image: "Image") -> "Image":
    from PIL import Image, ImageOps

    _load(image)
    with suppress(Exception):  # damaged notes beside the picture
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits of gray, which convert() would cut off at 255
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    background = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(background, image.convert("RGBA")).convert("RGB")


def _encoded(image: "Image") -> bytes:
    """Return a picture of Pillow as PNG, as `open` returns it."""
    file = io.BytesIO()
    _decoded(image).save(file, "PNG", compress_level=1)
    return file.getvalue()
