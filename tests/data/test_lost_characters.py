"""Letters that a tokenizer does not know are reported; other forms of a letter are not."""

import pytest
from tiny_runs import config_of

from postgrad.data.lost_characters import describe_lost_characters, lost_characters
from postgrad.data.render import Prompts
from postgrad.model.load import load_tokenizer
from postgrad.problem import Problem
from postgrad.training.prepare import load_inputs, make_method


@pytest.mark.parametrize(
    ("text", "decoded", "lost"),
    [
        ("Add 2+2=", "2+2=", ["A", "d"]),
        ("Hello Wörld", "hello world", []),
        ("x² ½ ﬁn", "x2 1⁄2 fin", []),
        ("你好 ok", "你 ok", ["好"]),
        ("a - b!", "ab", []),
    ],
)
def test_what_is_lost(text, decoded, lost):
    assert lost_characters(text, decoded) == lost


def test_a_padding_token_of_the_chat_template_is_no_loss(tiny):
    tokenizer = load_tokenizer(config_of("grpo", tiny).model)
    tokenizer.add_special_tokens({"pad_token": "<|im_end|>"})
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    )
    problems = [Problem("p", ({"role": "user", "content": text},), "") for text in ("1+1=", "x1")]
    prompts = Prompts(tokenizer, "chat")
    assert describe_lost_characters(prompts, problems[:1]) == ""
    assert "1 letters or digits (x)" in describe_lost_characters(prompts, problems)


@pytest.mark.parametrize("prompt", ["What is 2+2=", "2+2="])
def test_a_run_reports_prompts_that_the_model_does_not_see(tiny, tmp_path, prompt):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"prompt": "{prompt}", "ground_truth": "4"}}\n')
    overrides = [f"data.train={file}", "reward.verifier=exact", "training.problems_per_step=1"]
    method = make_method(config_of("grpo", tiny, *overrides))
    inputs = load_inputs(method.config, method)
    notes = [note for note in inputs.notes if "does not know" in note]
    assert bool(notes) == ("What" in prompt)
    if notes:
        assert "6 letters or digits (W h a t i ...) in 1 of the first 1 prompts" in notes[0]
