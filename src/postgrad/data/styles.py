"""Prompt styles: what stands around a question, by name. One table, used when files are prepared and when prompts are rendered.

A style either rewrites the messages, which then go through the tokenizer's chat template, or writes the whole prompt as text.
Putting a style on takes off what another style of the table put on before, so a file prepared in one style can be used in any.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from postgrad.errors import ConfigError, did_you_mean

Messages = tuple[dict[str, str], ...]
SLOT = "{question}"
THINK = "<think>\n"

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
HASHES = 'Reason step by step, and output the final answer after "####".'
TWO_SECTIONS = (
    "Work through the task systematically before you answer: analyze it, explore ideas, verify them and refine them over several "
    "iterations. Write two sections. Thought: all of your reasoning, as <think>\n ... </think>\n. Solution, after </think>: the final "
    "answer, derived from the Thought; put a closed-form result or the letter of a multiple choice in \\boxed{}."
)
DIALOGUE = (
    "A User asks a question and an Assistant solves it. The Assistant first works the reasoning out in its mind and then gives the User "
    "the answer."
)
TAGS = (
    f"{DIALOGUE} The reasoning stands between <think> and </think>, the answer between <answer> and </answer>, like this: "
    "<think> the reasoning </think> <answer> the answer </answer>."
)
LATEX_BOX = "Write the final answer in LaTeX, inside \\boxed{}."
RULES = (
    "# Instruction\nYou are an AI assistant in conversation with a person. The person's query stands under # Query:, your reply under "
    "# Answer:. Be helpful: answer what was asked, in full. Be honest: say what you do not know, and that you are an AI. Be safe: do not "
    "help with what is harmful, illegal or demeaning, and say why."
)


def chatml(system: str, user: str) -> str:
    """Qwen's turns as text, the assistant's turn open."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Style:
    """What a style puts around a question.

    Attributes:
        help: one line for people.
        form: the user's turn, or with `text` the whole prompt, with {question} where the question goes.
        system: the system turn; empty: none. A style of the table replaces the system turn that was there.
        text: the form is the whole prompt, and the chat template is not used.
        opening: what the assistant's turn is opened with.
        stop: strings that end a response in this style.
    """

    help: str
    form: str = SLOT
    system: str = ""
    text: bool = False
    opening: str = ""
    stop: tuple[str, ...] = ()

    @property
    def before(self) -> str:
        return self.form.partition(SLOT)[0]

    @property
    def after(self) -> str:
        return self.form.partition(SLOT)[2]


OWN = Style("the messages as they stand in the file, through the tokenizer's chat template")
STYLES: dict[str, Style] = {
    "own": OWN,
    "bare": Style("the question alone as the user's turn, no system turn"),
    "boxed": Style(
        "the request to reason and to box the answer after the question", f"{SLOT}\n\n{BOXED}"
    ),
    "boxed_system": Style("the same request as the system turn (BuPO, Qwen)", system=BOXED),
    "hash": Style("GSM8K's way: the answer after ####", f"{SLOT} {HASHES}"),
    "luffy": Style(
        "a system turn that asks for Thought and Solution; the reply starts inside <think>",
        system=TWO_SECTIONS,
        opening=THINK,
    ),
    "qwen": Style(
        "ChatML as text, the request to box as the system turn", chatml(BOXED, SLOT), text=True
    ),
    "simplerl": Style(
        "ChatML as text, the request after the question",
        chatml("You are a helpful assistant.", f"{SLOT}\n{BOXED}"),
        text=True,
    ),
    "prime": Style(
        "User/Assistant dialogue with tags, answer boxed",
        f"{TAGS} {LATEX_BOX}\nUser: {SLOT}\nAssistant:",
        text=True,
    ),
    "octothinker": Style(
        "User/Assistant dialogue, answer boxed",
        f"{DIALOGUE}\nUser: {BOXED}\n{SLOT}\nAssistant:",
        text=True,
    ),
    "r1_zero": Style(
        "User/Assistant dialogue with tags, the reply starts inside <think>",
        f"{TAGS}\nUser: {SLOT}\nAssistant: <think>",
        text=True,
        stop=("</answer>",),
    ),
    "question_only": Style("the question and nothing else, no chat template", text=True),
    "no": Style("another name of question_only", text=True),
    "alpaca_sft": Style(
        "Alpaca's instruction and response blocks",
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{SLOT}\n\n### Response:\n",
        text=True,
    ),
    "zero_shot": Style(
        "rules for a base model (helpful, honest, safe), then the query in backticks",
        f"{RULES}\n\n# Query:\n```{SLOT}```\n\n# Answer:\n```",
        text=True,
        stop=("# Query:",),
    ),
}


def find_style(name: str, key: str = "data.prompt_style") -> Style:
    """A style of the table, or a text file of your own with {question} in it, which is the whole prompt.

    Raises:
        ConfigError: neither; or the file has no {question}, or has it twice.
    """
    if name in STYLES:
        return STYLES[name]
    file = Path(name).expanduser()
    if file.suffix != ".txt":
        hint = did_you_mean(name, STYLES)
        raise ConfigError(
            f"{key}={name} is unknown; {hint} (or a .txt file of your own with {SLOT} in it)"
        )
    if not file.is_file():
        raise ConfigError(
            f"{key}={name}: no such file; give a text file with {SLOT} in it, or one of {', '.join(STYLES)}"
        )
    try:
        form = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{key}={name} cannot be read ({' '.join(str(error).split())[:120]}); save it as UTF-8 text"
        ) from error
    if form.count(SLOT) != 1:
        raise ConfigError(
            f"{key}={name} has {SLOT} {form.count(SLOT)} times; it must stand there once, where the question goes"
        )
    return Style("a form of your own", form, text=True)


def stop_strings(given: Sequence[str] | None, style: str) -> list[str]:
    """The strings that end a response: those given, or the style's own. Raises ConfigError for one that is empty."""
    found = list(find_style(style).stop if given is None else given)
    if "" in found:
        raise ConfigError(
            f"rollout.stop={found} has an empty string, which would end every response; remove it"
        )
    return found


def question_of(messages: Sequence[dict[str, str]]) -> str:
    """The question alone: without system turns and without what a style of the table put around it.

    Raises:
        ConfigError: the messages are a dialogue of several turns, which no style can take apart.
    """
    turns = [message for message in messages if message["role"] != "system"]
    if [turn["role"] for turn in turns] != ["user"]:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"a prompt style needs one question, these messages have the roles {roles}; use data.prompt_style=own"
        )
    content = turns[0]["content"]
    for style in STYLES.values():
        if not (style.before or style.after):
            continue
        inside = len(content) > len(style.before) + len(style.after)
        if inside and content.startswith(style.before) and content.endswith(style.after):
            return content[len(style.before) : len(content) - len(style.after)]
    return content


def styled(style: Style, messages: Sequence[dict[str, str]]) -> Messages:
    """The messages in a style. A text style gives one user message that is the whole prompt."""
    if style is OWN:
        return tuple(dict(message) for message in messages)
    user = {"role": "user", "content": style.form.replace(SLOT, question_of(messages))}
    return ({"role": "system", "content": style.system}, user) if style.system else (user,)
