"""The CS336 functions on text: generations, packing, parsing, DPO, rewards."""

import gzip
import json
import math
import re
import string
from pathlib import Path

import pytest
import torch
from letter_tokenizer import gpt2, letters_tokenizer
from refused import refused
from tables import tabled
from transformers import PreTrainedTokenizerFast

from postgrad import toolkit
from postgrad.errors import ConfigError
from postgrad.toolkit import generations, rewards, supplement

INTRO = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
)


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    return letters_tokenizer()


def no_reward(response: str, truth: str) -> dict[str, float]:
    return {"reward": 0.0}


# ---- generations


def test_generations_have_rewards_lengths_and_means(letters, monkeypatch):
    model = gpt2(2, letters).train()  # answers with 1, 2 and 7 tokens
    prompts = ["ab", "a much longer one", "xyz"]
    truths = ["0", "1", "1"]

    def reward(response, truth):
        return {"reward": 0.5 * float(truth), "format_reward": 1.0, "answer_reward": float(truth)}

    greedy = {"do_sample": False, "max_new_tokens": 7}
    out = toolkit.log_generations(model, letters, prompts, truths, reward, greedy)
    assert model.training  # the previous mode is restored
    assert [e["prompt"] for e in out["examples"]] == prompts
    assert [e["ground_truth"] for e in out["examples"]] == truths
    assert (out["avg_reward"], out["avg_format_reward"]) == (pytest.approx(1 / 3), 1.0)
    assert out["avg_answer_reward"] == pytest.approx(2 / 3)
    lengths = [e["response_length"] for e in out["examples"]]
    assert lengths == [1, 2, 7]
    assert out["avg_response_length/total"] == pytest.approx(sum(lengths) / 3)
    assert out["avg_response_length/incorrect"] == lengths[0]
    assert out["avg_response_length/correct"] == sum(lengths[1:]) / 2
    assert out["avg_token_entropy"] == pytest.approx(
        sum(e["avg_token_entropy"] for e in out["examples"]) / 3
    )
    model.eval()
    for example in out["examples"]:
        check_against_single_row(model, letters, example)
    alone = toolkit.log_generations(
        model, letters, prompts, ["1"] * 3, reward, greedy, max_prompts=1
    )
    assert len(alone["examples"]) == 1
    assert alone["avg_response_length/incorrect"] == 0.0
    assert not model.training


def check_against_single_row(model, tokenizer, example):
    """Compares with a slow reference: one row, no padding, one forward pass."""
    prompt = torch.tensor([tokenizer(example["prompt"])["input_ids"]])
    settings = {"do_sample": False, "max_new_tokens": 7, "pad_token_id": 0}
    full = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    new = full.shape[1] - prompt.shape[1]
    entropy = torch.distributions.Categorical(
        logits=model(full).logits[0, prompt.shape[1] - 1 : -1]
    ).entropy()
    assert example["response_length"] == new
    assert example["avg_token_entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert example["response"] == tokenizer.decode(
        full[0, prompt.shape[1] :], skip_special_tokens=True
    )


def test_response_mask_ends_at_the_first_end_token():
    ids = torch.tensor([[5, 9, 9, 0], [5, 6, 7, 8], [9, 1, 2, 3], [5, 8, 0, 0]])
    rows = generations._response_mask(ids, torch.tensor([9, 8]), pad=0).int().tolist()
    assert rows == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    without_end = torch.tensor([[5, 0, 0], [5, 6, 7]])  # a stop string ended the first row
    rows = generations._response_mask(without_end, torch.tensor([9]), pad=0).int().tolist()
    assert rows == [[1, 0, 0], [1, 1, 1]]
    pad_is_end = torch.tensor([[5, 9, 9], [5, 6, 7]])
    rows = generations._response_mask(pad_is_end, torch.tensor([9]), pad=9).int().tolist()
    assert rows == [[1, 1, 0], [1, 1, 1]]


def test_default_sampling_has_no_top_p_or_top_k(letters, monkeypatch):
    model = gpt2(3, letters)
    generate_kwargs = {}

    def generate(**settings):
        generate_kwargs.update(settings)
        return torch.cat([settings["input_ids"], torch.tensor([[letters.eos_token_id]])], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    out = toolkit.log_generations(model, letters, ["ab"], ["x"], lambda *_: {"reward": 1.0})
    assert out["examples"][0]["response"] == "" and out["examples"][0]["response_length"] == 1
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    sampling["max_new_tokens"] = 1024
    assert {key: generate_kwargs[key] for key in sampling} == sampling
    given = {"do_sample": False, "max_new_tokens": 3}
    toolkit.log_generations(model, letters, ["ab"], ["x"], no_reward, given)
    assert {key: generate_kwargs[key] for key in given} == given
    with pytest.raises(ValueError, match="2 prompts for 1 ground truths"):
        toolkit.log_generations(model, letters, ["a", "b"], ["x"], no_reward)
    with pytest.raises(ValueError, match="no prompts"):
        toolkit.log_generations(model, letters, [], [], no_reward)


def test_training_mode_is_restored_after_a_failure(letters, monkeypatch):
    model = gpt2(3, letters).train()
    monkeypatch.setattr(model, "generate", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        toolkit.log_generations(model, letters, ["ab"], ["x"], no_reward)
    assert model.training


# ---- packing


def documents() -> list[dict[str, str]]:
    """Returns five documents whose Alpaca texts have 2431 tokens, BOS and end included."""
    rows = [{"prompt": f"task {i} {{x}}", "response": "yes\n" * (i + 1)} for i in range(5)]
    template_length = len(f"{INTRO}\n\n### Instruction:\n\n\n### Response:\n") + 2
    lengths = [template_length + len(row["prompt"]) + len(row["response"]) for row in rows]
    rows[-1]["response"] += "z" * (2431 - sum(lengths))
    return rows


@pytest.fixture
def jsonl(tmp_path) -> Path:
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in documents()))
    return path


def corpus(tokenizer) -> list[int]:
    """Returns the ids of all documents, concatenated in file order."""
    ids = []
    for row in documents():
        text = f"{INTRO}\n\n### Instruction:\n{row['prompt']}\n\n### Response:\n{row['response']}"
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    return ids


def test_five_documents_give_75_rows_of_32_tokens(letters, jsonl):
    dataset = toolkit.get_packed_sft_dataset(
        tokenizer=letters, dataset_path=jsonl, seq_length=32, shuffle=False
    )
    stream = corpus(letters)
    assert len(stream) == 2431 and len(dataset) == 75
    rows = list(dataset)  # plain iteration ends at the IndexError
    assert len(rows) == 75 and all(set(row) == {"input_ids", "labels"} for row in rows)
    assert all(v.shape == (32,) and v.dtype == torch.int64 for row in rows for v in row.values())
    assert [i for row in rows for i in row["input_ids"].tolist()] == stream[:2400]
    assert [i for row in rows for i in row["labels"].tolist()] == stream[1:2401]
    assert rows[3]["labels"][-1] == rows[4]["input_ids"][0]
    assert torch.equal(dataset[-1]["labels"], rows[74]["labels"])
    for index in (75, -76):
        with pytest.raises(IndexError):
            dataset[index]
    assert len(toolkit.PackedSftDataset(letters, str(jsonl), 2430, False)) == 1
    assert len(toolkit.PackedSftDataset(letters, str(jsonl), 2431, False)) == 0


def test_no_newline_follows_the_response(letters, tmp_path):
    assert (
        supplement.alpaca("Say {hi}", "hi")
        == f"{INTRO}\n\n### Instruction:\nSay {{hi}}\n\n### Response:\nhi"
    )
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"prompt": "a", "response": "b"}))
    tokens = toolkit.PackedSftDataset(letters, file, 4, False).tokens.tolist()
    assert tokens[0] == letters.bos_token_id
    assert tokens[-2:] == [string.printable.index("b"), letters.eos_token_id]


def test_shuffle_permutes_documents(letters, jsonl):
    stream = corpus(letters)
    torch.manual_seed(1)
    first = toolkit.PackedSftDataset(letters, jsonl, 32, True).tokens.tolist()
    torch.manual_seed(1)
    second = toolkit.PackedSftDataset(letters, jsonl, 32, True).tokens.tolist()
    assert first == second != stream
    assert sorted(split(first, letters)) == sorted(split(stream, letters))


def split(tokens, tokenizer) -> list[list[int]]:
    """Returns the documents of a token stream; each ends with its end token."""
    parts = [[]]
    for token in tokens:
        parts[-1].append(token)
        if token == tokenizer.eos_token_id:
            parts.append([])
    return parts


def test_packed_dataset_reads_gzip_and_refuses_bad_input(letters, jsonl, tmp_path):
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl.read_bytes()))
    assert toolkit.PackedSftDataset(letters, packed, 32, False).tokens.tolist() == corpus(letters)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="line 2: prompt or response"):
        toolkit.PackedSftDataset(letters, bad, 32, False)
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        toolkit.PackedSftDataset(letters, tmp_path / "none.jsonl", 32, False)
    with pytest.raises(ValueError, match="seq_length"):
        toolkit.PackedSftDataset(letters, jsonl, 0, False)
    bare = PreTrainedTokenizerFast(tokenizer_object=letters.backend_tokenizer)
    with refused("missing", "eos_token"):
        toolkit.PackedSftDataset(bare, jsonl, 32, False)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_cover_one_epoch(letters, jsonl, shuffle):
    dataset = toolkit.PackedSftDataset(letters, jsonl, 32, False)
    torch.manual_seed(0)
    batches = toolkit.iterate_batches(dataset=dataset, batch_size=8, shuffle=shuffle)
    assert len(batches) == math.ceil(75 / 8) == 10
    input_ids = [batch["input_ids"] for batch in batches]
    assert [len(rows) for rows in input_ids] == [8] * 9 + [3]
    assert input_ids[0].dtype == torch.int64
    assert input_ids[0].shape == (8, 32)
    rows = torch.cat(input_ids).tolist()
    plain = [row["input_ids"].tolist() for row in dataset]
    assert sorted(rows) == sorted(plain) and (rows == plain) == (not shuffle)


# ---- parsing


MMLU = {
    "subject": "virology",
    "question": "How many?",
    "options": ["100", "1", "10", "unknown"],
    "answer": "A",
}


@tabled("text, letter")
def test_mmlu_answer_is_parsed(text, letter):
    assert toolkit.parse_mmlu_response(mmlu_example=MMLU, model_output=text) == letter


@tabled("text, answer")
def test_gsm8k_answer_is_parsed(text, answer):
    assert toolkit.parse_gsm8k_response(model_output=text) == answer


# ---- preference


def log_prob(model, tokenizer, prompt, response) -> float:
    """Slow reference: the log-prob of the Alpaca text and its end token."""
    text = f"{INTRO}\n\n### Instruction:\n{prompt}\n\n### Response:\n{response}"
    ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[1:, None]).double().sum().item()


def test_dpo_of_one_pair(letters):
    lm = gpt2(1, letters)
    ref = gpt2(2, letters)
    pair = {
        "prompt": "The quick brown fox jumps over",
        "response_chosen": "the lazy dog.",
        "response_rejected": "their crazy frog.",
    }
    names = ("response_chosen", "response_rejected")
    swapped = pair | {names[0]: pair[names[1]], names[1]: pair[names[0]]}
    for beta in (0.5, 0.01):
        loss = toolkit.compute_per_instance_dpo_loss(
            lm=lm, lm_ref=ref, tokenizer=letters, beta=beta, **pair
        )
        other = toolkit.compute_per_instance_dpo_loss(lm, ref, letters, beta, **swapped)
        lm_w, lm_l, ref_w, ref_l = (
            log_prob(m, letters, pair["prompt"], pair[key]) for m in (lm, ref) for key in names
        )
        margin = beta * ((lm_w - lm_l) - (ref_w - ref_l))
        assert loss.dim() == 0
        assert loss.item() == pytest.approx(math.log1p(math.exp(-margin)), rel=1e-3)
        assert (other - loss).item() == pytest.approx(margin, rel=1e-3) and abs(margin) > 0.01
    same = toolkit.compute_per_instance_dpo_loss(lm, gpt2(1, letters), letters, 0.5, **pair)
    assert same.item() == pytest.approx(math.log(2), abs=1e-6)


def test_dpo_trains_the_model_and_not_the_reference(letters):
    lm = gpt2(1, letters)
    ref = gpt2(2, letters)
    ref.register_forward_hook(lambda *_: graphs.append(torch.is_grad_enabled()))
    optimizer = torch.optim.SGD(lm.parameters(), lr=1e-3)
    losses = []
    graphs = []
    for _ in range(3):
        loss = toolkit.compute_per_instance_dpo_loss(lm, ref, letters, 0.1, "p", "good", "bad")
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]
    assert graphs == [False] * 6  # two texts per step, without gradient
    assert all(p.grad is None for p in ref.parameters())
    assert all(p.grad is not None for p in lm.parameters())


# ---- rewards of the assignment


@pytest.fixture(autouse=True, scope="module")
def close_verifier_pool():
    yield
    rewards._pool().close()
    rewards._pool.cache_clear()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("response", "classes"),
    [
        ("so </think> <answer>42</answer>", (1, 1, 1)),
        ("so </think> <answer>41</answer>", (1, 0, 0)),
        ("so </think><answer>42</answer>", (0, 1, 0)),  # no space between the tags
        ("so it is 7", (0, 0, 0)),
    ],
)
def test_r1_zero_reward_of_the_four_classes(response, classes, fast):
    result = toolkit.r1_zero_reward_fn(response, "42", fast=fast)
    assert tuple(result[name] for name in ("format_reward", "answer_reward", "reward")) == classes


@pytest.mark.slow
def test_ground_truth_types_and_symbolic_comparison():
    tagged = "</think> <answer>{}</answer>".format
    assert toolkit.r1_zero_reward_fn(tagged("7"), 7)["reward"] == 1
    assert toolkit.r1_zero_reward_fn(tagged("7"), ["6", 7])["reward"] == 1
    assert toolkit.r1_zero_reward_fn(tagged("7"), ["6", "5"])["reward"] == 0
    for fast in (True, False):
        same = tagged("x^2 + 2x + 1")
        assert toolkit.r1_zero_reward_fn(same, "(x+1)^2", fast=fast)["reward"] == 1
    assert toolkit.r1_zero_reward_fn(tagged("2^3"), "8", fast=True)["reward"] == 0
    assert toolkit.r1_zero_reward_fn(tagged("2^3"), "8", fast=False)["reward"] == 1
    names = ("format_reward", "answer_reward", "reward")
    for text, value in ((r"it is \boxed{42}", 1), ("it is 42", 0)):
        assert toolkit.question_only_reward_fn(text, "42") == dict.fromkeys(names, value)
    for wrong in ("", [], None, [None]):
        with pytest.raises(ValueError, match="truth"):
            toolkit.r1_zero_reward_fn(tagged("7"), wrong)


@pytest.mark.slow
def test_example_of_the_docs_page_runs(tiny):
    page = (Path(__file__).parent.parent / "docs" / "methods.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {"MODEL": str(tiny)}
    exec(code, names)
    assert names["raw"].tolist() == [1.0, 0.0]
    assert any(p.grad is not None for p in names["model"].parameters())
    for name in toolkit.__all__:
        assert f"`{name}`" in page or name == "PackedSftDataset", name
