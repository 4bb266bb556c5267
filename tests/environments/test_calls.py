"""Tool calls as models write them: what a chat template renders is read back, in every format."""

from pathlib import Path

import pytest
from tool_model import PLAIN_CHAT, chat_tokenizer

from postgrad.environments.calls import FORMATS, Call, CallParser, detect_format

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}},
]
CALLS = [
    Call("search", {"query": 'a "b", {c}\nline 2', "limit": 3, "exact": True, "tags": ["x", "y"]}),
    Call("search", {"query": "42"}),  # a text that looks like a number
    Call("now", {}),
]

# The parts of the models' chat templates that write calls.
FOLDER = Path(__file__).with_name("call_templates")
TEMPLATES = {file.stem: file.read_text() for file in sorted(FOLDER.iterdir())}


def tokenizer_of(source: str, name: str = "some/model"):
    tokenizer = chat_tokenizer("abc", source)
    tokenizer.name_or_path = name
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_back(name):
    tokenizer = tokenizer_of(TEMPLATES[name])
    tool_calls = [{"function": {"name": c.name, "arguments": c.arguments}} for c in CALLS]
    message = {"role": "assistant", "content": None, "tool_calls": tool_calls}
    text = tokenizer.apply_chat_template([message], tokenize=False)
    parser = CallParser("auto", tokenizer, SCHEMAS)
    assert parser.name == name, "the format is found in the template"
    assert parser.parse(text) == CALLS
    assert parser.parse(f"<think>{text}</think>It is noon.") == [], "a thought calls nobody"
    assert parser.parse("It is noon.") == []


def test_deepseek_v31_writes_no_fence():
    text = '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    assert CallParser("deepseek", tokenizer_of(""), ()).parse(text) == [Call("now", {"a": 1})]


def test_gpt_oss_may_name_the_channel_first():
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    assert CallParser("gpt_oss", tokenizer_of(""), ()).parse(text) == [Call("now", {"a": 1})]


def test_gemma_4_has_other_tokens():
    text = '<|tool_call>call:search{query:<|"|>a, b: c<|"|>,limit:2}<tool_call|>'
    found = CallParser("gemma", tokenizer_of(""), SCHEMAS).parse(text)
    assert found == [Call("search", {"query": "a, b: c", "limit": 2})]


FENCED = 'I search.\n```json\n{"name": "search", "arguments": {"query": "x"}}\n```\n'


def test_fenced_json_is_a_call_for_models_that_write_it():
    coder = tokenizer_of(TEMPLATES["hermes"], "Qwen/Qwen2.5-Coder-1.5B-Instruct")
    assert CallParser("auto", coder, SCHEMAS).parse(FENCED) == [Call("search", {"query": "x"})]
    example = '```json\n{"name": "Ada", "age": 36}\n```'
    assert CallParser("auto", coder, SCHEMAS).parse(example) == [], "no tool has this name"
    other = tokenizer_of(TEMPLATES["hermes"])
    assert CallParser("auto", other, SCHEMAS).parse(FENCED) == []
    assert CallParser("fenced", other, SCHEMAS).parse(FENCED) != []


def test_fenced_python_is_a_program():
    text = "First:\n```python\nprint(1)\n```\nthen\n```py\nprint(2)\n```"
    found = CallParser("python_blocks", tokenizer_of(""), SCHEMAS).parse(text)
    assert [call.arguments["program"] for call in found] == ["print(1)\n", "print(2)\n"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>{</tool_call>"),
        ("llama3", '{"name": "x", "parameters": {'),
        ("gpt_oss", "to=functions.x<|channel|>commentary json<|message|>{<|call|>"),
        ("deepseek", "<｜tool▁call▁begin｜>x<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
        ("gemma", "<start_function_call>call:x{a:}<end_function_call>"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_mistake(name, text):
    (call,) = CallParser(name, tokenizer_of(""), SCHEMAS).parse(text)
    assert call.mistake and not call.name


@pytest.mark.parametrize("depth", [200, 993, 5000])
def test_arguments_that_are_nested_too_deeply_do_not_end_the_run(depth):
    value = "[" * depth + "]" * depth
    tokenizer = tokenizer_of(PLAIN_CHAT)
    plain = f"<function=search><parameter=tags>{value}</parameter></function>"
    (call,) = CallParser("qwen3_coder", tokenizer, SCHEMAS).parse(plain)
    assert call == Call("search", {"tags": value})  # not JSON that can be used: the text
    arguments = f'{{"tags": {value}}}'
    llama = f'{{"name": "search", "parameters": {arguments}}}'
    hermes = f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>'
    for name, text in (("llama3", llama), ("hermes", hermes)):
        (call,) = CallParser(name, tokenizer, SCHEMAS).parse(text)
        assert call.mistake


def test_a_response_template_of_the_tokenizer_comes_first():
    tokenizer = tokenizer_of(PLAIN_CHAT)
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }
    text = '<call>{"name": "search", "arguments": {"query": "x"}}</call>'
    assert CallParser("auto", tokenizer, SCHEMAS).parse(text) == [Call("search", {"query": "x"})]
    assert CallParser("auto", tokenizer, SCHEMAS).parse("no call") == []


def test_every_format_can_be_set():
    from postgrad.config.schema import RolloutConfig

    (field,) = [f for f in RolloutConfig.__dataclass_fields__.values() if f.name == "tool_format"]
    assert field.metadata["choices"] == FORMATS
    assert detect_format(PLAIN_CHAT) == "hermes"
