"""`postgrad chat MODEL key=value ...`: a conversation with a model in the terminal."""

import sys
from collections.abc import Iterator
from typing import Any

from postgrad.cli.arguments import Parser
from postgrad.errors import ConfigError

DESCRIPTION = """\
Talks to a model in the terminal. Each line is a message; the model sees the whole conversation.
/clear begins another conversation, /quit or Ctrl-D ends the command, /help says this again. Lines
may also come from a pipe or a file."""

EPILOG = """\
More settings are those of postgrad eval, such as max_response_tokens=512, top_p=0.95,
rollout.stop=['###'] or model.device=cpu. A run brings its own template and response length."""

HELP = "/clear  begin another conversation\n/quit   end (also Ctrl-D)\n/help   show this"
PROMPT = "> "


def make_parser() -> Parser:
    parser = Parser(
        "chat MODEL [system=TEXT] [temperature=0] [seed=0] [key=value ...]", DESCRIPTION, EPILOG
    )
    parser.add_model()
    parser.add_setting("system", default="", help="system message of each conversation")
    parser.add_setting(
        "temperature", type=float, default=0.0, help="0, the default, is greedy decoding"
    )
    parser.add_setting("seed", type=int, default=0, help="random seed of the first message")
    parser.add_overrides("settings of postgrad eval")
    return parser


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv, help_if_empty=True)
    if arguments.temperature < 0:
        raise ConfigError(f"temperature={arguments.temperature} is out of range; at least 0")
    from postgrad.api.sampler import Sampler

    start: list[dict[str, Any]] = []
    if arguments.system:
        start.append({"role": "system", "content": arguments.system})
    sampler = Sampler(arguments.model, arguments.overrides)
    messages = list(start)
    seed = arguments.seed
    for line in _lines():
        if line in ("/quit", "/exit"):
            break
        if line == "/help":
            print(HELP)
            continue
        if line in ("/clear", "/new"):
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        reply = ""
        for piece in sampler.stream(messages, temperature=arguments.temperature, seed=seed):
            print(piece, end="", flush=True)
            reply += piece
        print(flush=True)
        messages.append({"role": "assistant", "content": reply})
        seed += 1
    return 0


def _lines() -> Iterator[str]:
    """Yields the lines that are not empty, until the end of the input."""
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
