"""SFT on conversations: its loss over the assistant's turns against the stock model's log-probs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from jsonl import write_jsonl
from refused import refused
from tiny_runs import NoteReporter, config_of, metrics_of, stock_model, stock_row
from transformers import AutoTokenizer

from postgrad.cluster.host import build_host
from postgrad.data.encode.encoder import Encoder
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import Batch, Problem, Trajectory

# Of characters in the tiny model's vocabulary: (user) and =assistant with EOS.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}({{ m.content }}){% else %}={{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
# The same without what stands before a star in earlier assistant turns, as thinking is removed.
FORGETFUL = TEMPLATE.replace(
    "={{ m.content }}", "={{ m.content if loop.last else m.content.split('*')[-1] }}"
)
CONVERSATIONS = [
    [("user", "1+1"), ("assistant", "1*2"), ("user", "2+2"), ("assistant", "4")],
    [("user", "3+4"), ("assistant", "7")],
]


def model_with(template: str, tiny: Path, folder: Path) -> Path:
    """A copy of the tiny model whose tokenizer has a chat template."""
    shutil.copytree(tiny, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(path: Path) -> Path:
    rows = []
    for conversation in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in conversation]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows) + "\n")
    return path


def run(model: Path, tmp_path: Path, *overrides: str) -> tuple[float, list[str]]:
    """(loss of the first step, notes) of one step over all conversations."""
    config = config_of(
        "sft",
        model,
        "data.template=auto",
        f"data.train={write_chats(tmp_path / 'chats.jsonl')}",
        "training.problems_per_step=2",
        "training.steps=1",
        f"runs={tmp_path / 'runs'}",
        *overrides,
    )
    reporter = NoteReporter()
    result = train(config, reporter)
    return metrics_of(result.folder)[0]["sft/loss"], reporter.notes


def expected_loss(model: Path, pieces: list[list[tuple[str, bool]]]) -> float:
    """The mean negative log-prob of the trained characters, by the stock model.

    Args:
        model: the model's folder.
        pieces: per conversation, (text, whether it is trained on); `$` stands for EOS.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    stock = stock_model(model)
    losses: list[float] = []
    for conversation in pieces:
        ids: list[int] = []
        mask: list[bool] = []
        for text, is_trained in conversation:
            new = tokenizer(text.replace("$", tokenizer.eos_token))["input_ids"]
            ids += new
            mask += [is_trained] * len(new)
        logprobs, _ = stock_row(stock, ids[:1], ids[1:])
        for logprob, is_trained in zip(logprobs.tolist(), mask[1:], strict=True):
            if is_trained:
                losses.append(-logprob)
    return sum(losses) / len(losses)


SHORT = [("(3+4)=", False), ("7$", True)]


def test_loss_is_over_every_assistant_turn(tiny, tmp_path):
    model = model_with(TEMPLATE, tiny, tmp_path / "model")
    loss, notes = run(model, tmp_path)
    long = [("(1+1)=", False), ("1*2$", True), ("(2+2)=", False), ("4$", True)]
    assert loss == pytest.approx(expected_loss(model, [long, SHORT]), rel=1e-4)
    assert len(notes) == 1 and "messages rows: reads messages" in notes[0]


def test_train_on_last_trains_on_the_last_turn(tiny, tmp_path):
    model = model_with(TEMPLATE, tiny, tmp_path / "model")
    loss, _ = run(model, tmp_path, "method.train_on=last")
    long = [("(1+1)=1*2$(2+2)=", False), ("4$", True)]
    assert loss == pytest.approx(expected_loss(model, [long, SHORT]), rel=1e-4)


def test_rewritten_turns_are_reported_and_trained_as_rendered(tiny, tmp_path):
    model = model_with(FORGETFUL, tiny, tmp_path / "model")
    loss, notes = run(model, tmp_path)
    long = [("(1+1)=", False), ("2$", True), ("(2+2)=", False), ("4$", True)]
    assert loss == pytest.approx(expected_loss(model, [long, SHORT]), rel=1e-4)
    assert len(notes) == 2 and "1 of 2" in notes[1] and "method.train_on=last" in notes[1]


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_turn_end_at_which_the_model_does_not_stop_is_reported(is_declared, tiny, tmp_path):
    """As with a base model whose template ends turns with another token than its texts."""
    model = model_with(TEMPLATE.replace("{{ eos_token }}", "<pad>"), tiny, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    if is_declared:
        ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        file = model / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ends}))
    _, notes = run(model, tmp_path)
    reports = [note for note in notes if "will not stop" in note]
    assert len(reports) == (0 if is_declared else 1)
    assert all("responses end with <pad>, at which" in note for note in reports)
    _, notes = run(model_with(TEMPLATE, tiny, tmp_path / "other"), tmp_path, "name=other")
    assert not any("will not stop" in note for note in notes)


def test_luffy_reports_such_an_end_of_its_demonstrations(tiny, tmp_path):
    model = model_with(TEMPLATE.replace("{{ eos_token }}", "<pad>"), tiny, tmp_path / "model")
    method = find_method("luffy")(config_of("luffy", model))
    prompts = Encoder(AutoTokenizer.from_pretrained(model))
    asked = ({"role": "user", "content": "1+1"},)
    shown = Problem("shown", asked, "2", demonstrations=("2",))
    (note,) = method.data_notes(prompts, [Problem("first", asked, "2"), shown])
    assert "responses end with <pad>, at which" in note
    prompts = Encoder(AutoTokenizer.from_pretrained(tiny), "plain")
    assert method.data_notes(prompts, [shown]) == []


@pytest.mark.parametrize(
    ("column", "labels"),
    [("label", (True, False)), ("label", ("true", "False")), ("kto_tag", (True, False))],
)
def test_responses_with_the_label_false_are_reported(tiny, tmp_path, column, labels):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1+1", "completion": "2", column: label} for label in labels]
    write_jsonl(file, *rows)
    _, notes = run(tiny, tmp_path, f"data.train={file}")
    assert any("1 of 2 responses of data.train have the label false" in note for note in notes)


def test_several_turns_need_a_chat_template(tiny, tmp_path):
    with refused("unsupported", "method.train_on"):
        run(tiny, tmp_path)
    run(tiny, tmp_path, "method.train_on=last")


def test_every_token_of_a_plain_text_counts(tiny, tmp_path):
    """TRL's rows `text`: no template, all tokens but the first, and EOS unless it is there."""
    model = model_with(TEMPLATE, tiny, tmp_path / "model")
    eos = AutoTokenizer.from_pretrained(model).eos_token
    texts = tmp_path / "texts.jsonl"
    rows = [{"text": "90-1=89"}, {"text": f"3*4{eos}"}]
    write_jsonl(texts, *rows)
    loss, notes = run(model, tmp_path, f"data.train={texts}")
    expected = expected_loss(model, [[("90-1=89$", True)], [("3*4$", True)]])
    assert loss == pytest.approx(expected, rel=1e-4)
    without_second = [[("90", False), ("-1=89$", True)], [("3*", False), ("4$", True)]]
    assert expected_loss(model, without_second) != pytest.approx(expected, rel=1e-3)
    assert len(notes) == 2 and "2 of 2 rows" in notes[1] and "every token" in notes[1]
    for wrong in ("method.train_on=last", "data.prompt_style=boxed"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            run(model, tmp_path, f"data.train={texts}", wrong)
    with refused("too_large", "rollout.max_response_tokens"):
        run(model, tmp_path, f"data.train={texts}", "rollout.max_response_tokens=3", "name=short")


def test_texts_and_conversations_in_one_file_of_several(tiny, tmp_path):
    model = model_with(TEMPLATE, tiny, tmp_path / "model")
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "1+1"}\n')
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"prompt": "3+4", "completion": "7"}\n')
    loss, _ = run(model, tmp_path, f"data.train='{texts},{chat}'")
    expected = expected_loss(model, [[("1+1$", True)], SHORT])
    assert loss == pytest.approx(expected, rel=1e-4)


def test_packed_rows_do_not_see_each_other(tiny):
    """Two documents in one pass: another first one changes no log-prob of the second."""
    policy = build_host(config_of("sft", tiny)).policy
    second = Trajectory("b", [4, 5], [6, 7, 17], group=1)
    results = []
    for first in ([1, 2, 3, 17], [9, 9, 9, 17]):
        batch = Batch.of([Trajectory("a", [8, 8, 8], first, group=0), second])
        assert len(list(policy.micro_batches(batch))) == 1, "packed into one pass"
        results.append(policy.logprobs(batch)["logprobs"])
    one, two = results
    assert not torch.allclose(one[:4], two[:4], atol=1e-3)
    torch.testing.assert_close(one[4:], two[4:], rtol=0, atol=1e-6)
    alone = policy.logprobs(Batch.of([second]))["logprobs"]
    torch.testing.assert_close(one[4:], alone, rtol=0, atol=1e-5)


def test_dft_weighs_each_token_by_its_probability(tiny):
    """The gradient of the given log-probs: -p / number of tokens instead of -1 / number."""
    logprobs = torch.tensor([0.5, 0.25, 0.125]).log().requires_grad_()
    batch = Batch.of([Trajectory("a", [1], [2, 3, 17])])
    for loss, expected in (("nll", [-1 / 3] * 3), ("dft", [-1 / 6, -1 / 12, -1 / 24])):
        config = config_of("sft", tiny, f"method.loss={loss}")
        method = find_method("sft")(config)
        current = TokenOutputs(logprobs, torch.zeros(3), torch.zeros(3))
        value = method.objective.loss(method.objective.prepare(batch), current, MetricAccumulator())
        (gradient,) = torch.autograd.grad(value, logprobs)
        torch.testing.assert_close(gradient, torch.tensor(expected))


@pytest.mark.slow
def test_dft_learns(tiny, tmp_path):
    config = config_of(
        "dft",
        tiny,
        "training.steps=30",
        "training.problems_per_step=16",
        "optimizer.lr=5e-3",
        "optimizer.warmup_steps=0",
        f"runs={tmp_path}",
    )
    values = [line["sft/probability"] for line in metrics_of(train(config, Reporter()).folder)]
    assert sum(values[-3:]) / 3 > 0.2 + values[0], values
