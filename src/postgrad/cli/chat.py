"""`postgrad chat MODEL key=value ...`: a conversation with a model in the terminal."""

import sys
from collections.abc import Iterator
from typing import Any

from postgrad.errors import WrongValue
from postgrad.pictures import PictureError, read_picture

HELP = (
    "/image FILE  show a picture with the next message\n/clear  begin another conversation\n"
    "/quit   end (also Ctrl-D)\n/help   show this"
)
PROMPT = "> "


def chat(
    model: str, *overrides: str, system: str = "", temperature: float = 0.0, seed: int = 0
) -> int:
    """Talk to a model in the terminal. Each line is a message; the model sees the whole
    conversation. /image FILE shows a picture with the next message, /clear begins another
    conversation, /quit or Ctrl-D ends the command, /help says this again. Lines may also come from
    a pipe or a file.

    Args:
        model: run folder (its newest checkpoint), checkpoint, model folder, GGUF file, hub id,
            smollm2 or tiny
        overrides: settings of postgrad eval
        system: system message of each conversation
        temperature: 0 is greedy decoding
        seed: random seed of the first message

    More settings are those of postgrad eval, such as max_response_tokens=512, top_p=0.95,
    rollout.stop=['###'] or model.device=cpu. A run brings its own template and response length.
    """
    if temperature < 0:
        raise WrongValue(f"temperature={temperature} is out of range; at least 0")
    from postgrad.api.sampler import Sampler

    start: list[dict[str, Any]] = []
    if system:
        start.append({"role": "system", "content": system})
    sampler = Sampler(model, list(overrides))
    messages = list(start)
    pictures: list[dict[str, Any]] = []  # of the next message
    for line in _lines():
        if line in ("/quit", "/exit"):
            break
        if line == "/help":
            print(HELP)
            continue
        if line in ("/clear", "/new"):
            messages, pictures = list(start), []
            continue
        command, _, path = line.partition(" ")
        if command == "/image":
            pictures += _read_image(path.strip())
            continue
        text = {"type": "text", "text": line}
        messages.append({"role": "user", "content": [*pictures, text] if pictures else line})
        pictures = []
        reply = ""
        for piece in sampler.stream(messages, temperature=temperature, seed=seed):
            print(piece, end="", flush=True)
            reply += piece
        print(flush=True)
        messages.append({"role": "assistant", "content": reply})
        seed += 1
    return 0


def _read_image(path: str) -> list[dict[str, Any]]:
    """Return the part of a picture; print what is wrong with a file that is none."""
    try:
        return [{"type": "image", "image": read_picture(path)}]
    except PictureError as error:
        print(f"{path}: {error}")
        return []


def _lines() -> Iterator[str]:
    """Yield the lines that are not empty, until the end of the input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  input() then has the arrow keys and a history
    while True:
        try:
            line = input(PROMPT if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return
        if line:
            yield line
