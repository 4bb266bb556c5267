"""Checks of the settings and messages that prompts are made with. All raise ConfigError."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from postgrad.config.schema import OVERLONG
from postgrad.data.encode.template import ChatTemplate
from postgrad.data.encode.turns import RENDER_ERRORS, TurnNotFound
from postgrad.data.rows.messages import ROLES, reasoning_field
from postgrad.errors import (
    Conflict,
    Damaged,
    NoEffect,
    UnknownName,
    Unsupported,
    WrongValue,
    did_you_mean,
)
from postgrad.pictures import PictureError
from postgrad.problem import Message, Problem, problem_label

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = ("auto", "chat", "plain")


def check_names(tokenizer: "PreTrainedTokenizerBase", template: str, overlong: str) -> None:
    """Refuses unknown values, and a chat template that the tokenizer does not have."""
    if template not in TEMPLATES:
        raise UnknownName(
            f"data.template={template} is unknown; {did_you_mean(template, TEMPLATES)}"
        )
    if overlong not in OVERLONG:
        raise UnknownName(
            f"data.overlong={overlong} is unknown; {did_you_mean(overlong, OVERLONG)}"
        )
    if template == "chat" and not tokenizer.chat_template:
        raise Unsupported(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; "
            "use data.template=plain",
            at="data.template",
        )


def check_text_style(
    tokenizer: "PreTrainedTokenizerBase", name: str, form: str, template: str
) -> None:
    """Refuses a style that writes the whole prompt with a chat template or unknown tokens."""
    if template == "chat":
        raise Conflict(
            f"data.prompt_style={name} writes the whole prompt; "
            "remove data.template=chat, or use another style"
        )
    vocabulary = tokenizer.get_vocab()
    for token in re.findall(r"<\|\w+\|>", form):
        if token not in vocabulary:
            raise Conflict(
                f"data.prompt_style={name} writes {token}, which is not a token of the "
                f"tokenizer {tokenizer.name_or_path!r}; "
                "use data.prompt_style=own for its own chat template"
            )


def check_no_chat_settings(
    tokenizer: "PreTrainedTokenizerBase",
    options: Mapping[str, Any],
    tools: Sequence[dict[str, Any]],
) -> None:
    """Refuses template options and tools for prompts without a chat template."""
    for name in options:
        raise NoEffect(
            f"data.template_options.{name} is for chat templates, and these prompts use none; "
            "remove it"
        )
    if tools:
        names = ", ".join(str(tool.get("function", {}).get("name", "?")) for tool in tools)
        raise Unsupported(
            f"tools ({names}: those of rollout.tools, and public methods of an environment) need a "
            f"chat template, and the prompts of {tokenizer.name_or_path!r} use none; remove them, "
            "or start the method's name with _",
            at="rollout.tools",
        )


@contextmanager
def rendering(problem: Problem, messages: Sequence[Message]) -> Iterator[None]:
    """Raise ConfigError for what a chat template raises, or loses, when it renders the messages."""
    try:
        yield
    except PictureError as error:
        raise Damaged(f"{problem_label(problem)}: {error}", at="images") from error
    except RENDER_ERRORS as error:
        roles = ", ".join(message["role"] for message in messages)
        reason = " ".join(str(error).split())[:200]
        raise Unsupported(
            f"{problem_label(problem)}: the chat template refuses messages with roles {roles} "
            f"({reason}); change the messages or use data.template=plain",
            at="messages",
        ) from error
    except TurnNotFound as error:
        raise Unsupported(
            f"{problem_label(problem)}: {error} is not found in what the chat template renders; "
            "write thinking in the content, as <think>...</think>, mark the assistant's text with "
            "{% generation %} in the template, or use data.template=plain",
            at="data.template",
        ) from error


def check_prompt_end(problem: Problem, messages: Sequence[Message]) -> None:
    """Refuses messages that end in an assistant message: its turn would be closed.

    The model would answer it in a second turn of the assistant, instead of continuing it.
    """
    if messages and messages[-1]["role"] == "assistant":
        raise Unsupported(
            f"{problem_label(problem)}: its prompt ends in an assistant message, which the chat "
            "template closes, so a response cannot continue it; move its text to the start of the "
            "response, or end the prompt with a user or tool message",
            at="messages",
        )


def check_shown(
    template: ChatTemplate | None,
    problem: Problem,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
) -> None:
    """Refuse what a prompt would lose: tools, calls and thinking that its template does not read.

    Also roles that no chat has: templates write them as they are, or leave them out. Without a
    template only the contents are shown.
    """
    field = reasoning_field(messages)
    has_calls = any("tool_calls" in message for message in messages)
    for name, is_used in (("tools", tools), ("tool_calls", has_calls), (field, field)):
        if not is_used:
            continue
        is_read = template is not None and (
            template.reads_field(name) if name == field else template.reads(name)
        )
        if not is_read:
            where = f"the chat template of {template.tokenizer.name_or_path!r}" if template else ""
            raise Unsupported(
                f"{problem_label(problem)} has {name}, which "
                f"{where or 'a prompt without a chat template'} does not render; use a model whose "
                "template does, remove these rows, or write thinking in the content, as "
                "<think>...</think>",
                at=name,
            )
    for message in messages if template else ():
        if message["role"] not in ROLES:
            raise WrongValue(
                f"{problem_label(problem)} has a message with the role {message['role']!r}, which "
                f"chat templates do not know; rename it to one of {', '.join(ROLES)}",
                at="messages",
            )
