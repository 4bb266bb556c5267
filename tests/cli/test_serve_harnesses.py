"""Evaluation harnesses against `postgrad serve`, with the real packages.

They are not among the test dependencies: lm_eval brings scipy and scikit-learn, inspect-ai brings
a terminal interface. `pip install "lm_eval[api]" inspect-ai` runs these tests. The requests that
they send are tested without them in test_serve_echo.py.
"""

import json

import pytest
import torch
from tiny_runs import stock_model

SUMS = [("1+2=", "3", "7"), ("2+2=", "9", "4"), ("3+4=", "7", "1")]


def exact_loglikelihood(tiny, tokenizer, context, continuation):
    start = len(tokenizer(context)["input_ids"])
    ids = tokenizer(context + continuation)["input_ids"]
    with torch.no_grad():
        logprobs = stock_model(tiny)(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return float(sum(logprobs[i - 1, ids[i]] for i in range(start, len(ids))))


@pytest.mark.nightly
def test_lm_evaluation_harness_scores_choices_by_log_likelihood(server, tiny, tmp_path):
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval[api]")
    pytest.importorskip("tenacity", reason="needs lm_eval[api]")
    from transformers import AutoTokenizer

    file = tmp_path / "sums.jsonl"
    rows = [{"question": q, "choices": [a, b], "label": 0} for q, a, b in SUMS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "tiny_sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny",
            "base_url": f"{server.url}/completions",
            "tokenizer": str(tiny),
            "tokenizer_backend": "huggingface",
            "max_length": 64,
            "max_retries": 1,
        },
        tasks=[task],
        bootstrap_iters=0,
        batch_size=2,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(tiny))
    correct = 0
    for sample, (question, *choices) in zip(results["samples"]["tiny_sums"], SUMS, strict=True):
        exact = [exact_loglikelihood(tiny, tokenizer, question, choice) for choice in choices]
        given = [float(response[0]) for response in sample["filtered_resps"]]
        assert given == pytest.approx(exact, abs=1e-3)
        correct += exact[0] > exact[1]
    assert results["results"]["tiny_sums"]["acc,none"] == pytest.approx(correct / len(SUMS))


@pytest.mark.nightly
def test_inspect_ai_evaluates_a_task(server, tmp_path, monkeypatch):
    pytest.importorskip("inspect_ai", reason="needs inspect-ai")
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    monkeypatch.setenv("POSTGRAD_BASE_URL", server.url)
    monkeypatch.setenv("POSTGRAD_API_KEY", "none")
    task = Task(
        dataset=[Sample(input=question, target=answer) for question, answer, _ in SUMS],
        solver=generate(),
        scorer=includes(),
    )
    logs = eval(
        task,
        model="openai-api/postgrad/tiny",
        max_tokens=8,
        seed=1,
        temperature=1.0,
        display="none",
        log_dir=str(tmp_path),
    )
    assert logs[0].status == "success", logs[0].error
    assert len(logs[0].samples) == len(SUMS)
    for sample in logs[0].samples:
        assert sample.output.usage.output_tokens >= 1
        assert (sample.scores["includes"].value == "C") == (
            sample.target in sample.output.completion
        )
