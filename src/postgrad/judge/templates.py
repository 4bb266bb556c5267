"""Prompts for a judge and for a monitor, from the files of texts/.

A judge template has the placeholders {question} and {response}; a pairwise template has
{question}, {first} and {second}; a template for rubrics also has {criterion}. {end} is a line that
the judged texts cannot contain: it marks where they end, so that a response cannot continue the
prompt.
"""

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from postgrad.config.schema import JudgeConfig
from postgrad.errors import Conflict, Missing, UnknownName, did_you_mean

TEXTS = Path(__file__).with_name("texts")
TEMPLATES = ("sycophancy", "quality", "safety")
PAIRWISE = "pairwise"
RUBRIC = "rubric"
# Turn markers of chat templates. Written out in a judged text, a tokenizer would read them as such.
_TURN_MARKER = re.compile(
    r"<(?=\|[\w ]{1,40}\|>|｜[^｜<>]{1,40}｜>|/?s>|(?:bos|eos|pad)>|(?:start|end)_of_turn>)"
    r"|\[(?=/?INST\])"
)
_JOINERS = "\u200c\u200d"  # parts of emoji and of some scripts; all other invisible ones go


@dataclass(frozen=True)
class TemplateKind:
    """What a template file must contain, and the instruction that is added where it is missing."""

    placeholders: tuple[str, ...]
    keyword: str  # a file that contains it has its own instruction for the last line
    instruction: str  # a file of texts/


RATING_KIND = TemplateKind(("{question}", "{response}"), "RATING", "rating")
RANKING_KIND = TemplateKind(("{question}", "{first}", "{second}"), "RANKING", "ranking")


def read_text(*names: str) -> str:
    """Return files of texts/, with an empty line between them."""
    return "\n\n".join((TEXTS / f"{name}.txt").read_text().rstrip("\n") for name in names)


def template_text(config: JudgeConfig) -> str:
    """Return the judge's prompt with its placeholders unfilled.

    Raises:
        ConfigError: there is no such template or file, a placeholder is missing from the file, or
            reward.judge.lowest is not below reward.judge.highest.
    """
    _check_scale(config)
    if config.template == PAIRWISE:
        return read_text(PAIRWISE)
    if config.template in (*TEMPLATES, RUBRIC):
        return _fill_scale(read_text(config.template, "response", "rating"), config)
    return _fill_scale(_template_file_text(config.template), config)


def _template_file_text(template: str) -> str:
    file = Path(template).expanduser()
    if not file.is_file():
        hint = did_you_mean(template, [*TEMPLATES, PAIRWISE, RUBRIC])
        raise UnknownName(
            f"reward.judge.template={template} is neither a built-in template nor a file; {hint}"
        )
    text = file.read_text()
    kind = RANKING_KIND if "{first}" in text or "{second}" in text else RATING_KIND
    for placeholder in kind.placeholders:
        if placeholder not in text:
            raise Missing(
                f"reward.judge.template={template} has no {placeholder}; add it to the file"
            )
    if kind.keyword in text:
        return text
    return f"{text.rstrip()}\n\n{read_text(kind.instruction)}"


def is_pairwise(config: JudgeConfig) -> bool:
    """Return whether the judge compares two answers."""
    return "{first}" in template_text(config)


def has_rubric(config: JudgeConfig) -> bool:
    """Return whether the judge rates the criteria of each problem's rubric."""
    return "{criterion}" in template_text(config)


def monitor_text(config: JudgeConfig, binary: bool) -> str:
    """Return the monitor's prompt: the judge's task, with the thought in place of the response.

    Args:
        binary: the scores are 0 or 1, given by a program and not by a judge.
    """
    if binary:
        scale = JudgeConfig(lowest=0, highest=1)
        task = read_text("predict_binary")
    else:
        scale = config
        known = config.template in TEMPLATES
        judged = read_text(config.template) if known else "A judge rates responses."
        task = f"{judged}\n\n{read_text('predict_rating')}"
    return _fill_scale(f"{task}\n\n{read_text('thought', 'rating')}", scale)


def fill(template: str, **texts: str) -> str:
    """Replace each placeholder by its text as the judge may see it, and {end} by the end marker.

    Placeholders inside the texts are not replaced.
    """
    digest = hashlib.blake2b("\0".join(texts.values()).encode(errors="replace"), digest_size=6)
    values = {name: judged_text(text) for name, text in texts.items()}
    values["end"] = f"=== {digest.hexdigest()} ==="
    pattern = r"\{(" + "|".join(values) + r")\}"
    return re.sub(pattern, lambda match: values[match[1]], template)


def judged_text(text: str) -> str:
    """Return a text without invisible characters, and with turn markers broken by a space."""
    if not text.isascii():
        visible = [
            character
            for character in text
            if character in _JOINERS or unicodedata.category(character) != "Cf"
        ]
        text = "".join(visible)
    return _TURN_MARKER.sub(lambda match: f"{match[0]} ", text)


def _fill_scale(text: str, config: JudgeConfig) -> str:
    return text.replace("{lowest}", str(config.lowest)).replace("{highest}", str(config.highest))


def _check_scale(config: JudgeConfig) -> None:
    if config.lowest >= config.highest:
        raise Conflict(
            f"reward.judge.lowest={config.lowest} must be below "
            f"reward.judge.highest={config.highest}; a scale needs at least two ratings"
        )
