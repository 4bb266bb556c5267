"""Model folders of an attacker, by name: each changes a good folder so that it must be refused.

A program that runs anyway creates the file `marker`.
"""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path, Path], None]
OUTSIDE = "outside.json"  # a file beside the model folder


class Program:
    """An object whose unpickling runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def pickled(name: str) -> Change:
    def change(folder: Path, marker: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps({"a": Program(f"touch {marker}")}))

    return change


def pickled_adapter(folder: Path, marker: Path) -> None:
    base = folder.parent / "base"
    folder.rename(base)
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    settings = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    program = pickle.dumps({"a": Program(f"touch {marker}")})
    (folder / "adapter_model.bin").write_bytes(program)


def linked(name: str) -> Change:
    """The file is a link to the same file outside of the folder."""

    def change(folder: Path, marker: Path) -> None:
        (folder / name).rename(folder.parent / OUTSIDE)
        (folder / name).symlink_to(folder.parent / OUTSIDE)

    return change


def piped(name: str) -> Change:
    """The file is a pipe that nobody writes to."""

    def change(folder: Path, marker: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def index_naming(name: str) -> Change:
    """An index names a file outside of the folder, which has the right weights."""

    def change(folder: Path, marker: Path) -> None:
        from safetensors import safe_open

        with safe_open(folder / "model.safetensors", "pt") as opened:
            names = list(opened.keys())
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        target = name.format(parent=folder.parent)
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, target)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def with_config(**values: Any) -> Change:
    return lambda folder, marker: _update(folder / "config.json", values)


def with_text(file: str, text: str | bytes) -> Change:
    def change(folder: Path, marker: Path) -> None:
        content = text if isinstance(text, bytes) else text.encode()
        (folder / file).write_bytes(content)

    return change


def with_header(header: bytes, length: int | None = None) -> Change:
    size = len(header) if length is None else length
    return with_text("model.safetensors", struct.pack("<Q", size) + header + b"\0" * 64)


def with_code(**values: Any) -> Change:
    """The folder has Python code that its configuration asks for."""

    def change(folder: Path, marker: Path) -> None:
        _write_code(folder, marker)
        _update(folder / "config.json", values)

    return change


def with_tokenizer_code(folder: Path, marker: Path) -> None:
    _write_code(folder, marker)
    values = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    _update(folder / "tokenizer_config.json", values)
    (folder / "tokenizer.json").unlink()


def with_template(source: str) -> Change:
    return lambda folder, marker: (folder / "chat_template.jinja").write_text(
        source.replace("MARKER", str(marker))
    )


def _write_code(folder: Path, marker: Path) -> None:
    (folder / "evil.py").write_text(f"import os\nos.system('touch {marker}')\nclass Evil: pass\n")


def _update(file: Path, values: dict[str, Any]) -> None:
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, **values}))


HUGE = 10**9
GIANT_SHAPE = json.dumps(
    {"a": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 64]}}
).encode()
OVERRUN = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 10**12]}}).encode()
AUTO_MAP = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}

FOLDERS: dict[str, Change] = {
    "pickle pytorch_model.bin": pickled("pytorch_model.bin"),
    "pickle model.pt": pickled("model.pt"),
    "pickled adapter": pickled_adapter,
    "tokenizer.json is a pipe": piped("tokenizer.json"),
    "link config.json": linked("config.json"),
    "link tokenizer.json": linked("tokenizer.json"),
    "link model.safetensors": linked("model.safetensors"),
    "index with ..": index_naming("../outside.safetensors"),
    "index with absolute path": index_naming("{parent}/outside.safetensors"),
    "index without table": with_text("model.safetensors.index.json", '{"weight_map": 3}'),
    "huge hidden_size": with_config(hidden_size=HUGE),
    "huge vocab_size": with_config(vocab_size=HUGE),
    "huge intermediate_size": with_config(intermediate_size=HUGE),
    "huge num_hidden_layers": with_config(num_hidden_layers=HUGE),
    "more layers than weights": with_config(num_hidden_layers=5, layer_types=None),
    "negative hidden_size": with_config(hidden_size=-32),
    "text as hidden_size": with_config(hidden_size="os.system"),
    "no heads": with_config(num_attention_heads=0),
    "huge heads": with_config(num_attention_heads=HUGE),
    "huge head_dim": with_config(head_dim=HUGE),
    "text as context": with_config(max_position_embeddings="x"),
    "no context": with_config(max_position_embeddings=None),
    "safetensors header too long": with_header(b"{}", 2**62),
    "safetensors header no JSON": with_header(b"\xff" * 64),
    "safetensors giant shape": with_header(GIANT_SHAPE),
    "safetensors offsets past the end": with_header(OVERRUN),
    "safetensors empty": with_text("model.safetensors", b""),
    "code of an unknown model type": with_code(auto_map=AUTO_MAP, model_type="evil"),
    "code of a tokenizer": with_tokenizer_code,
    "kernels from a hub": with_config(attn_implementation="evil/kernels"),
    "config no JSON": with_text("config.json", "{"),
    "config a list": with_text("config.json", "[]"),
    "config nested deeply": with_text("config.json", '{"a":' * 100_000),
    "unknown model type": with_config(model_type="os"),
    "model type a list": with_config(model_type=["qwen3"]),
    "text_config a text": with_config(text_config="x"),
    "layer_types unknown": with_config(layer_types=["evil", "evil"]),
    "rope unknown": with_config(rope_parameters={"rope_type": "evil"}),
    "dtype a module": with_config(dtype="os.system"),
    "activation unknown": with_config(hidden_act="__import__('os').system"),
    "end token out of range": with_text("generation_config.json", f'{{"eos_token_id": {HUGE}}}'),
    "tokenizer no JSON": with_text("tokenizer.json", "{"),
    "tokenizer a list": with_text("tokenizer.json", "[]"),
    "tokenizer unknown model": with_text("tokenizer.json", '{"model": {"type": "evil"}}'),
    "tokenizer of zeros": with_text("tokenizer.json", b"\0" * 1000),
    "tokenizer_config a list": with_text("tokenizer_config.json", "[1]"),
    "generation_config a list": with_text("generation_config.json", "[1]"),
}

TEMPLATES: dict[str, str] = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "attr filter": "{{ ''|attr('__class__')|attr('__mro__') }}{{ x.y.z }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': cycler}) }}",
    "exception globals": (
        "{{ raise_exception.__globals__['__builtins__']['__import__']('os')"
        ".system('touch MARKER') }}"
    ),
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('touch MARKER') }}",
    "long range": "{% for i in range(1000000000) %}a{% endfor %}",
    "endless loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    ),
    "endless loops in a generation block": (
        "{% generation %}{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endgeneration %}"
    ),
    "long text": "{{ 'a' * 9999999999 }}",
    "wide format": "{{ '%9999999999d' % 1 }}",
    "doubling": (
        "{% set n = namespace(t='a') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}"
        "{% endfor %}"
    ),
    "large power": "{{ 9 ** (9 ** 9) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "change of messages": "{{ messages.clear() }}",
    "no Jinja": "{% for %}",
    "division by zero": "{{ 1 / 0 }}",
}


def _gguf(version: int, tensors: int, pairs: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


GGUF: dict[str, bytes] = {
    "empty": b"",
    "other magic": b"EVIL" + b"\0" * 60,
    "only the magic": b"GGUF",
    "unknown version": _gguf(99, 0, 0),
    "no tensors": _gguf(3, 0, 0),
    "endless pairs": _gguf(3, 0, 2**63),
    "endless tensors": _gguf(3, 2**63, 0),
    "endless name": _gguf(3, 0, 1, struct.pack("<Q", 2**62) + b"a" * 50),
    "endless array": _gguf(
        3, 0, 1, struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**62) + b"\0" * 50
    ),
    "unknown type": _gguf(3, 0, 1, struct.pack("<Q", 1) + b"a" + struct.pack("<I", 77)),
    "zeros": b"GGUF" + b"\0" * 500,
}
