"""Rollouts with pictures: the native engine samples what the stock generate samples."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import config_of
from vision_models import (
    FAMILIES,
    load_vision_model,
    requests_with_pictures,
    square,
)

from postgrad.cluster.wire import decode, encode
from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.errors import ConfigError
from postgrad.model.load.load import load
from postgrad.model.passes.support import vision_of
from postgrad.model.policy import FrozenPolicy
from postgrad.model.vision import Vision
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.rollout.hf import HfEngine
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.streams import open_stream
from postgrad.rollout.vllm import VllmEngine
from postgrad.types import Batch, Trajectory

SAMPLING = Sampling(1.0, 8)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tokens_and_log_probs_are_those_of_the_stock_generate_and_of_the_trainer(
    model_type, tmp_path
):
    loaded = load_vision_model(tmp_path, model_type)
    requests = requests_with_pictures(loaded)
    native = NativeEngine(loaded, RolloutConfig())
    assert (native.stock_engine is None) == (model_type != "qwen3_5")
    ours = native.generate(requests, SAMPLING)
    stock = HfEngine(loaded, RolloutConfig()).generate(requests, SAMPLING)
    assert [[c.tokens for c in group] for group in ours] == [
        [c.tokens for c in group] for group in stock
    ]
    rows = [
        Trajectory(str(number), request.prompt, completion.tokens, number, images=request.images)
        for number, (request, group) in enumerate(zip(requests, ours, strict=True))
        for completion in group
    ]
    sampled = torch.tensor([p for group in ours for one in group for p in one.logprobs])
    policy = FrozenPolicy(config_of("grpo", tmp_path), loaded)
    trained = policy.logprobs(Batch.of(rows))["logprobs"]
    torch.testing.assert_close(sampled, trained, atol=1e-4, rtol=0)
    # Equal ids with another picture are another prompt.
    assert requests[0].prompt == requests[1].prompt
    assert [c.logprobs for c in ours[0]] != [c.logprobs for c in ours[1]]


def test_few_slots_and_a_stream_give_the_same_tokens(tmp_path):
    loaded = load_vision_model(tmp_path, "qwen3_vl")
    requests = requests_with_pictures(loaded)
    engine = NativeEngine(loaded, RolloutConfig())
    expected = [[c.tokens for c in group] for group in engine.generate(requests, SAMPLING)]
    few = NativeEngine(loaded, RolloutConfig(max_rows=2)).generate(requests, SAMPLING)
    assert [[c.tokens for c in group] for group in few] == expected
    found = {}
    with open_stream(engine, SAMPLING, 5) as stream:
        for number, request in enumerate(requests):
            stream.add(request, [(number, index) for index in range(3)])
        while stream.busy:
            found |= {key: completion.tokens for key, completion in stream.poll()}
    assert [[found[n, i] for i in range(3)] for n in range(len(requests))] == expected


def test_only_prefill_sees_pictures_and_each_once(tmp_path, monkeypatch):
    loaded = load_vision_model(tmp_path, "qwen2_5_vl")
    engine = NativeEngine(loaded, RolloutConfig())
    vision_of(loaded.model).kept.clear()
    seen = []
    compute = Vision._compute
    monkeypatch.setattr(Vision, "_compute", lambda *args: seen.extend(args[-1]) or compute(*args))
    engine.generate(requests_with_pictures(loaded), SAMPLING)
    assert len(seen) == len(set(seen)) == 3


def test_pictures_cross_a_process_boundary_once(tmp_path):
    picture, other = square("red"), square("blue")
    request = Request([1, 2], [3], images=(picture, other))
    batch = Batch.of(
        [
            Trajectory("a", [1], [2], images=(picture,)),
            Trajectory("a", [1], [2], 0, 1, images=(picture,)),
            Trajectory("b", [1], [2], 1),
        ]
    )
    data = encode([request, request, batch])
    again, _, rows = decode(data)
    assert again == request
    assert [tuple(images) for images in rows.rows["images"]] == batch.rows["images"]
    assert data.count(picture.data) == 1


def test_a_model_of_text_refuses_pictures(tiny):
    loaded = load(ModelConfig(path=str(tiny), device="cpu", dtype="float32"), torch.device("cpu"))
    request = Request([1, 2], [1], images=(square("red"),))
    for engine in (NativeEngine(loaded, RolloutConfig()), HfEngine(loaded, RolloutConfig())):
        with pytest.raises(ConfigError, match="without the files of a processor"):
            engine.generate([request], SAMPLING)
        assert engine.generate([replace(request, images=())], SAMPLING)


class StandInForVllm:
    """Expands the placeholders of a prompt as vLLM does, and records what it was given."""

    def __init__(self, processor, num_more=0):
        self.processor = processor
        self.num_more = num_more
        self.prompts = []

    def generate(self, prompts, parameters, use_tqdm):
        self.prompts += prompts
        return [SimpleNamespace(prompt_token_ids=self.expanded(prompt)) for prompt in prompts]

    def expanded(self, prompt):
        tokenizer = self.processor.tokenizer
        sizes = [image.size for image in prompt.get("multi_modal_data", {}).get("image", [])]
        text = tokenizer.decode(prompt["prompt_token_ids"])
        text = self.processor.expand(text, [square("red", *size) for size in sizes])
        return tokenizer.encode(text) + [0] * self.num_more


@pytest.mark.parametrize("model_type", ["qwen3_vl", "smolvlm"])
def test_vllm_gets_places_and_pictures_and_answers_with_our_tokens(
    model_type, tmp_path, monkeypatch
):
    loaded = load_vision_model(tmp_path, model_type)
    requests = requests_with_pictures(loaded)
    engine = object.__new__(VllmEngine)
    engine.tokenizer, engine.max_context, engine.can_sleep = loaded.tokenizer, 256, False
    engine.sleeping, engine.reads_pictures = [], True
    engine.llm = StandInForVllm(engine.processor)
    monkeypatch.setattr(VllmEngine, "_sampling_params", lambda *args: None)
    monkeypatch.setattr(VllmEngine, "_completion", lambda *args: Completion())
    assert [len(group) for group in engine.generate(requests, SAMPLING)] == [3, 3, 3, 3]
    place = loaded.tokenizer.convert_tokens_to_ids(engine.processor.placeholder)
    for request, prompt in zip(requests, engine.llm.prompts[::3], strict=True):
        assert prompt["prompt_token_ids"].count(place) == len(request.images)
        images = prompt.get("multi_modal_data", {}).get("image", [])
        assert [image.tobytes() for image in images] == [
            picture.open().tobytes() for picture in request.images
        ]
    engine.llm.num_more = 1
    with pytest.raises(ConfigError, match=r"of one of \d+; use rollout.engine=native"):
        engine.generate(requests, SAMPLING)
    engine.reads_pictures = False
    with pytest.raises(ConfigError, match="in vLLM is shown none"):
        engine.generate(requests, SAMPLING)
