"""The formats in which models write tool calls, and how a run finds the format of its model.

Every parser takes the text of a turn, with special tokens and without its thought, and returns the
calls in order. A call that cannot be read has a `mistake`, which becomes the answer to it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

THOUGHT_END = "</think>"
UNREADABLE = 'a call is a JSON object: {"name": "...", "arguments": {...}}'
# Models that write calls in fenced JSON blocks although their template asks for tags.
FENCED_MODELS = ("qwen2.5-coder",)
# Deeper values of a model's text could not be sent to a child process or shown in a template.
MAX_JSON_DEPTH = 100


@dataclass(frozen=True)
class Call:
    """One call as the policy wrote it; `mistake` says why it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    mistake: str = ""


Schemas = Sequence[Mapping[str, Any]]  # descriptions of tools in OpenAI's form
Parser = Callable[[str, Schemas], list[Call]]


def parse_json(text: str) -> Any:
    """Return the value of JSON text that a model wrote.

    Raises ValueError if it is not JSON, or nested more than MAX_JSON_DEPTH levels.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    if _is_too_deep(value):
        raise ValueError("the JSON is nested too deeply")
    return value


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container
    return True


def json_call(text: str, arguments_key: str = "arguments") -> Call:
    """Return the call of a JSON object with `name` and arguments, which may be JSON text."""
    try:
        call = parse_json(text)
        arguments = call.get(arguments_key, {})
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        if isinstance(call.get("name"), str) and isinstance(arguments, dict):
            return Call(call["name"], arguments)
    except (ValueError, AttributeError):  # not JSON, or not an object
        pass
    return Call(mistake=UNREADABLE)


def named_call(name: str, arguments: str) -> Call:
    """Return the call of a name and a JSON object of arguments."""
    try:
        value = parse_json(arguments or "{}")
        if isinstance(value, dict):
            return Call(name.strip(), value)
    except ValueError:  # the policy reads the mistake below
        pass
    return Call(mistake=f"the arguments of {name.strip()} are not a JSON object")


def typed_value(text: str, name: str, key: str, schemas: Schemas) -> Any:
    """Return an argument written as plain text: text if its schema says string, else JSON."""
    for schema in schemas:
        function = schema["function"]
        if function["name"] == name:
            kind = function.get("parameters", {}).get("properties", {}).get(key, {}).get("type")
            if kind == "string":
                return text
    try:
        return parse_json(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


# ---- one parser per format

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


def parse_hermes(text: str, schemas: Schemas = ()) -> list[Call]:
    """Hermes, Qwen2.5, Qwen3: JSON between <tool_call> and </tool_call>."""
    return [json_call(body) for body in _HERMES.findall(text)]


_FENCED = re.compile(r"```(?:json)?\s*\n(\s*\{.*?\})\s*```", re.DOTALL)


def parse_fenced(text: str, schemas: Schemas) -> list[Call]:
    """Fenced JSON blocks with the name of a tool; other blocks are no calls."""
    names = {schema["function"]["name"] for schema in schemas}
    calls = [json_call(body) for body in _FENCED.findall(text)]
    return [call for call in calls if call.name in names]


_QWEN3_CODER = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|$)", re.DOTALL)


def parse_qwen3_coder(text: str, schemas: Schemas) -> list[Call]:
    """Qwen3-Coder: <function=NAME> with <parameter=KEY> blocks of plain text."""
    calls: list[Call] = []
    for name, body in _QWEN3_CODER.findall(text):
        arguments = {
            key: typed_value(value, name, key, schemas) for key, value in _PARAMETER.findall(body)
        }
        calls.append(Call(name, arguments))
    return calls


_LLAMA_SPECIAL = re.compile(r"<\|(?:python_tag|eom_id|eot_id)\|>")


def parse_llama3(text: str, schemas: Schemas) -> list[Call]:
    """Llama 3: the turn is JSON with name and parameters; `;` separates several."""
    body = _LLAMA_SPECIAL.sub("", text).strip()
    if not body.startswith("{") or '"name"' not in body:
        return []
    decoder = json.JSONDecoder()
    calls: list[Call] = []
    while body.startswith("{"):
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            return [*calls, Call(mistake=UNREADABLE.replace("arguments", "parameters"))]
        key = "parameters" if "parameters" in value else "arguments"
        calls.append(json_call(body[:end], key))
        body = body[end:].lstrip("; \n")
    return calls


_GPT_OSS = re.compile(
    r"(?:<\|channel\|>\w+ )?to=functions\.([\w.-]+)[^{}]*?<\|message\|>(.*?)(?:<\|call\|>|$)",
    re.DOTALL,
)


def parse_gpt_oss(text: str, schemas: Schemas) -> list[Call]:
    """gpt-oss: a message to functions.NAME, whose content is a JSON object."""
    return [named_call(name, body.strip()) for name, body in _GPT_OSS.findall(text)]


_GLM = re.compile(r"<tool_call>\s*([^\s<{]+)\s*(.*?)(?:</tool_call>|$)", re.DOTALL)
_GLM_ARGUMENT = re.compile(
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|$)", re.DOTALL
)


def parse_glm(text: str, schemas: Schemas) -> list[Call]:
    """GLM 4.5: <tool_call>NAME with pairs of <arg_key> and <arg_value>."""
    calls: list[Call] = []
    for name, body in _GLM.findall(text):
        pairs = _GLM_ARGUMENT.findall(body)
        arguments = {key.strip(): typed_value(value, name, key, schemas) for key, value in pairs}
        calls.append(Call(name, arguments))
    return calls


_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|$)", re.DOTALL
)
_JSON_FENCE = re.compile(r"(.*?)\n```json\n(.*?)\n?```", re.DOTALL)


def parse_deepseek(text: str, schemas: Schemas) -> list[Call]:
    """DeepSeek: V3 writes `function`, the name and a fenced block; V3.1 the name and JSON."""
    calls: list[Call] = []
    for first, second in _DEEPSEEK.findall(text):
        fenced = _JSON_FENCE.fullmatch(second.strip())
        calls.append(named_call(fenced[1], fenced[2]) if fenced else named_call(first, second))
    return calls


_GEMMA = re.compile(
    r"(?:<start_function_call>|<\|tool_call>)call:([\w.-]+)\{(.*?)\}"
    r"(?:<end_function_call>|<tool_call\|>|$)",
    re.DOTALL,
)
_GEMMA_TEXT = re.compile(r'(?:<escape>|<\|"\|>)(.*?)(?:<escape>|<\|"\|>)', re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")


def parse_gemma(text: str, schemas: Schemas) -> list[Call]:
    """FunctionGemma and Gemma 4: call:NAME{key:value}; texts are between escape tokens."""
    calls: list[Call] = []
    for name, body in _GEMMA.findall(text):
        texts: list[str] = []

        def stash(match: re.Match[str], texts: list[str] = texts) -> str:
            texts.append(match[1])
            return f'"\0{len(texts) - 1}"'

        plain = _GEMMA_KEY.sub(r'\1"\2":', "{" + _GEMMA_TEXT.sub(stash, body) + "}")
        for number, value in enumerate(texts):
            plain = plain.replace(f'"\0{number}"', json.dumps(value))
        calls.append(named_call(name, plain))
    return calls


_PYTHON_BLOCK = re.compile(r"```(?:python|py)\s*\n(.*?)```", re.DOTALL)


def parse_python_blocks(text: str, schemas: Schemas) -> list[Call]:
    """Fenced Python: every block is a program of the tool `python`."""
    return [Call("python", {"program": body}) for body in _PYTHON_BLOCK.findall(text)]


PARSERS: dict[str, Parser] = {
    "hermes": parse_hermes,
    "fenced": parse_fenced,
    "qwen3_coder": parse_qwen3_coder,
    "llama3": parse_llama3,
    "gpt_oss": parse_gpt_oss,
    "glm": parse_glm,
    "deepseek": parse_deepseek,
    "gemma": parse_gemma,
    "python_blocks": parse_python_blocks,
}
# What only the chat template of this format contains; the first that occurs counts.
MARKERS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm"),
    ("tool▁call▁begin", "deepseek"),
    ("to=functions.", "gpt_oss"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call>", "gemma"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ("<|start_header_id|>ipython", "llama3"),
)
FORMATS = ("auto", *PARSERS)


# How a call starts, in any format.
_STARTS = (
    "<tool_call>",
    "<function=",
    "<|python_tag|>",
    "<|start|>assistant to=",
    "<|channel|>commentary to=",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<start_function_call>",
    "<|tool_call>",
    "```",
    "{",
)


def text_before_calls(text: str) -> str:
    """Return the text of a turn before its first call."""
    starts = [text.find(start) for start in _STARTS]
    return text[: min((start for start in starts if start >= 0), default=len(text))].strip()


class CallParser:
    """Finds the tool calls of a turn.

    Args:
        name: a format, or `auto`: the tokenizer's own response template if it has one, else the
            format that the chat template shows.
        tokenizer: the tokenizer of the model.
        schemas: the tools.
    """

    def __init__(self, name: str, tokenizer: Any, schemas: Schemas) -> None:
        self.tokenizer = tokenizer
        self.schemas = schemas
        self.uses_template = name == "auto" and bool(getattr(tokenizer, "response_template", None))
        self.name = detect_format(str(tokenizer.chat_template)) if name == "auto" else name
        model = str(tokenizer.name_or_path).lower()
        accepts_fenced = name == "auto" and any(known in model for known in FENCED_MODELS)
        self.fallback = "fenced" if accepts_fenced and self.name != "fenced" else ""

    def parse(self, text: str) -> list[Call]:
        """Return the calls of a turn, in order. Text up to a closing </think> holds no calls."""
        if self.uses_template:
            return self._parse_by_template(text)
        answer = text.rpartition(THOUGHT_END)[2]
        calls = PARSERS[self.name](answer, self.schemas)
        if not calls and self.fallback:
            return PARSERS[self.fallback](answer, self.schemas)
        return calls

    def _parse_by_template(self, text: str) -> list[Call]:
        try:
            message = self.tokenizer.parse_response(text, prefix="", tools=list(self.schemas))
        except Exception:  # sampled text in a parser of transformers: a mistake of the policy
            return [Call(mistake="the call cannot be read")]
        calls: list[Call] = []
        for item in message.get("tool_calls") or []:
            function = item.get("function", item)
            arguments = function.get("arguments")
            name = function.get("name")
            if isinstance(arguments, str):
                calls.append(named_call(str(name), arguments))
            elif not isinstance(arguments, dict) or not isinstance(name, str):
                calls.append(Call(mistake=UNREADABLE))
            elif _is_too_deep(arguments):
                calls.append(Call(mistake=f"the arguments of {name} are nested too deeply"))
            else:
                calls.append(Call(name, arguments))
        return calls


def detect_format(template: str) -> str:
    """Return the format of calls that a chat template shows; hermes if it shows none."""
    for marker, name in MARKERS:
        if marker in template:
            return name
    return "hermes"
