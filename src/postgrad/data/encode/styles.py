"""Prompt styles: the instructions around a question, by name.

`postgrad data prepare` and prompt rendering use the same table. A style either rewrites the
messages, which then go through the tokenizer's chat template, or writes the whole prompt as text.
Applying a style first removes the text that another style of the table added, so a file that was
prepared in one style can be used in any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.errors import Conflict, UnknownName, Unreadable, WrongValue, did_you_mean

Messages = tuple[dict[str, Any], ...]
SLOT = "{question}"
THINK = "<think>\n"

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
HASHES = 'Reason step by step, and output the final answer after "####".'
TWO_SECTIONS = (
    "Work through the task systematically before you answer: analyze it, explore ideas, verify "
    "them and refine them over several iterations. Write two sections. "
    "Thought: all of your reasoning, as <think>\n ... </think>\n. "
    "Solution, after </think>: the final answer, derived from the Thought; "
    "put a closed-form result or the letter of a multiple choice in \\boxed{}."
)
DIALOGUE = (
    "A User asks a question and an Assistant solves it. The Assistant first works the reasoning "
    "out in its mind and then gives the User the answer."
)
TAGS = (
    f"{DIALOGUE} The reasoning stands between <think> and </think>, the answer between <answer> "
    "and </answer>, like this: <think> the reasoning </think> <answer> the answer </answer>."
)
LATEX_BOX = "Write the final answer in LaTeX, inside \\boxed{}."
RULES = (
    "# Instruction\nYou are an AI assistant in conversation with a person. The person's query "
    "stands under # Query:, your reply under # Answer:. Be helpful: answer what was asked, in "
    "full. Be honest: say what you do not know, and that you are an AI. Be safe: do not help with "
    "what is harmful, illegal or demeaning, and say why."
)


def chatml(system: str, user: str) -> str:
    """Return a prompt in ChatML, Qwen's format, up to the start of the assistant's turn."""
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        f"<|im_start|>user\n{user}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def without_opening(prompt: str, response: str) -> str:
    """Return the response without a `<think>` at its start, if the prompt ends in one.

    White space that the prompt has after its `<think>` is removed from the response, too.
    """
    end = prompt.rstrip()
    tag = THINK.strip()
    if not end.endswith(tag) or not response.lstrip().startswith(tag):
        return response
    return response.lstrip().removeprefix(tag).removeprefix(prompt[len(end) :])


@dataclass(frozen=True)
class Style:
    """The text that a style adds to a question.

    Attributes:
        help: one line of help.
        form: the user's message, or with `text` the whole prompt; {question} marks the question.
        system: the system message, which replaces one in the data; "" for none.
        text: `form` is the whole prompt, and the chat template is not used.
        opening: text that starts the assistant's turn, as part of the prompt.
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
        """The text before the question."""
        return self.form.partition(SLOT)[0]

    @property
    def after(self) -> str:
        """The text after the question."""
        return self.form.partition(SLOT)[2]


OWN = Style("the messages of the file, through the tokenizer's chat template")
STYLES: dict[str, Style] = {
    "own": OWN,
    "bare": Style("the question alone as the user message, no system message"),
    "boxed": Style(
        "asks for reasoning and a boxed answer after the question", f"{SLOT}\n\n{BOXED}"
    ),
    "boxed_system": Style("the same request as the system message (BuPO, Qwen)", system=BOXED),
    "hash": Style("asks for the answer after ####, as in GSM8K", f"{SLOT} {HASHES}"),
    "luffy": Style(
        "a system message asks for Thought and Solution; the response starts inside <think>",
        system=TWO_SECTIONS,
        opening=THINK,
    ),
    "qwen": Style(
        "ChatML as text, the request for a boxed answer in the system message",
        chatml(BOXED, SLOT),
        text=True,
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
        "User/Assistant dialogue with tags, the response starts inside <think>",
        f"{TAGS}\nUser: {SLOT}\nAssistant: <think>",
        text=True,
        stop=("</answer>",),
    ),
    "question_only": Style("the question and nothing else, no chat template", text=True),
    "no": Style("another name for question_only", text=True),
    "alpaca_sft": Style(
        "Alpaca's instruction and response blocks",
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
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
    """Return a style of the table, or that of a .txt file: the prompt with {question}.

    Args:
        name: a key of STYLES, or the path of a text file.
        key: the setting that holds the name, for error messages.

    Raises:
        ConfigError: no such style or file, or the file does not hold {question} exactly once.
    """
    if name in STYLES:
        return STYLES[name]
    file = Path(name).expanduser()
    if file.suffix != ".txt":
        hint = did_you_mean(name, STYLES)
        raise UnknownName(
            f"{key}={name} is unknown; {hint} (or a .txt file of your own with {SLOT} in it)"
        )
    if not file.is_file():
        raise Unreadable(
            f"{key}={name}: no such file; "
            f"give a text file with {SLOT} in it, or one of {', '.join(STYLES)}"
        )
    try:
        form = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise Unreadable(
            f"{key}={name} cannot be read ({reason}); save it as UTF-8 text"
        ) from error
    if form.count(SLOT) != 1:
        raise WrongValue(
            f"{key}={name} has {SLOT} {form.count(SLOT)} times; "
            "write it exactly once, where the question goes"
        )
    return Style("a prompt of your own", form, text=True)


def stop_strings(configured: Sequence[str] | None, style: str) -> list[str]:
    """Return the strings that end a response: the configured ones, or those of the style.

    Raises:
        ConfigError: one of them is empty.
    """
    stops = list(find_style(style).stop if configured is None else configured)
    if "" in stops:
        raise WrongValue(
            f"rollout.stop={stops} has an empty string, which would end every response; remove it"
        )
    return stops


def question_of(messages: Sequence[dict[str, Any]]) -> Any:
    """Return the question alone: without system messages and without the text that a style added.

    A question with pictures is the list of its parts.

    Raises:
        ConfigError: the messages are a dialogue of several turns, which have no one question.
    """
    turns = [message for message in messages if message["role"] != "system"]
    if [turn["role"] for turn in turns] != ["user"]:
        roles = ", ".join(message["role"] for message in messages)
        raise Conflict(
            f"a prompt style needs one question, these messages have the roles {roles}; "
            "use data.prompt_style=own",
            at="data.prompt_style",
        )
    content = turns[0]["content"]
    if isinstance(content, list):
        return content
    for style in STYLES.values():
        if _is_in_style(content, style):
            return content[len(style.before) : len(content) - len(style.after)]
    return content


def _is_in_style(content: str, style: Style) -> bool:
    if not (style.before or style.after):
        return False
    if len(content) <= len(style.before) + len(style.after):
        return False
    return content.startswith(style.before) and content.endswith(style.after)


def styled(style: Style, messages: Sequence[dict[str, Any]]) -> Messages:
    """Return the messages in a style.

    With a text style: one user message that is the whole prompt.
    """
    if style is OWN:
        return tuple(dict(message) for message in messages)
    content = question_of(messages)
    if isinstance(content, list):
        before, after = ({"type": "text", "text": text} for text in style.form.split(SLOT))
        content = [part for part in (before, *content, after) if part.get("text") != ""]
    else:
        content = style.form.replace(SLOT, content)
    user: dict[str, Any] = {"role": "user", "content": content}
    if style.system:
        return ({"role": "system", "content": style.system}, user)
    return (user,)
