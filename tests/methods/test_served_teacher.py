"""A teacher behind a server: vLLM's and OpenAI's forms give the log-probs of a local teacher."""

from pathlib import Path
from typing import Any

import pytest
import torch
from method_runs import bound, run
from openai_server import MODEL, serve
from serve_process import live
from tiny_runs import config_of, random_batch, stock_model

from postgrad.cluster.host import build_host
from postgrad.errors import ConfigError, RunError
from postgrad.model.load.tiny import make_tiny
from postgrad.rollout.http_client import Address
from postgrad.rollout.http_logprobs import ECHO, HttpLogprobs, read_echo, read_vllm


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """(student, teacher) of different random weights."""
    folder = tmp_path_factory.mktemp("models")
    student = make_tiny(folder / "student", seed=0, layers=1, width=32)
    return student, make_tiny(folder / "teacher", seed=1, layers=1, width=32)


def scoring_server(teacher: Path, form: str) -> Any:
    """Answers /v1/completions with log-probs of the prompt, in vLLM's form or in OpenAI's."""
    model = stock_model(teacher, torch.float32)

    def answer(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        ids = body["prompt"]
        if form == "vllm" and "prompt_logprobs" not in body:
            return 200, {"choices": [{"index": 0, "text": ""}]}
        if form == "echo" and "prompt_logprobs" in body:
            return 400, {"error": {"message": "unknown field prompt_logprobs"}}
        with torch.no_grad():
            table = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        tops: list[Any] = [None]
        values: list[Any] = [None]
        for position, token in enumerate(ids[1:]):
            best = table[position].topk(body.get("prompt_logprobs", body.get("logprobs")))
            values.append(float(table[position, token]))
            tops.append({int(i): float(v) for v, i in zip(*best, strict=True)})
        choice: dict[str, Any] = {"index": 0, "text": ""}
        if form == "vllm":
            entries: list[Any] = [None]
            for token, value, top in zip(ids[1:], values[1:], tops[1:], strict=True):
                both = {token: value} | top
                entries.append({str(i): {"logprob": v, "rank": 1} for i, v in both.items()})
            choice["prompt_logprobs"] = entries
        else:  # also the token that is generated, as with max_tokens=1
            named = [t and {f"token_id:{i}": v for i, v in t.items()} for t in tops]
            choice["logprobs"] = {
                "token_logprobs": [*values, -0.5],
                "top_logprobs": [*named, {"token_id:3": -0.5}],
            }
        return 200, {"choices": [choice]}

    return serve(mood=answer)


def assert_log_probs_of(teacher: Path, served: HttpLogprobs) -> None:
    """Compares the server's columns with those of the same model in this process."""
    local = build_host(config_of("distill", teacher, "method.teacher=")).policy
    batch = random_batch(3, groups=2)
    expected = local.logprobs(batch)["logprobs"]
    torch.testing.assert_close(served.logprobs(batch)["logprobs"], expected, rtol=0, atol=1e-5)
    top = served.top_logprobs(batch, 4)
    right = local.top_logprobs(batch, 4)
    assert torch.equal(top["ids"], right["ids"])
    torch.testing.assert_close(top["logprobs"], right["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["vllm", "echo"])
def test_the_columns_equal_those_of_a_local_teacher(form, models):
    _, teacher = models
    with scoring_server(teacher, form) as server:
        assert_log_probs_of(teacher, HttpLogprobs(Address.parse(server.address)))
        assert {call["max_tokens"] for call in server.asked} == {1}


@pytest.mark.slow
def test_postgrad_serve_is_such_a_server(models):
    _, teacher = models
    with live(teacher) as server:
        served = HttpLogprobs(Address.parse(f"{server.url}#tiny"))
        assert served.form == ECHO
        assert_log_probs_of(teacher, served)


@pytest.mark.slow
def test_a_run_with_a_served_teacher_follows_the_local_one(models, tmp_path):
    student, teacher = models
    for recipe, name, extra in (("distill", "sampled", ()), ("gkd", "jsd", ("method.top_k=5",))):
        own = (*extra, "optimizer.lr=1e-2")
        local = run(recipe, student, tmp_path / f"{name}1", f"method.teacher={teacher}", *own)
        with scoring_server(teacher, "vllm") as server:
            url = f"method.teacher='{server.url}?tokenizer={teacher}#{MODEL}'"
            served = run(recipe, student, tmp_path / f"{name}2", url, *own)
        for one, two in zip(local, served, strict=True):
            for key in (f"distill/{name}", "grad_norm"):
                assert two[key] == pytest.approx(one[key], rel=1e-3), key


def test_forms_without_the_prompts_log_probs_are_not_read():
    assert read_vllm({"text": ""}, [1, 2]) is None
    assert read_vllm({"prompt_logprobs": [None, {"5": -1.0}]}, [1, 2]) is None, "another token"
    assert read_echo({"logprobs": {"token_logprobs": [-0.5]}}, [1, 2]) is None, "not echoed"
    assert read_echo({"logprobs": None}, [1, 2]) is None
    assert read_vllm({"prompt_logprobs": [None, {"2": -1.0}]}, [1, 2]) == [
        (0.0, {}),
        (-1.0, {2: -1.0}),
    ]
    assert read_echo({"logprobs": {"token_logprobs": [None, -2.0]}}, [1, 2])[1] == (-2.0, {})  # type: ignore[index]


def test_what_cannot_work_is_refused(models):
    student, teacher = models
    with (
        serve(mood=lambda number, body: (200, {"choices": [{"text": ""}]})) as server,
        pytest.raises(ConfigError, match="no log-probs of prompts"),
    ):
        HttpLogprobs(Address.parse(server.address))
    with scoring_server(teacher, "vllm") as server:
        served = HttpLogprobs(Address.parse(server.address))
        served.max_context = 5
        with pytest.raises(RunError, match="exceeds the context"):
            served.logprobs(random_batch(3))
        served._score = lambda batch, num_top: [(-1.0, {1: -1.0})]  # type: ignore[method-assign]
        with pytest.raises(RunError, match=r"method\.top_k"):
            served.top_logprobs(random_batch(3), 2)
    world = bound("distill", student, f"method.teacher={teacher}")
    world.method.settings.teacher = f"http://host/v1?tokenizer={teacher}#model"
    world.method.check_problems([])  # its tokenizer is the student's
