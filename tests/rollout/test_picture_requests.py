"""Requests with pictures: the server, the Python interface and chat answer as the engine does."""

import base64
import io
import json
import sys
import threading
from dataclasses import replace

import jinja2
import pytest
import torch
from openai_server import serve
from PIL import Image
from serve_process import live
from tiny_runs import config_of, metrics_of, same_completions
from vision_models import (
    load_vision_model,
    picture_tokenizer,
    requests_with_pictures,
    save_vision_model,
    square,
)

import postgrad
from postgrad.cli.chat import chat
from postgrad.config.schema import RolloutConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.errors import RunError
from postgrad.model.load.picture_gate import picture_rows
from postgrad.model.passes.support import vision_of
from postgrad.model.policy import FrozenPolicy
from postgrad.picture_processor import PictureProcessor
from postgrad.pictures import picture_of_data_url
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.http import HttpEngine
from postgrad.rollout.http_client import Address
from postgrad.rollout.http_logprobs import HttpLogprobs
from postgrad.rollout.native.engine import NativeEngine
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import Batch, Trajectory

QUESTION = {"type": "text", "text": "1+2="}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("vision"), "qwen3_vl")


@pytest.fixture(scope="module")
def server(model):
    with live(model, other=None, rows=4, context=256) as running:
        yield running


def part_of(url):
    return {"type": "image_url", "image_url": {"url": url}}


def ask(server, *parts, **options):
    messages = [{"role": "user", "content": [*parts, QUESTION]}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return server.ask("/v1/chat/completions", body | options)[:2]


def tokens_of(reply):
    status, answer = reply
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


def url_of(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_the_server_answers_about_the_picture_it_was_sent(server, model):
    red, blue = square("red"), square("blue", count=2)
    answers = [tokens_of(ask(server, part_of(one.data_url()))) for one in (red, blue, red)]
    assert answers[0] == answers[2] != answers[1]
    both = tokens_of(ask(server, part_of(red.data_url()), part_of(blue.data_url())))
    assert both != answers[0]
    item = {"type": "input_image", "image_url": red.data_url()}
    content = [item, {"type": "input_text", "text": "1+2="}]
    body = {"input": [{"role": "user", "content": content}], "temperature": 0}
    status, reply, _ = server.ask("/v1/responses", body | {"max_output_tokens": 8})
    chat_text = ask(server, part_of(red.data_url()))[1]["choices"][0]["message"]["content"]
    assert status == 200 and reply["output"][0]["content"][0]["text"] == chat_text


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("https://host/a.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("/etc/passwd", "nothing is fetched"),
        ("data:image/png;base64,@@@@", "not base64"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "not a picture"),
        (url_of(Image.new("L", (5000, 5000))), "25 megapixels"),
        (url_of(Image.new("L", (9000, 9000))), "9000 x 9000 pixels"),
        (url_of(Image.effect_noise((64, 64), 9))[:2022], "broken picture"),
        (7, "data URL"),
    ],
)
def test_hostile_pictures_are_refused_and_others_are_answered(server, url, sentence):
    expected = tokens_of(ask(server))
    status, body = ask(server, part_of(url))
    assert status == 400 and sentence in body["error"]["message"], body
    assert tokens_of(ask(server)) == expected


def test_many_small_pictures_are_refused(server):
    status, body = ask(server, *[part_of(url_of(Image.new("L", (1, 1))))] * 33)
    assert status == 400 and "33 pictures" in body["error"]["message"], body


def test_a_client_with_many_pictures_does_not_stop_the_others(server):
    bomb = part_of(url_of(Image.new("1", (7000, 7000))))
    results = []
    sender = threading.Thread(target=lambda: results.append(ask(server, *[bomb] * 100)))
    sender.start()
    assert len(tokens_of(ask(server))) == 8
    sender.join(60)
    assert results[0][0] == 400


def test_placeholders_in_a_text_are_no_pictures(server):
    status, body = ask(
        server, {"type": "text", "text": "<|image_pad|>"}, part_of(square("red").data_url())
    )
    assert status == 400 and "2 placeholders" in body["error"]["message"]


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3", "smolvlm"])
def test_an_engine_behind_a_server_samples_what_the_native_one_does(model_type, tmp_path):
    loaded = load_vision_model(tmp_path, model_type)
    requests = requests_with_pictures(loaded)
    native = NativeEngine(loaded, RolloutConfig())
    with live(tmp_path, rows=4, context=256) as running:
        address = Address.parse(f"{running.url}#tiny")
        engine = HttpEngine(address, Encoder(loaded.tokenizer), 60)
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature, 8)
            groups = engine.generate(requests, sampling)
            assert same_completions(groups, native.generate(requests, sampling))
    rows = [
        Trajectory(str(number), request.prompt, one.tokens, number, images=request.images)
        for number, (request, group) in enumerate(zip(requests, groups, strict=True))
        for one in group
    ]
    batch = Batch.of(rows)
    policy = FrozenPolicy(config_of("grpo", tmp_path), loaded)
    sampled = torch.tensor([value for group in groups for one in group for value in one.logprobs])
    torch.testing.assert_close(sampled, policy.logprobs(batch)["logprobs"], atol=1e-4, rtol=0)
    batch.rows["images"] = [tuple(map(turned, images)) for images in batch.rows["images"]]
    gaps = sampled - policy.logprobs(batch)["logprobs"]
    assert float(gaps.abs().max()) > 1e-3, "the server was shown these pictures, not others"


def test_a_run_samples_from_a_server_that_gets_its_trained_tower(tmp_path):
    model = save_vision_model(tmp_path / "model", "qwen3_vl", 1.0)
    row = {"prompt": "<image>1+2=", "images": ["red.png"], "ground_truth": "3"}
    (tmp_path / "red.png").write_bytes(square("red").data)
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 2)
    (tmp_path / "reward.py").write_text("score = lambda text, problem: float(len(set(text)))\n")
    with live(model, rows=8, context=256, reload_below=tmp_path) as running:
        words = [f"data.train={tmp_path}/rows.jsonl", f"reward.verifier={tmp_path}/reward.py:score"]
        words += ["rollout.engine=http", f"rollout.url={running.url}#tiny", "data.template=chat"]
        words += ["model.vision=trained", "optimizer.lr=0.01", "optimizer.warmup_steps=0"]
        words += ["training.problems_per_step=2", "rollout.samples=4", "training.steps=2"]
        words += ["data.max_prompt_tokens=100", "rollout.max_response_tokens=8"]
        run = train(config_of("grpo", model, *words, f"runs={tmp_path}", "name=run"), Reporter())
    lines = metrics_of(run.folder)
    assert [line["grad_norm"] > 0 for line in lines if line["step"]] == [True, True]
    assert max(line["engine/gap_max"] for line in lines if line["step"]) < 1e-4


def turned(picture):
    """Another picture of the same size."""
    return square("green", *picture.size, count=2)


def test_prompts_of_ids_with_other_places_or_fields_are_refused(server, model):
    red = square("red")
    encoder = Encoder(picture_tokenizer("qwen"), "chat", 256)
    encoder.tokenizer.name_or_path = str(model)
    ids = encoder.tokenize(f"1+2{encoder.picture_processor.placeholder}=", special=False)
    place = encoder.image_token_id

    def send(ids, urls, **more):
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": urls} | more}
        status, body, _ = server.ask("/v1/completions", {"prompt": prompt, "max_tokens": 2})
        return status, str(body)

    at = ids.index(place)
    count = encoder.picture_processor.num_tokens([red])
    right = [*ids[:at], *[place] * count, *ids[at + 1 :]]
    assert send(right, [red.data_url()])[0] == 200
    for wrong, urls, sentence in (
        (ids, [red.data_url()], "cannot be told"),
        ([place, *right], [red.data_url()], "cannot be told"),
        ([place, 1, *[place] * (count - 1)], [red.data_url()], "cannot be told"),
        (right, [red.data_url()] * 2, "cannot be told"),
        (right, ["https://host/a.png"], "nothing is fetched"),
        ([10**6], [red.data_url()], "outside 0 to"),
        ([], [red.data_url()], "must have token ids"),
    ):
        status, body = send(wrong, urls)
        assert status == 400 and sentence in body, body
    assert send(right, [red.data_url()], video=[])[0] == 400
    assert send(right, [red.data_url()])[0] == 200


def test_a_teacher_behind_a_server_reads_the_pictures(server, model, tmp_path):
    loaded = load_vision_model(tmp_path, "qwen3_vl")
    processor = vision_of(loaded.model).processor
    places = [processor.image_token_id]  # as a policy may write them
    batch = Batch.of(
        [
            Trajectory(row.uid, row.prompt, row.response + places, row.group, images=row.images)
            for row in picture_rows(processor, loaded.tokenizer).trajectories()
        ]
    )
    teacher = HttpLogprobs(Address.parse(f"{server.url}#tiny"))
    policy = FrozenPolicy(config_of("grpo", tmp_path), loaded)
    expected = policy.logprobs(batch)["logprobs"]
    torch.testing.assert_close(teacher.logprobs(batch)["logprobs"], expected, atol=1e-4, rtol=0)
    batch.rows["images"] = [tuple(map(turned, images)) for images in batch.rows["images"]]
    gaps = teacher.logprobs(batch)["logprobs"] - expected
    assert float(gaps.abs().max()) > 1e-3


class ActsAsVllm:
    """Refuses ids with pictures; renders chats with the template of the request, as vLLM does."""

    def __init__(self, loaded):
        self.tokenizer, self.native = loaded.tokenizer, NativeEngine(loaded, RolloutConfig())
        self.refuses_templates, self.more = False, []

    def __call__(self, number, body):
        if "messages" not in body or self.refuses_templates:
            what = "template is not trusted" if "messages" in body else "prompt has another form"
            return 400, {"error": {"message": what}}
        template = jinja2.Environment().from_string(body["chat_template"])
        text = template.render(messages=body["messages"])
        parts = body["messages"][0]["content"]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        pictures = tuple(map(picture_of_data_url, urls))
        ids = self.tokenizer.encode(PictureProcessor(self.tokenizer).expand(text, pictures))
        request = Request(ids, [body["seed"] % 2**64], images=pictures)
        sampling = Sampling(body["temperature"], body["max_tokens"])
        ((done,),) = self.native.generate([request], sampling)
        logprobs = {"content": [{"logprob": value} for value in done.logprobs]}
        choice = {"index": 0, "token_ids": done.tokens, "finish_reason": done.finish}
        choices = [choice | {"logprobs": logprobs}]
        return 200, {"choices": choices, "prompt_token_ids": ids + self.more}


@pytest.mark.parametrize("model_type", ["qwen3_vl", "smolvlm"])
def test_vllm_gets_a_chat_that_becomes_the_same_ids(model_type, tmp_path):
    loaded = load_vision_model(tmp_path, model_type)
    requests = [request for request in requests_with_pictures(loaded) if request.images]
    vllm = ActsAsVllm(loaded)
    with serve(mood=vllm) as running:
        engine = HttpEngine(Address.parse(running.address), Encoder(loaded.tokenizer), 60, 1)
        groups = engine.generate(requests, Sampling(1.0, 8))
        assert same_completions(groups, vllm.native.generate(requests, Sampling(1.0, 8)))
        assert len(running.asked) == 1 + sum(map(len, groups)), "the other form is tried once"
        place = engine.tokenizer.image_token_id
        for other in (replace(requests[0], prompt=[*requests[0].prompt, place]), requests[1]):
            vllm.more = [1] if other is requests[1] else []
            with pytest.raises(RunError, match=r"makes a prompt of \d+ tokens"):
                engine.generate([other], Sampling(1.0, 4))
        vllm.refuses_templates = True
        with pytest.raises(RunError, match="with 400: template is not trusted"):
            engine.generate(requests, Sampling(1.0, 4))
        engine.takes_ids_with_pictures = True
        with pytest.raises(RunError, match="another form; as a chat: template is not trusted"):
            engine.generate(requests, Sampling(1.0, 4))


def test_a_model_of_text_refuses_pictures(tiny):
    with live(tiny, rows=2) as running:
        status, body = ask(running, part_of(square("red").data_url()))
        assert status == 400 and "reads no pictures" in body["error"]["message"]
        assert ask(running)[0] == 200


def test_generate_and_chat_see_the_picture(model, server, tmp_path, monkeypatch, capsys):
    file = tmp_path / "red.png"
    file.write_bytes(square("red").data)
    expected = picture_tokenizer("qwen").decode(
        tokens_of(ask(server, part_of(square("red").data_url()))), skip_special_tokens=True
    )
    settings = {"model.device": "cpu", "model.dtype": "float32", "max_response_tokens": 8}
    row = {"prompt": "1+2=", "images": [str(file)]}
    (text,) = postgrad.generate(str(model), [row], **settings)
    assert text == expected
    lines = f"/image {tmp_path / 'gone.png'}\n/image {file}\n1+2=\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    options = [f"{name}={value}" for name, value in settings.items()]
    assert chat(str(model), *options) == 0
    assert capsys.readouterr().out.splitlines()[-1] == expected


def test_an_evaluation_sees_the_pictures(model, server, tmp_path):
    rows = [
        {"prompt": "1+2=", "images": [square(color, 64, 64, count).data], "ground_truth": "3"}
        for color, count in (("red", 1), ("blue", 2))
    ]
    settings = {"model.device": "cpu", "model.dtype": "float32", "max_response_tokens": 8}
    given = {"reward": "exact", "out": tmp_path / "eval", "progress": False}
    result = postgrad.evaluate(str(model), rows, **given, **settings)
    texts = list(result.responses["response"])
    assert texts == postgrad.generate(str(model), rows, **settings) and texts[0] != texts[1]
    assert all("<|image_pad|> x " in prompt for prompt in result.responses["prompt"])
    settings |= {"rollout.engine": "http", "rollout.url": f"{server.url}#tiny"}
    assert postgrad.generate(str(model), rows, **settings) == texts
