"""Pictures: what values of rows become, and which traps are refused before they are decoded."""

import base64
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib

import pytest
from PIL import Image
from refused import refused

from postgrad.pictures import (
    MAX_BYTES,
    Picture,
    PictureError,
    _temporary_file,
    check_picture,
    read_picture,
)
from postgrad.problem import Problem, problem_from, sent_fields


def encoded(color="red", size=(4, 2), kind="PNG", **options):
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind, **options)
    return file.getvalue()


def test_every_form_of_a_value_gives_the_same_bytes(tmp_path):
    data = encoded()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for value in (
        data,
        bytearray(data),
        {"bytes": data, "path": "gone.png"},
        {"bytes": None, "path": "images/a.png"},
        "images/a.png",
        str(tmp_path / "images" / "a.png"),
        f"file://{tmp_path}/images/a.png",
        url,
        Picture(data),
    ):
        picture = read_picture(value, tmp_path)
        assert (picture.data, picture.size, picture.kind) == (data, (4, 2), "png")
        assert picture.data_url() == url
    assert read_picture("images/a.png", tmp_path).place == str(tmp_path / "images/a.png")
    assert Picture(data).key == Picture(data, "elsewhere").key
    assert Picture(data).key != Picture(encoded("blue")).key
    drawn = read_picture(Image.open(io.BytesIO(encoded(kind="JPEG"))))
    assert drawn.kind == "png" and drawn.size == (4, 2)


def test_pictures_open_as_a_person_sees_them():
    exif = Image.Exif()
    exif[0x0112] = 6  # a phone held upright
    turned = Picture(encoded(size=(40, 20), kind="JPEG", exif=exif))
    assert turned.size == turned.open().size == (20, 40)
    noted = Picture(encoded(size=(40, 20), exif=b"Exif\0\0not EXIF"))
    assert noted.size == noted.open().size == (40, 20)
    assert Picture(bomb(8000, 8000)).size == (8000, 8000)  # nothing is decoded
    file = io.BytesIO()
    Image.new("RGBA", (1, 1), (0, 0, 0, 0)).save(file, "PNG")
    assert Picture(file.getvalue()).open().getpixel((0, 0)) == (255, 255, 255)
    file = io.BytesIO()
    Image.frombytes("I;16", (1, 1), struct.pack("<H", 0x8000)).save(file, "PNG")
    assert Picture(file.getvalue()).open().getpixel((0, 0)) == (128, 128, 128)


def animated():
    file = io.BytesIO()
    frames = [Image.new("L", (2, 2), value) for value in (0, 255)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def rle_bmp():
    """A BMP of one run of 255 pixels, for which a decoder runs a loop."""
    pixels = bytes([255, 0, 0, 0, 0, 1])
    table = bytes(4 * 256)
    header = struct.pack("<IiiHHIIiiII", 40, 255, 1, 1, 8, 1, len(pixels), 0, 0, 256, 0)
    start = 14 + len(header) + len(table)
    file = struct.pack("<2sIHHI", b"BM", start + len(pixels), 0, 0, start)
    return file + header + table + pixels


def bomb(width, height):
    """A PNG of a few bytes that says it is huge."""

    def chunk(name, data):
        crc = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (b"<svg onload='x'/>", "not a picture"),
        (b"II*\0" + b"\0" * 40, "not a picture"),  # TIFF
        (b"BM" + b"\0" * 10, "broken picture"),
        (encoded(kind="JPEG", size=(64, 64))[:-100], "broken picture"),
        (encoded(size=(64, 64))[:100], "broken picture"),
        (bomb(9000, 9000), "9000 x 9000 pixels"),
        (bomb(60000, 60000), "megapixels"),
        (encoded(kind="JPEG") + 101 * b"\xff\xda", "more than 100 scans"),
        (rle_bmp(), "a compressed BMP"),
        (animated(), "animated"),
        ("https://host/a.png", "not fetched"),
        ("data:image/png;base64,@@", "not base64"),
        ("data:text/html,<b>", "data URL"),
        ("gone.png", "cannot be read (No such file or directory)"),
        ("a\0b.png", "cannot be read"),
        ("pipe", "not a regular file"),
        (".", "not a regular file"),
        ("large", "larger than 32 MiB"),
        ({"bytes": None, "path": None}, "neither"),
        (7, "not int"),
    ],
)
def test_traps_are_refused_in_one_line(tmp_path, value, sentence):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(PictureError) as error:
        read_picture(value, tmp_path)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_a_photo_with_a_preview_is_one_picture():
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(file, "MPO", save_all=True, append_images=frames[1:])
    assert check_picture(Picture(file.getvalue())).open().getpixel((0, 0))[0] > 250


def test_pictures_cross_process_boundaries_once():
    problem = Problem("a", ({"role": "user", "content": [{"type": "image"}]},), "1")
    assert "images" not in sent_fields(problem)
    pictured = Problem(**{**vars(problem), "images": (Picture(encoded()),)})
    sent = json.dumps(sent_fields(pictured))
    assert problem_from(json.loads(sent)).images == pictured.images


def test_threads_that_begin_together_share_one_temporary_file(monkeypatch):
    make_file = tempfile.TemporaryFile

    def make_slowly(mode):
        time.sleep(0.05)
        return make_file(mode)

    monkeypatch.setattr(tempfile, "TemporaryFile", make_slowly)
    _temporary_file.cache_clear()
    pictures = [Picture(encoded(size=(4, height))) for height in range(1, 5)]
    threads = [threading.Thread(target=picture.leave_memory) for picture in pictures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [picture.size for picture in pictures] == [(4, height) for height in range(1, 5)]
    assert all(picture.data for picture in pictures)


FORKED = """
import io, os
from PIL import Image
from postgrad.pictures import Picture

def left(number):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(file, "PNG")
    return Picture(file.getvalue()).leave_memory()

first = left(0)
child = os.fork()
assert all(one.data for one in [left(i % 256) for i in range(1000)])
assert first.data
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_writes_no_pictures_among_those_of_its_parent():
    subprocess.run([sys.executable, "-c", FORKED], check=True)


def test_another_process_reads_a_pickled_picture(tmp_path):
    picture = Picture(encoded()).leave_memory()
    (tmp_path / "picture").write_bytes(pickle.dumps(picture))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).data.hex())"
    command = [sys.executable, "-c", program, str(tmp_path / "picture")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert bytes.fromhex(printed) == encoded()


def test_a_machine_without_a_temporary_folder_says_what_to_set(monkeypatch):
    def fail(mode):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: fail(""))
    _temporary_file.cache_clear()
    with refused("unwritable", shows="set TMPDIR"):
        Picture(encoded()).leave_memory()
