"""`postgrad serve`: arguments, how requests map to sampling, and text from tokens."""

import json
import socket
import threading
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import postgrad
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast
from waiting import in_threads, join

from postgrad.cli.main import main
from postgrad.rollout.engine import Request, Sampling, StopStrings
from postgrad.rollout.native.sequence import Job
from postgrad.rollout.served_path import parse_served_path
from postgrad.serving import servers_file
from postgrad.serving.detokenizer import Detokenizer, raw_bytes
from postgrad.serving.http import event
from postgrad.serving.model_text import ModelText
from postgrad.serving.requests import parse_request
from postgrad.serving.responses import ResponseBuilder
from postgrad.serving.worker import RowUpdate

# ---- arguments, mapping, tokens


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "tiny", "--port", str(port)]) == 2
        assert (
            f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose"
            in capsys.readouterr().err
        )


def test_a_mapping_is_shared_and_each_server_takes_its_own_entries_away(tmp_path):
    file = tmp_path / "servers.json"
    one = {"a": servers_file.make_entry("127.0.0.1", 8000, "a", 0, "/models/a")}
    two = {
        "b": servers_file.make_entry("0.0.0.0", 8001, "b", 0, "org/b"),
        "c": servers_file.make_entry("0.0.0.0", 8001, "c", 1, "org/c"),
    }
    with servers_file.list_servers(file, one):
        with servers_file.list_servers(file, two):
            assert parse_served_path(f"{file}#a") == ("http://127.0.0.1:8000/v1#a", "/models/a")
            assert parse_served_path(f"{file}#c") == ("http://127.0.0.1:8001/v1#c", "org/c")
            entry = json.loads(file.read_text())["b"]
            names = {"outward_host", "local_host", "port", "served_model_name", "model_index"}
            assert names | {"status"} <= set(entry)
            assert entry["status"] == "running" and entry["outward_host"] == socket.gethostname()
        assert set(json.loads(file.read_text())) == {"a"}
        newer = {"a": servers_file.make_entry("127.0.0.1", 9000, "a", 0, "/models/a")}
        with servers_file.list_servers(file, newer):
            pass
        assert json.loads(file.read_text()) == {}
    assert json.loads(file.read_text()) == {}, (
        "an entry that another server took over is not touched"
    )

    def name(i):
        with servers_file.list_servers(
            file, {f"m{i}": servers_file.make_entry("127.0.0.1", i, "m", 0, "t")}
        ):
            all_listed.wait(300)
            seen.append(set(json.loads(file.read_text())))
            all_read.wait(300)

    seen: list[set[str]] = []
    all_listed, all_read = threading.Barrier(8), threading.Barrier(8)
    join(in_threads(*(partial(name, i) for i in range(8))))
    assert json.loads(file.read_text()) == {}
    assert seen == [{f"m{i}" for i in range(8)}] * 8


# ---- text from tokens


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token a byte: every character beyond ASCII is several."""
    alphabet = sorted(ByteLevel.alphabet())
    inner = Tokenizer(BPE({c: i for i, c in enumerate([*alphabet, "<end>"])}, []))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), ByteDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


@pytest.mark.slow
@given(
    text=st.text("aé√😀 <\n", min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 5), max_size=30),
)
def test_pieces_are_the_text_and_no_character_is_halved(byte_tokenizer, text, cuts):
    ids = byte_tokenizer(text)["input_ids"]
    stream, pieces, rest = Detokenizer(byte_tokenizer), [], list(ids)
    for cut in [*cuts, *([1] * len(ids))]:
        if rest:
            now, rest = rest[:cut], rest[cut:]
            pieces.append(stream.push(now, "" if rest else "length"))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def answer_in_bytes(byte_tokenizer, text, **fields):
    """The choice of a response whose tokens are the bytes of a text, in updates of two tokens."""
    served = ModelText("tiny", byte_tokenizer, {byte_tokenizer.eos_token_id}, 257)
    request = parse_request({"model": "tiny", "logprobs": 1, **fields}, "messages" in fields)
    ids = byte_tokenizer(text)["input_ids"]
    job = Job(Request(byte_tokenizer("é=")["input_ids"], [0]), Sampling())
    job.prompt_logprobs = [-1.0, -1.0]
    job.prompt_top_tokens = [[(0, -1.0)], [(0, -1.0)]]
    builder = ResponseBuilder(request, served, [job])
    for start in range(0, len(ids), 2):
        new = ids[start : start + 2]
        finish = "length" if start + 2 >= len(ids) else ""
        logprobs = [-1.0] * len(new)
        builder.add(RowUpdate(0, 0, new, logprobs, [[(7, -1.0)] for _ in new], finish))
    return builder.complete()["choices"][0]


def test_an_event_of_a_stream_is_one_line_for_every_client():
    """httpx and others split the lines of a text at U+0085, U+2028 and U+2029, too."""
    body = {"text": "a\u0085b\u2028c\u2029d\x0b\x1eé😀"}
    (line,) = event(body).splitlines()[:-1]
    assert json.loads(line.removeprefix("data: ")) == body


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_tokens_point_into_the_text(byte_tokenizer, echo):
    """A character of several tokens counts once."""
    choice = answer_in_bytes(byte_tokenizer, "a😀é1", prompt="x", echo=echo)
    assert choice["text"] == "é=" * echo + "a😀é1"
    own = [0, 1, 1, 1, 1, 2, 2, 3]
    expected = [0, 0, 1, *[2 + offset for offset in own]] if echo else own
    assert choice["logprobs"]["text_offset"] == expected


def test_bytes_of_tokens_give_the_text(byte_tokenizer):
    """OpenAI's field for characters of several tokens: joined, the bytes are the text."""
    messages = [{"role": "user", "content": "x"}]
    choice = answer_in_bytes(
        byte_tokenizer, "a😀é1", messages=messages, logprobs=True, top_logprobs=1
    )
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "a😀é1"
    assert raw_bytes("<0xE2>") == b"\xe2" and raw_bytes("▁a") == b""


def test_byte_fallback_tokens_that_are_not_utf8_raise_nothing():
    """LLaMA's tokenizers have one token per byte; a model may sample bytes that are no text."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "<unk>": 257}
    inner = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    random = Random(0)
    for _ in range(200):
        ids = [random.randrange(257) for _ in range(random.randint(1, 30))]
        detokenizer = Detokenizer(tokenizer)
        for i, token in enumerate(ids, 1):
            detokenizer.push([token], "length" if i == len(ids) else "")


@given(
    text=st.text("ab</x>é", min_size=1, max_size=20),
    stops=st.lists(st.text("ab</x>é", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_in_tokens_and_in_text(byte_tokenizer, text, stops):
    """The row ends with the first token that completes a stop string; the text ends before it."""
    ids = byte_tokenizer(text)["input_ids"]
    found = StopStrings(byte_tokenizer, stops)
    slow = next(
        (
            n
            for n in range(1, len(ids) + 1)
            if any(s in byte_tokenizer.decode(ids[:n]) for s in stops)
        ),
        0,
    )
    assert next((n for n in range(1, len(ids) + 1) if found.find_end(ids[:n], n - 1)), 0) == slow
    for look in (3, 16):  # an engine that looks seldom finds the same token
        looks = ((seen, min(seen + look, len(ids))) for seen in range(0, len(ids), look))
        assert next((n for seen, now in looks if (n := found.find_end(ids[:now], seen))), 0) == slow
    stream = Detokenizer(byte_tokenizer, stops)
    end = slow or len(ids)
    pieces = [
        stream.push([i], "" if n < end else "stop" if slow else "length")
        for n, i in enumerate(ids[:end], 1)
    ]
    first = min(
        (text.find(s) for s in stops if s in byte_tokenizer.decode(ids[:end])), default=len(text)
    )
    assert "".join(pieces) == text[:first]


@pytest.mark.slow
def test_help_needs_no_model(capsys):
    assert main(["serve", "--help"]) == 0 and "--reload-below" in capsys.readouterr().out
    assert "serve" in postgrad("--help").stdout
