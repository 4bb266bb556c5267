"""Encoder, with a character-level tokenizer."""

from dataclasses import replace

import pytest
from refused import refused
from tables import tabled
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from postgrad.data.encode.encoder import Encoder
from postgrad.problem import Problem

SPECIAL = ["<s>", "</s>", "<|user|>", "<|system|>", "<|assistant|>"]
BOS, EOS, USER_MARK, SYSTEM_MARK, ASSISTANT_MARK = range(5)
TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(
    single: str = "<s> $A", chat_template: str | None = None, eos: str | None = "</s>"
) -> PreTrainedTokenizerFast:
    """One token per character; `single` says which special tokens the tokenizer adds itself."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *map(chr, range(32, 127)), "\n"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token=eos,
        additional_special_tokens=SPECIAL[2:],
    )
    made.chat_template = chat_template
    return made


def chars(text: str) -> list[int]:
    return [len(SPECIAL) + (95 if c == "\n" else ord(c) - 32) for c in text]


def problem(*contents: str, uid: str = "u") -> Problem:
    """A problem whose last content is the user's; those before it are the system's."""
    roles = ["system"] * (len(contents) - 1) + ["user"]
    pairs = zip(roles, contents, strict=True)
    return Problem(uid, tuple({"role": r, "content": c} for r, c in pairs), "1")


def test_chat_opens_the_assistants_turn():
    ids = Encoder(tokenizer(chat_template=TURNS), "chat").prompt(problem("be kind", "hi"))
    assert ids == [SYSTEM_MARK, *chars("be kind"), USER_MARK, *chars("hi"), ASSISTANT_MARK]


def test_chat_template_that_writes_bos_gets_one_bos():
    ids = Encoder(tokenizer(chat_template="{{ bos_token }}" + TURNS), "chat").prompt(problem("hi"))
    assert ids == [BOS, USER_MARK, *chars("hi"), ASSISTANT_MARK]


def test_auto_uses_the_chat_template_if_there_is_one():
    assert Encoder(tokenizer(chat_template=TURNS)).template == "chat"
    assert Encoder(tokenizer()).template == "plain"
    plain = Encoder(tokenizer(chat_template=TURNS), "plain")
    assert plain.prompt(problem("hi")) == [BOS, *chars("hi")]


def test_chat_without_a_template():
    with refused("unsupported", "data.template"):
        Encoder(tokenizer(), "chat")


def test_messages_that_the_chat_template_refuses():
    template = (
        "{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role\nnot supported') }}{% endif %}" + TURNS
    )
    prompts = Encoder(tokenizer(chat_template=template))
    assert prompts.prompt(problem("hi"))
    with refused("unsupported", "messages", shows="system, user"):
        prompts.prompt(problem("be kind", "hi", uid="x"))


def test_plain_joins_with_blank_lines():
    plain = Encoder(tokenizer(), "plain")
    assert plain.prompt(problem("be kind", "hi")) == [BOS, *chars("be kind\n\nhi")]
    assert Encoder(tokenizer(single="$A"), "plain").prompt(problem("37+58=")) == chars("37+58=")
    assert plain.prompt(problem("<s>hi")) == [BOS, *chars("hi")], "one BOS"
    with_end = Encoder(tokenizer(single="<s> $A </s>"), "plain")
    assert with_end.prompt(problem("hi")) == [BOS, *chars("hi")], "no added end"


def test_empty_prompt():
    with refused("missing", "prompt", shows="problem u"):
        Encoder(tokenizer(single="$A"), "plain").prompt(problem(""))


def test_cache_by_uid_is_used_and_not_confused():
    """Two data sets may have the same uids; callers may change the list that they got."""
    prompts = Encoder(tokenizer(), "plain")
    first = prompts.prompt(problem("a", uid="1"))
    first.append(99)
    prompts.tokenizer = None  # type: ignore[assignment]  # a second encoding would fail
    assert prompts.prompt(problem("a", uid="1")) == [BOS, *chars("a")]
    prompts.tokenizer = tokenizer()
    assert prompts.prompt(problem("b", uid="1")) == [BOS, *chars("b")]


@pytest.mark.parametrize("single", ["$A", "<s> $A", "<s> $A </s>"])
def test_encode_response(single: str):
    prompts = Encoder(tokenizer(single))
    assert prompts.encode_response("590") == [*chars("590"), EOS]
    assert prompts.encode_response("590", with_end=False) == chars("590")
    assert prompts.encode_response("590</s>") == [*chars("590"), EOS]
    assert prompts.encode_response("") == [EOS]


def test_encode_response_without_an_end_token():
    prompts = Encoder(tokenizer(eos=None))
    assert prompts.encode_response("5", with_end=False) == chars("5")
    with refused("missing", "eos_token"):
        prompts.encode_response("5")


def test_decode_skips_special_tokens_and_keeps_spaces():
    text = "a , b 's  end ."
    assert Encoder(tokenizer()).decode([BOS, *chars(text), EOS]) == text


def test_overlong_error_names_count_uid_length_and_settings():
    problems = [problem("a" * n, uid=f"u{n}") for n in (1, 7, 9, 8)]
    with refused("too_large", "data.max_prompt_tokens") as caught:
        Encoder(tokenizer(), "plain", max_prompt_tokens=6).fit(problems)
    message = str(caught.value)
    for part in ("3 of 4", "u7", "8 tokens", "data.max_prompt_tokens=10", "data.overlong=drop"):
        assert part in message


def test_overlong_prompts_are_dropped_but_not_all():
    problems = [problem("a" * n, uid=f"u{n}") for n in (1, 7, 2, 8)]
    encoder = Encoder(tokenizer(), "plain", max_prompt_tokens=6, overlong="drop")
    assert encoder.fit(problems) == ([problems[0], problems[2]], 0)
    with refused("too_large", "data.max_prompt_tokens", shows="=9$"):
        encoder.fit(problems[1::2])


def test_responses_that_do_not_fit_are_refused_or_dropped_and_never_truncated():
    """A demonstration, the longer response of a pair, and a problem without a response."""
    long, short, none = (replace(problem("a", uid=name)) for name in "lsn")
    long, short = (replace(p, demonstrations=("a" * n,)) for p, n in ((long, 4), (short, 1)))
    pair = replace(problem("a", uid="p"), extra={"chosen": "aa", "rejected": "aaa"})
    problems = [long, short, none, pair]
    for overlong in ("error", "left"):
        careful = Encoder(tokenizer(), "plain", max_prompt_tokens=6, overlong=overlong)
        with refused("too_large", "rollout.max_response_tokens", shows="2 of 4 .*l with 5"):
            careful.fit(problems, careful.reply_row, 3)
        assert careful.fit(problems, careful.reply_row, 5) == (problems, 0)
    dropping = Encoder(tokenizer(), "plain", overlong="drop")
    assert dropping.fit(problems, dropping.reply_row, 3) == ([short, none], 0)


def test_unknown_settings():
    with refused("unknown_name", "data.template"):
        Encoder(tokenizer(), "chatt")
    with refused("unknown_name", "data.overlong"):
        Encoder(tokenizer(), overlong="dropp")


def truncating(
    side: str, limit: int, template: str | None = None, single: str = "$A", **options
) -> Encoder:
    return Encoder(tokenizer(single, template), max_prompt_tokens=limit, overlong=side, **options)


@tabled("limit, left, middle, right")
def test_long_prompt_is_truncated_to_the_limit(limit: int, left: str, middle: str, right: str):
    """With an odd limit, `middle` keeps one more token at the end."""
    for side, text in {"left": left, "middle": middle, "right": right}.items():
        assert truncating(side, limit).prompt(problem("abcdefg")) == chars(text), (side, limit)


def test_truncated_chat_keeps_the_start_of_the_assistant_turn():
    """Left loses the template's head; right loses the end of the question only."""
    ask = problem("be kind", "abcdefg")  # 1 + 7 + 1 + 7 + 1 tokens
    kind = [SYSTEM_MARK, *chars("be kind")]
    whole = [*kind, USER_MARK, *chars("abcdefg"), ASSISTANT_MARK]
    for side, limit, kept in (
        ("left", 6, [*chars("cdefg"), ASSISTANT_MARK]),
        ("left", 10, [*chars("d"), USER_MARK, *chars("abcdefg"), ASSISTANT_MARK]),
        ("middle", 7, [SYSTEM_MARK, *chars("be"), *chars("efg"), ASSISTANT_MARK]),
        ("right", 12, [*kind, USER_MARK, *chars("ab"), ASSISTANT_MARK]),
        ("right", 4, [SYSTEM_MARK, *chars("be"), ASSISTANT_MARK]),
        *((side, 17, whole) for side in ("left", "middle", "right")),
    ):
        assert truncating(side, limit, TURNS).prompt(ask) == kept, (side, limit)


def test_truncation_keeps_the_first_bos():
    ask = problem("abcdefg")
    for side, limit, text in (("left", 4, "efg"), ("middle", 3, "fg"), ("right", 4, "abc")):
        assert truncating(side, limit, single="<s> $A").prompt(ask) == [BOS, *chars(text)]
    with_bos = truncating("left", 4, "{{ bos_token }}" + TURNS)
    assert with_bos.prompt(ask) == [BOS, *chars("fg"), ASSISTANT_MARK]
    marked = truncating("left", 4, TURNS.replace("<|", "<s><|"))  # one of every turn is no BOS
    assert marked.prompt(ask) == [*chars("fg"), BOS, ASSISTANT_MARK]


def test_right_truncation_keeps_the_text_after_the_question():
    """The style's closing text and the opened thought stay; the question loses its end."""
    form = "Question: {question}\nAnswer:"
    prompts = truncating("right", 20)
    prompts.style = replace(prompts.style, form=form, text=True)
    assert prompts.decode_raw(prompts.prompt(problem("abcdefghi"))) == "Question: ab\nAnswer:"
    thought = truncating("right", 700, TURNS, style="luffy")
    opened = thought.decode_raw(thought.prompt(problem("x" * 500)))
    assert opened.endswith("xx<|assistant|><think>\n")
    assert len(thought.prompt(problem("x" * 500))) == 700
    given = replace(problem("x" * 500), demonstrations=("<think>\nso",))
    assert thought.demonstrations(given) == [[*chars("so"), EOS]]


def test_prefilled_prompt_is_truncated_before_its_prefill():
    ids = truncating("left", 4, TURNS).encode_prefilled(problem("abcdefg"), "<", "so", ">")
    assert ids == [*chars("efg"), ASSISTANT_MARK, *chars("<so>")]


@pytest.mark.parametrize(
    ("side", "limit", "least"),
    [("left", 3, 4), ("right", 3, 4), ("middle", 4, 5), ("left", 1, 4), ("right", 1, 4)],
)
def test_limit_too_small_for_the_turns_opening_is_refused(side: str, limit: int, least: int):
    """The least limit keeps BOS, two tokens at the end, and one of the question."""
    template = "{{ bos_token }}" + TURNS + "{{ '>' if add_generation_prompt }}"
    with refused("too_large", "data.max_prompt_tokens") as caught:
        truncating(side, limit, template).prompt(problem("abcdefg"))
    message = str(caught.value)
    for part in ("problem u", "11 tokens", f"({side})", f"data.max_prompt_tokens={least} "):
        assert part in message
    ids = truncating(side, least, template).prompt(problem("abcdefg"))
    assert ids[-2:] == [ASSISTANT_MARK, *chars(">")]


def test_truncated_prompts_fit_and_are_counted():
    problems = [problem("a" * n, uid=f"u{n}") for n in (1, 7, 6, 8)]
    for side in ("left", "middle", "right"):
        prompts = truncating(side, 6)
        assert prompts.fit(problems) == (problems, 2)
        assert prompts.fit(problems[:1]) == (problems[:1], 0)
        assert [len(prompts.prompt(p)) for p in problems] == [1, 6, 6, 6]


def test_prompts_with_tools_are_not_truncated():
    """The tools' schemas are part of the prompt."""
    schema = {
        "type": "function",
        "function": {"name": "look", "description": "x", "parameters": {}},
    }
    template = TURNS.replace("<|{{ m.role }}|>", "<|{{ 'user' if m.role == 'tool' else m.role }}|>")
    for side in ("left", "middle", "right"):
        prompts = truncating(side, 50, template, tools=[schema])
        with refused("conflict", "data.overlong", shows=f"={side} "):
            prompts.fit([problem("hi")])
        assert truncating(side, 5000, template, tools=[schema]).fit([problem("hi")])[1] == 0
