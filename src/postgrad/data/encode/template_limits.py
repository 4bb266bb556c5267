"""A chat template is a program that comes with a model: its time and memory are limited.

transformers renders templates in Jinja's sandbox, which keeps them from Python's internals but not
from loops without end or texts without limit. Each template therefore first renders a few short
conversations in a child process with limits. A template that misbehaves only for other messages
is not found.
"""

import os
import subprocess
import sys
from functools import cache

from postgrad.errors import ConfigError, TooLarge

CPU_LIMIT_S = 5
WAIT_S = 60  # on a busy machine the child gets little of a core
MEMORY_LIMIT_MIB = 512
MAX_CHARACTERS = 10_000_000
OUT_OF_MEMORY = 3
TOO_LONG = 4

CHILD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({cpu}, {cpu} + 1))
resource.setrlimit(resource.RLIMIT_AS, ({memory} << 20, {memory} << 20))
import re
from datetime import datetime
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

def refuse(text=""):
    raise TemplateError(text)

source = sys.stdin.read()
source = re.sub(r"(\\{{%-?)\\s*(end)?generation\\s*(-?%\\}})", r"\\1 set unused = 1 \\3", source)
environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
environment.globals.update(
    raise_exception=refuse, strftime_now=lambda text: datetime.now().strftime(text)
)
system = dict(role="system", content="s")
user = dict(role="user", content="question")
reply = dict(role="assistant", content="answer")
tool = dict(type="function", function=dict(name="f", description="d", parameters=dict()))
for messages, tools in (([user], None), ([system, user, reply, user], [tool])):
    try:
        text = environment.from_string(source).render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=True,
            bos_token="<s>", eos_token="</s>", pad_token="", unk_token="",
        )
    except MemoryError:
        sys.exit({out_of_memory})
    except Exception:
        continue
    if len(text) > {max_characters}:
        sys.exit({too_long})
"""


@cache
def check_template_limits(source: str) -> None:
    """Raise ConfigError if a chat template takes too much time, memory or text to render."""
    if sys.platform != "linux":
        return
    child = CHILD.format(
        cpu=CPU_LIMIT_S,
        memory=MEMORY_LIMIT_MIB,
        out_of_memory=OUT_OF_MEMORY,
        too_long=TOO_LONG,
        max_characters=MAX_CHARACTERS,
    )
    command = [sys.executable, "-I", "-c", child]
    try:
        done = subprocess.run(
            command,
            input=source.encode(errors="replace"),
            capture_output=True,
            timeout=WAIT_S,
            env={"PATH": os.environ.get("PATH", "")},
        )
    except subprocess.TimeoutExpired:
        raise _refusal(f"takes more than {WAIT_S} s") from None
    if done.returncode == OUT_OF_MEMORY:
        raise _refusal(f"needs more than {MEMORY_LIMIT_MIB} MiB")
    if done.returncode == TOO_LONG:
        raise _refusal(f"writes more than {MAX_CHARACTERS} characters")
    if done.returncode < 0:
        raise _refusal(f"takes more than {CPU_LIMIT_S} s")


def _refusal(what: str) -> ConfigError:
    return TooLarge(
        f"the model's chat template {what} to render a conversation of two short messages; "
        "use data.template=plain, or a model folder that you trust",
        at="data.template",
    )
