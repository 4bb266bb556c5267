"""Prompts, with a character tokenizer made here."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from postgrad.data.render import Prompts
from postgrad.errors import ConfigError
from postgrad.problem import Problem

SPECIAL = ["<s>", "</s>", "<|user|>", "<|system|>", "<|assistant|>"]
BOS, EOS, USER_MARK, SYSTEM_MARK, ASSISTANT_MARK = range(5)
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def tokenizer(
    single: str = "<s> $A", chat_template: str | None = None, eos: str | None = "</s>"
) -> PreTrainedTokenizerFast:
    """Each character is a token; `single` says which special tokens the tokenizer adds by itself."""
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
    """The last content is the user's, those before it the system's."""
    roles = ["system"] * (len(contents) - 1) + ["user"]
    return Problem(
        uid, tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=True)), "1"
    )


def test_chat_opens_the_assistants_turn():
    ids = Prompts(tokenizer(chat_template=TURNS), "chat").encode(problem("be kind", "hi"))
    assert ids == [SYSTEM_MARK, *chars("be kind"), USER_MARK, *chars("hi"), ASSISTANT_MARK]


def test_chat_template_that_writes_bos_gets_one_bos():
    ids = Prompts(tokenizer(chat_template="{{ bos_token }}" + TURNS), "chat").encode(problem("hi"))
    assert ids == [BOS, USER_MARK, *chars("hi"), ASSISTANT_MARK]


def test_auto_takes_what_there_is():
    assert Prompts(tokenizer(chat_template=TURNS)).template == "chat"
    assert Prompts(tokenizer()).template == "plain"
    assert Prompts(tokenizer(chat_template=TURNS), "plain").encode(problem("hi")) == [
        BOS,
        *chars("hi"),
    ]


def test_chat_without_a_template():
    with pytest.raises(ConfigError, match=r"has no chat template; use data.template=plain"):
        Prompts(tokenizer(), "chat")


def test_chat_template_that_refuses():
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role\nnot supported') }}{% endif %}"
        + TURNS
    )
    prompts = Prompts(tokenizer(chat_template=template))
    assert prompts.encode(problem("hi"))
    with pytest.raises(
        ConfigError,
        match=r"problem x: the chat template refuses .* roles system, user \(System role not supported\)",
    ):
        prompts.encode(problem("be kind", "hi", uid="x"))


def test_plain_joins_with_blank_lines():
    assert Prompts(tokenizer(), "plain").encode(problem("be kind", "hi")) == [
        BOS,
        *chars("be kind\n\nhi"),
    ]
    assert Prompts(tokenizer(single="$A"), "plain").encode(problem("37+58=")) == chars("37+58=")


def test_plain_text_with_its_own_bos_gets_one_bos():
    assert Prompts(tokenizer(), "plain").encode(problem("<s>hi")) == [BOS, *chars("hi")]


def test_plain_does_not_end_in_an_added_end_token():
    prompts = Prompts(tokenizer(single="<s> $A </s>"), "plain")
    assert prompts.encode(problem("hi")) == [BOS, *chars("hi")]


def test_empty_prompt():
    with pytest.raises(ConfigError, match="problem u: its prompt has no tokens"):
        Prompts(tokenizer(single="$A"), "plain").encode(problem(""))


def test_cache_by_uid_is_used_and_not_confused():
    """Training and validation data may both number their rows 1, 2, 3; and callers may change the list they got."""
    prompts = Prompts(tokenizer(), "plain")
    first = prompts.encode(problem("a", uid="1"))
    first.append(99)
    prompts.tokenizer = None  # type: ignore[assignment]  # a second encoding would fail
    assert prompts.encode(problem("a", uid="1")) == [BOS, *chars("a")]
    prompts.tokenizer = tokenizer()
    assert prompts.encode(problem("b", uid="1")) == [BOS, *chars("b")]


@pytest.mark.parametrize("single", ["$A", "<s> $A", "<s> $A </s>"])
def test_encode_response(single: str):
    prompts = Prompts(tokenizer(single))
    assert prompts.encode_response("590") == [*chars("590"), EOS]
    assert prompts.encode_response("590", with_end=False) == chars("590")
    assert prompts.encode_response("590</s>") == [*chars("590"), EOS]
    assert prompts.encode_response("") == [EOS]


def test_encode_response_without_an_end_token():
    prompts = Prompts(tokenizer(eos=None))
    assert prompts.encode_response("5", with_end=False) == chars("5")
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        prompts.encode_response("5")


def test_decode_skips_special_tokens_and_keeps_spaces():
    text = "a , b 's  end ."
    assert Prompts(tokenizer()).decode([BOS, *chars(text), EOS]) == text


def test_check_keeps_all_that_fit():
    problems = [problem("a" * n, uid=str(n)) for n in range(1, 6)]
    assert Prompts(tokenizer(), "plain", max_prompt_tokens=6).drop_overlong(problems) == (
        problems,
        0,
    )


def test_check_names_count_uid_length_and_fixes():
    problems = [problem("a" * n, uid=f"u{n}") for n in (1, 7, 9, 8)]
    with pytest.raises(ConfigError) as caught:
        Prompts(tokenizer(), "plain", max_prompt_tokens=6).drop_overlong(problems)
    assert str(caught.value) == (
        "3 of 4 prompts are longer than data.max_prompt_tokens=6, the first is u7 with 8 tokens; "
        "set data.max_prompt_tokens=10 or data.overlong=drop"
    )


def test_check_drops_and_counts():
    problems = [problem("a" * n, uid=f"u{n}") for n in (1, 7, 2, 8)]
    kept, dropped = Prompts(
        tokenizer(), "plain", max_prompt_tokens=6, overlong="drop"
    ).drop_overlong(problems)
    assert ([p.uid for p in kept], dropped) == (["u1", "u2"], 2)


def test_check_refuses_to_drop_all():
    with pytest.raises(
        ConfigError, match=r"2 of 2 prompts are longer .*; set data.max_prompt_tokens=5$"
    ):
        Prompts(tokenizer(), "plain", max_prompt_tokens=1, overlong="drop").drop_overlong(
            [problem("aa"), problem("aaaa", uid="v")]
        )


def test_demonstrations_that_do_not_fit_are_refused_or_dropped():
    given = {"l": ("aaaa",), "s": ("a",), "n": ()}
    long, short, none = (
        replace(problem("a", uid=name), demonstrations=texts) for name, texts in given.items()
    )
    careful = Prompts(tokenizer(), "plain", max_prompt_tokens=6)
    with pytest.raises(
        ConfigError,
        match=r"1 of 3 demonstrations are longer than rollout.max_response_tokens=3, the first is l with 5 tokens",
    ):
        careful.drop_overlong_demonstrations([long, short, none], 3)
    assert careful.drop_overlong_demonstrations([long, short, none], 5) == ([long, short, none], 0)
    kept, dropped = Prompts(tokenizer(), "plain", overlong="drop").drop_overlong_demonstrations(
        [long, short, none], 3
    )
    assert kept == [short, none] and dropped == 1


def test_unknown_settings():
    with pytest.raises(ConfigError, match=r"data.template=chatt is unknown; did you mean chat"):
        Prompts(tokenizer(), "chatt")
    with pytest.raises(ConfigError, match=r"data.overlong=dropp is unknown; did you mean drop"):
        Prompts(tokenizer(), overlong="dropp")


def cutting(
    way: str, limit: int, template: str | None = None, single: str = "$A", **options
) -> Prompts:
    return Prompts(tokenizer(single, template), max_prompt_tokens=limit, overlong=way, **options)


@pytest.mark.parametrize(
    ("limit", "left", "middle", "right"),
    [
        (1, "g", "g", "a"),
        (2, "fg", "ag", "ab"),
        (3, "efg", "afg", "abc"),
        (5, "cdefg", "abefg", "abcde"),
        (6, "bcdefg", "abcefg", "abcdef"),
        (7, *["abcdefg"] * 3),
        (8, *["abcdefg"] * 3),
    ],
)
def test_a_long_prompt_is_cut_to_the_token(limit: int, left: str, middle: str, right: str):
    """Of an odd limit the middle keeps one more at the end; a limit that the prompt fits leaves it as it is."""
    for way, text in {"left": left, "middle": middle, "right": right}.items():
        assert cutting(way, limit).encode(problem("abcdefg")) == chars(text), (way, limit)


def test_a_cut_chat_still_opens_the_assistants_turn():
    """Left loses the head of the template, and the middle its middle; right loses the end of the question alone."""
    ask = problem("be kind", "abcdefg")  # 1 + 7 + 1 + 7 + 1 tokens
    assert cutting("left", 6, TURNS).encode(ask) == [*chars("cdefg"), ASSISTANT_MARK]
    assert cutting("left", 10, TURNS).encode(ask) == [
        *chars("d"),
        USER_MARK,
        *chars("abcdefg"),
        ASSISTANT_MARK,
    ]
    assert cutting("middle", 7, TURNS).encode(ask) == [
        SYSTEM_MARK,
        *chars("be"),
        *chars("efg"),
        ASSISTANT_MARK,
    ]
    assert cutting("right", 12, TURNS).encode(ask) == [
        SYSTEM_MARK,
        *chars("be kind"),
        USER_MARK,
        *chars("ab"),
        ASSISTANT_MARK,
    ]
    assert cutting("right", 4, TURNS).encode(ask) == [SYSTEM_MARK, *chars("be"), ASSISTANT_MARK]
    for way in ("left", "middle", "right"):
        assert cutting(way, 17, TURNS).encode(ask) == Prompts(
            tokenizer(chat_template=TURNS)
        ).encode(ask)


def test_a_cut_keeps_the_first_bos():
    assert cutting("left", 4, single="<s> $A").encode(problem("abcdefg")) == [BOS, *chars("efg")]
    assert cutting("left", 4, "{{ bos_token }}" + TURNS).encode(problem("abcdefg")) == [
        BOS,
        *chars("fg"),
        ASSISTANT_MARK,
    ]
    marked = cutting("left", 4, TURNS.replace("<|", "<s><|"))  # a mark of every turn is no BOS
    assert marked.encode(problem("abcdefg")) == [*chars("fg"), BOS, ASSISTANT_MARK]
    assert cutting("middle", 3, single="<s> $A").encode(problem("abcdefg")) == [BOS, *chars("fg")]
    assert cutting("right", 4, single="<s> $A").encode(problem("abcdefg")) == [BOS, *chars("abc")]


def test_a_cut_from_the_right_keeps_what_the_style_writes_after_the_question():
    """The form's last words, the opened thought and the template's end stay; the question loses its end."""
    form = "Question: {question}\nAnswer:"
    prompts = cutting("right", 20)
    prompts.style = replace(prompts.style, form=form, text=True)
    assert prompts.decode_raw(prompts.encode(problem("abcdefghi"))) == "Question: ab\nAnswer:"
    thought = cutting("right", 700, TURNS, style="luffy")
    opened = thought.decode_raw(thought.encode(problem("x" * 500)))
    assert (
        opened.endswith("xx<|assistant|><think>\n")
        and len(thought.encode(problem("x" * 500))) == 700
    )
    given = replace(problem("x" * 500), demonstrations=("<think>\nso",))
    assert thought.encode_demonstrations(given) == [[*chars("so"), EOS]], (
        "the thought is open, as in a whole prompt"
    )


def test_a_prompt_that_is_begun_is_cut_before_its_beginning():
    ids = cutting("left", 4, TURNS).encode_prefilled(problem("abcdefg"), "<", "so", ">")
    assert ids == [*chars("efg"), ASSISTANT_MARK, *chars("<so>")]


@pytest.mark.parametrize(
    ("way", "limit", "least"),
    [("left", 3, 4), ("right", 3, 4), ("middle", 4, 5), ("left", 1, 4), ("right", 1, 4)],
)
def test_a_limit_without_room_for_the_turns_opening_is_refused(way: str, limit: int, least: int):
    """A BOS, the two tokens at the end, and one of the question."""
    template = "{{ bos_token }}" + TURNS + "{{ '>' if add_generation_prompt }}"
    with pytest.raises(ConfigError) as caught:
        cutting(way, limit, template).encode(problem("abcdefg"))
    assert str(caught.value) == (
        f"the prompt of problem u has 11 tokens, data.max_prompt_tokens={limit}: too few to cut it ({way}) around the 2 with which "
        f"it ends; set data.max_prompt_tokens={least} or more"
    )
    assert cutting(way, least, template).encode(problem("abcdefg"))[-2:] == [
        ASSISTANT_MARK,
        *chars(">"),
    ]


def test_check_lets_cut_prompts_pass_and_counts_them():
    problems = [problem("a" * n, uid=f"u{n}") for n in (1, 7, 6, 8)]
    for way in ("left", "middle", "right"):
        prompts = cutting(way, 6)
        assert (
            prompts.drop_overlong(problems) == (problems, 0)
            and prompts.num_truncated(problems) == 2
            and prompts.num_truncated(problems[:1]) == 0
        )
        assert [len(prompts.encode(p)) for p in problems] == [1, 6, 6, 6]
    assert cutting("drop", 6).num_truncated(problems) == 0


def test_demonstrations_are_never_cut():
    long = replace(problem("a"), demonstrations=("aaaa",))
    with pytest.raises(
        ConfigError,
        match=r"1 of 1 demonstrations are longer than rollout.max_response_tokens=3, .* or data.overlong=drop",
    ):
        cutting("left", 6).drop_overlong_demonstrations([long], 3)


def test_pairs_that_do_not_fit_are_refused_or_dropped():
    pairs = [
        replace(problem("a", uid=uid), extra={"chosen": "aa", "rejected": "a" * n})
        for uid, n in (("s", 2), ("l", 3))
    ]
    with pytest.raises(
        ConfigError,
        match=r"1 of 2 pairs are longer than rollout.max_response_tokens=3, the first is l with 4 tokens",
    ):
        cutting("right", 6).drop_overlong_demonstrations(pairs, 3)
    assert cutting("drop", 6).drop_overlong_demonstrations(pairs, 3) == (pairs[:1], 1)


def test_prompts_with_tools_are_not_cut():
    """Their schemas are part of the prompt."""
    schema = {
        "type": "function",
        "function": {"name": "look", "description": "x", "parameters": {}},
    }
    template = TURNS.replace("<|{{ m.role }}|>", "<|{{ 'user' if m.role == 'tool' else m.role }}|>")
    for way in ("left", "middle", "right"):
        prompts = cutting(way, 50, template, tools=[schema])
        with pytest.raises(
            ConfigError,
            match=rf"data\.overlong={way} would cut into the schemas of rollout\.tools; .* data\.overlong=drop$",
        ):
            prompts.drop_overlong([problem("hi")])
        assert cutting(way, 5000, template, tools=[schema]).drop_overlong([problem("hi")])[1] == 0
