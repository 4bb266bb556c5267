"""Problems as token ids, and token ids as text. The only place that knows chat templates and special tokens."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from postgrad.config.schema import CUTS, OVERLONG, DataConfig
from postgrad.data.styles import THINK, find_style, styled
from postgrad.data.truncate import min_limit, truncate
from postgrad.errors import ConfigError, RunError, did_you_mean
from postgrad.files import atomic_write_text
from postgrad.problem import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES = ("auto", "chat", "plain")
# What transformers itself hands to a chat template.
RESERVED = (
    "messages",
    "conversation",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "documents",
    "tokenize",
)


ASSISTANT = (
    "postgrad-turn"  # stands for what the model said where a template is asked what follows it
)
TOOLS_FORM = """You may call tools. These are their schemas, one a line:
{schemas}
To call one, write a JSON object between tags and end your turn; the answer comes before your next turn:
<tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>"""


def make_prompts(
    tokenizer: "PreTrainedTokenizerBase", data: DataConfig, tools: Sequence[dict[str, Any]] = ()
) -> "Prompts":
    """The prompts that a configuration describes: training and evaluation call this, so their prompts are the same bytes."""
    style, options = data.prompt_style, data.template_options
    return Prompts(
        tokenizer, data.template, data.max_prompt_tokens, data.overlong, style, options, tools
    )


class Prompts:
    """Turns problems into prompt token ids.

    Args:
        tokenizer: a transformers tokenizer.
        template: `chat` uses the tokenizer's chat template and opens the assistant's turn; `plain` joins the contents with blank
            lines; `auto` is chat where there is a chat template, else plain.
        max_prompt_tokens: longest prompt.
        overlong: what becomes of longer ones: `check` refuses (`error`) or drops them (`drop`), or `encode` cuts them to
            the limit: `left`, `middle` or `right` (cut.py).
        style: a name of styles.STYLES or a .txt file with {question} in it; one that writes whole prompts takes no template.
        options: values the chat template reads by name, e.g. {"enable_thinking": False}.
        tools: schemas of what the model may call. A template that knows tools shows them; for another they stand in the system message.

    Raises:
        ConfigError: an unknown template, overlong, style or option; `chat` without a chat template.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template: str = "auto",
        max_prompt_tokens: int = 512,
        overlong: str = "error",
        style: str = "own",
        options: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        if template not in TEMPLATES:
            raise ConfigError(
                f"data.template={template} is unknown; {did_you_mean(template, TEMPLATES)}"
            )
        if overlong not in OVERLONG:
            raise ConfigError(
                f"data.overlong={overlong} is unknown; {did_you_mean(overlong, OVERLONG)}"
            )
        if template == "chat" and not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use data.template=plain"
            )
        self.tokenizer = tokenizer
        self.template = (
            template if template != "auto" else ("chat" if tokenizer.chat_template else "plain")
        )
        self.max_prompt_tokens, self.overlong = max_prompt_tokens, overlong
        self.style, self.options = find_style(style), dict(options or {})
        if self.style.text:
            self._check_text_style(style, template)
            self.template = "plain"
        self._check_options()
        self.tools = list(tools)
        if self.tools:
            self._check_tools()
        self._cache: dict[str, tuple[tuple[dict[str, str], ...], list[int], int]] = {}
        self._endings: dict[tuple[str, ...], int] = {}

    def _check_text_style(self, name: str, template: str) -> None:
        if template == "chat":
            raise ConfigError(
                f"data.prompt_style={name} writes the whole prompt; remove data.template=chat, or use another style"
            )
        vocabulary = self.tokenizer.get_vocab()
        if missing := [
            mark for mark in re.findall(r"<\|\w+\|>", self.style.form) if mark not in vocabulary
        ]:
            raise ConfigError(
                f"data.prompt_style={name} writes {missing[0]}, for which the tokenizer {self.tokenizer.name_or_path!r} "
                "has no token; use data.prompt_style=own for its own chat template"
            )

    def _check_options(self) -> None:
        """A chat template silently ignores a name it does not read, so a wrong one is refused here."""
        for name in self.options:
            key = f"data.template_options.{name}"
            if name in RESERVED:
                raise ConfigError(f"{key} is set by the framework; remove it")
            if self.template != "chat":
                raise ConfigError(
                    f"{key} is for chat templates, and these prompts use none; remove it"
                )
            template = str(self.tokenizer.chat_template)
            if not re.search(rf"\b{re.escape(name)}\b", template):
                words = {
                    word for word in re.findall(r"\b[a-z]\w{3,}\b", template) if "_" in word
                } - set(RESERVED)
                raise ConfigError(
                    f"{key}: the chat template never reads {name}; {did_you_mean(name, words)}"
                )

    def _check_tools(self) -> None:
        if self.template != "chat":
            raise ConfigError(
                f"rollout.tools needs a chat template, and the prompts of {self.tokenizer.name_or_path!r} use none; remove one of them"
            )
        try:
            self._after_turn(["answer"])
        except (TemplateError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"rollout.tools: the chat template of {self.tokenizer.name_or_path!r} has no place for tools' answers ({reason})"
            ) from error

    def encode(self, problem: Problem) -> list[int]:
        """The prompt's token ids, with exactly the special tokens the model expects before its response; cut where `overlong` says so."""
        return list(self._encoded(problem)[0])

    def _encoded(self, problem: Problem) -> tuple[list[int], int]:
        """The prompt's ids, and how many there were before it was cut; worked out once."""
        messages, ids, whole = self._cache.get(problem.uid, (None, [], 0))
        # Two data sets may number their rows alike, so the uid alone does not say that the text is the same.
        if messages != problem.messages:
            ids = self._whole(problem)
            if not ids:
                raise ConfigError(
                    f"problem {problem.uid}: its prompt has no tokens; remove it or use a template that adds some"
                )
            whole, ids = len(ids), self._fitted(problem, ids)
            self._cache[problem.uid] = problem.messages, ids, whole
        return ids, whole

    def _whole(self, problem: Problem) -> list[int]:
        return self._chat_ids(problem) if self.template == "chat" else self._plain_ids(problem)

    def _fitted(self, problem: Problem, ids: list[int]) -> list[int]:
        """The ids, cut to the limit where prompts are cut. A BOS stays, and so does what is written after the last message."""
        limit, way = self.max_prompt_tokens, self.overlong
        if way not in CUTS or len(ids) <= limit:
            return ids
        seen = f"the prompt of problem {problem.uid} has {len(ids)} tokens, data.max_prompt_tokens={limit}"
        if self.tools:
            raise ConfigError(
                f"{seen}, and data.overlong={way} would cut into the schemas of rollout.tools; raise the limit or use data.overlong=drop"
            )
        bos = self.tokenizer.bos_token_id  # of some models it is also what opens every turn
        start, ending = int(ids[0] == bos and bos not in ids[1:]), self._ending(problem)
        if limit < (least := min_limit(way, start, ending)):
            raise ConfigError(
                f"{seen}: too few to cut it ({way}) around the {ending} with which it ends; set data.max_prompt_tokens={least} or more"
            )
        return truncate(ids, limit, way, start, ending)

    def _ending(self, problem: Problem) -> int:
        """How many tokens follow the words of the last message: as many as two prompts share at their ends that differ in these words."""
        *before, last = problem.messages
        roles = tuple(message["role"] for message in problem.messages)
        if roles not in self._endings:
            told = [
                self._whole(replace(problem, messages=(*before, {**last, "content": word})))[::-1]
                for word in "01"
            ]
            self._endings[roles] = next(
                (i for i, (one, other) in enumerate(zip(*told, strict=False)) if one != other), 0
            )
        return self._endings[roles]

    def text(self, problem: Problem) -> str:
        """The prompt as text: what `encode` turns into ids. A plain prompt is without the special tokens the tokenizer adds."""
        try:
            messages = [dict(message) for message in styled(self.style, problem.messages)]
        except ConfigError as error:
            raise ConfigError(f"problem {problem.uid}: {error}") from error
        if self.template == "plain":
            return "\n\n".join(message["content"] for message in messages) + self.style.opening
        try:
            text = self._render(messages)
        except TemplateError as error:
            reason, roles = (
                " ".join(str(error).split())[:200],
                ", ".join(message["role"] for message in messages),
            )
            raise ConfigError(
                f"problem {problem.uid}: the chat template refuses messages with roles {roles} ({reason}); "
                "change the messages or use data.template=plain"
            ) from error
        return text

    def _render(self, messages: list[dict[str, Any]]) -> str:
        """The template's text with the assistant's turn opened."""
        tools: dict[str, Any] = {}
        if self.tools and re.search(r"\btools\b", str(self.tokenizer.chat_template)):
            tools = {"tools": self.tools}
        elif self.tools:
            told = TOOLS_FORM.format(schemas="\n".join(json.dumps(schema) for schema in self.tools))
            system = messages[0]["role"] == "system"
            content = f"{messages[0]['content']}\n\n{told}" if system else told
            messages = [
                {"role": "system", "content": content},
                *(messages[1:] if system else messages),
            ]
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **tools, **self.options
        )
        opening = self.style.opening  # some models bring a template that opens it already
        return cast(str, text) if cast(str, text).endswith(opening) else f"{text}{opening}"

    def _after_turn(self, answers: Sequence[str]) -> str:
        """What the template writes after an assistant's words: its end, the tools' answers, the opening of the next turn."""
        told = [{"role": "tool", "content": answer} for answer in answers]
        text = self._render(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": ASSISTANT}, *told]
        )
        return text[text.index(ASSISTANT) + len(ASSISTANT) :]

    def encode_tool_answers(self, answers: Sequence[str], end: int) -> list[int]:
        """The ids that come after a turn of the model's that ended with `end`: tools' answers, then the opening of the next turn.

        Nothing that was sampled is encoded anew. Special tokens in an answer are left out of it: it cannot open turns itself.
        """
        marks = [mark for mark in map(str, self.tokenizer.all_special_tokens) if mark]
        clean = [
            re.sub("|".join(map(re.escape, marks)), "", answer) if marks else answer
            for answer in answers
        ]
        return self._ids(
            self._after_turn(clean).removeprefix(self.decode_raw([end])), special=False
        )

    def _chat_ids(self, problem: Problem) -> list[int]:
        """The template writes all special tokens itself, so transformers adds none: a BOS comes once or not at all."""
        return self._ids(self.text(problem), special=False)

    def _plain_ids(self, problem: Problem) -> list[int]:
        text = self.text(problem)
        ids = self._ids(text, special=True)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]  # the text brought its own
        if eos is not None and ids[-1:] == [eos] and self._ids(text, special=False)[-1:] != [eos]:
            ids = ids[:-1]  # some tokenizers close every text, but a response is to follow
        return ids

    def _ids(self, text: str, special: bool) -> list[int]:
        return list(cast(Any, self.tokenizer(text, add_special_tokens=special))["input_ids"])

    def encode_response(self, text: str, with_end: bool = True) -> list[int]:
        """A demonstration's token ids without special tokens; `with_end` closes it with the end-of-sequence id, once."""
        ids = self._ids(text, special=False)
        end = self.tokenizer.eos_token_id
        if with_end and end is None:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name_or_path!r} has no end-of-sequence token; set its eos_token"
            )
        return [*ids, cast(int, end)] if with_end and ids[-1:] != [end] else ids

    def encode_demonstrations(self, problem: Problem) -> list[list[int]]:
        """The problem's demonstrations as responses to its prompt, each up to its first end-of-sequence id.

        Where the rendered prompt ends in an opened thought, a demonstration that opens it again loses that opening.
        """
        prompt, mark = self.text(problem), THINK.strip()
        opening = THINK if prompt.endswith(THINK) else mark if prompt.endswith(mark) else ""
        texts = [text.removeprefix(opening) for text in problem.demonstrations]
        end = cast(int, self.tokenizer.eos_token_id)
        return [ids[: ids.index(end) + 1] for ids in map(self.encode_response, texts)]

    def encode_prefilled(
        self, problem: Problem, opening: str, text: str, closing: str
    ) -> list[int]:
        """The prompt with the assistant's turn begun: opening, text and closing, each encoded alone and without special tokens.

        A prompt whose template has written the opening already does not get it twice.
        """
        prompt = self.encode(problem)
        tail = self.decode_raw(prompt[-4 * len(opening) - 8 :]).rstrip()
        parts = (
            [text, closing]
            if opening and tail.endswith(opening.strip())
            else [opening, text, closing]
        )
        return [*prompt, *(i for part in parts if part for i in self._ids(part, special=False))]

    def decode_raw(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens shown."""
        return cast(
            str,
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens and with spaces as they are."""
        return cast(
            str,
            self.tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
        )

    def save(self, file: Path) -> None:
        """Write the tokenizer as the one file that tells which text each id stands for, if it has that form and is not there yet.

        Raises:
            RunError: the file cannot be written.
        """
        if file.exists() or not self.tokenizer.is_fast:
            return
        try:
            atomic_write_text(file, cast(Any, self.tokenizer).backend_tokenizer.to_str())
        except OSError as error:
            raise RunError(f"{file} could not be written: {error.strerror}") from error

    def drop_overlong(self, problems: Sequence[Problem]) -> tuple[list[Problem], int]:
        """Encode all prompts and hold them against `max_prompt_tokens`.

        Returns:
            (problems that fit, number dropped); none are dropped unless `overlong` is `drop`. Those that `encode` cuts fit.

        Raises:
            ConfigError: some are too long and `overlong` is `error`, all are too long and it is `drop`, or one cannot be cut.
        """
        lengths = [len(self.encode(problem)) for problem in problems]
        return self._fitting(
            problems, lengths, "prompts", "data.max_prompt_tokens", self.max_prompt_tokens
        )

    def num_truncated(self, problems: Sequence[Problem]) -> int:
        """How many of the problems have a prompt that was cut."""
        return sum(len(ids) < whole for ids, whole in map(self._encoded, problems))

    def drop_overlong_demonstrations(
        self, problems: Sequence[Problem], limit: int
    ) -> tuple[list[Problem], int]:
        """The same for the longest response and what is learned as one: each problem's first demonstration, else its pair.

        A response is never cut: its end would be missing. Problems without one fit.
        """
        texts = [
            p.demonstrations[:1]
            or [str(p.extra[name]) for name in ("chosen", "rejected") if name in p.extra]
            for p in problems
        ]
        lengths = [
            max((len(self.encode_response(text)) for text in own), default=0) for own in texts
        ]
        what = "demonstrations" if any(p.demonstrations for p in problems) else "pairs"
        return self._fitting(problems, lengths, what, "rollout.max_response_tokens", limit)

    def _fitting(
        self, problems: Sequence[Problem], lengths: list[int], what: str, key: str, limit: int
    ) -> tuple[list[Problem], int]:
        too_long = [i for i, length in enumerate(lengths) if length > limit]
        if too_long and (self.overlong != "drop" or len(too_long) == len(problems)):
            first, longest = too_long[0], max(lengths)
            fix = f"set {key}={longest}" + (
                " or data.overlong=drop" if self.overlong != "drop" else ""
            )
            raise ConfigError(
                f"{len(too_long)} of {len(problems)} {what} are longer than {key}={limit}, "
                f"the first is {problems[first].uid} with {lengths[first]} tokens; {fix}"
            )
        dropped = set(too_long)
        return [problem for i, problem in enumerate(problems) if i not in dropped], len(dropped)
