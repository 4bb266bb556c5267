"""Whole runs on pictures: a tiny model of Qwen3-VL's architecture, trained from scratch, learns.

Each picture shows one to three squares of one of three colors; the answer is a number of two
digits: the color's, then the count.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import assert_a_killed_run_ends_the_same
from safetensors.torch import load_file
from tiny_runs import config_of, metrics_of, tree
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from vision_models import save_vision_model, square

from postgrad.cluster.generators import ModelVerifier
from postgrad.config.schema import Config, ModelConfig, RolloutConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.methods.reward_model import response_scores
from postgrad.model.load.load import load
from postgrad.model.passes.support import vision_of
from postgrad.model.scored import RewardModel, RewardPolicy
from postgrad.model.vision import Vision
from postgrad.picture_processor import PictureProcessor
from postgrad.pictures import Picture
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.engine import NativeEngine
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import Batch, Problem

COLORS = ("red", "green", "blue")
CONTENT = [{"type": "image"}, {"type": "text", "text": "?"}]
MESSAGES = [{"role": "user", "content": CONTENT}]
PIXELS = {"size": {"shortest_edge": 1024, "longest_edge": 2048}}


def drawn(number: int, count: int) -> Picture:
    return square(COLORS[number - 1], width=48, height=32, count=count)


ANSWERS = {f"{number}{count}": (number, count) for number in (1, 2, 3) for count in (1, 2, 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    model = save_vision_model(folder / "model", "qwen3_vl", 1.0, num_hidden_layers=2)
    settings = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps(settings | PIXELS))
    rows = []
    for answer, shown in ANSWERS.items():
        (folder / f"{answer}.png").write_bytes(drawn(*shown).data)
        given: dict[str, Any] = {"prompt": MESSAGES, "images": [f"{answer}.png"]}
        rows.append(given | {"response": answer, "ground_truth": answer})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines)
    pairs = [
        {**row, "chosen": row["response"], "rejected": rows[i - 1]["response"]}
        for i, row in enumerate(rows)
    ]
    for row in pairs:
        del row["response"]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    labels = [
        {
            "prompt": MESSAGES,
            "images": row["images"],
            "completion": row["response"],
            "label": i % 2 == 0,
        }
        for i, row in enumerate(rows)
    ]
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))
    return folder


def run_config(method: str, folder: Path, model: Path, runs: Path, *overrides: str) -> Config:
    return config_of(
        method,
        model,
        f"data.train={folder / 'rows.jsonl'}",
        "data.template=chat",
        "training.problems_per_step=9",
        "rollout.max_response_tokens=4",
        f"runs={runs}",
        f"name={method}",
        *overrides,
    )


def in_folder(settings: Sequence[str], folder: Path) -> list[str]:
    """Return settings with the paths of files in the folder."""
    return [one.replace("data.train=", f"data.train={folder}/") for one in settings]


def answer_all(model: Path, shuffled: bool = False) -> dict[str, str]:
    """Return the greedy answer to each picture; `shuffled` shows the next one in its place."""
    config = ModelConfig(path=str(model), device="cpu", dtype="float32")
    loaded = load(config, torch.device("cpu"))
    tokenizer = loaded.tokenizer
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    pictures = [drawn(*shown) for shown in ANSWERS.values()]
    if shuffled:
        pictures = [*pictures[1:], pictures[0]]
    requests = []
    for picture in pictures:
        ids = tokenizer(vision_of(loaded.model).processor.expand(text, [picture]))["input_ids"]
        requests.append(Request(ids, [0], images=(picture,)))
    groups = NativeEngine(loaded, RolloutConfig()).generate(requests, Sampling(0.0, 4))
    texts = [tokenizer.decode(g[0].tokens, skip_special_tokens=True) for g in groups]
    return dict(zip(ANSWERS, texts, strict=True))


REWARD = ("reward.verifier=exact", "reward.workers=1")
SFT = ("model.vision=trained", "training.steps=40", "optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def taught(folder) -> Path:
    """A model after SFT from scratch."""
    train(run_config("sft", folder, folder / "model", folder / "runs", *SFT), Reporter())
    return folder / "runs" / "sft" / "checkpoints" / "step-40" / "policy"


def test_sft_teaches_to_read_pictures_and_exchanged_pictures_change_the_answers(taught):
    answers = answer_all(taught)
    assert sum(answer == right for right, answer in answers.items()) >= 7
    rights = list(ANSWERS)
    exchanged = answer_all(taught, shuffled=True)
    moved = [answers[right] for right in [*rights[1:], rights[0]]]
    assert list(exchanged.values()) == moved
    # A stock checkpoint: transformers reads it, and its processor is there.
    AutoModelForImageTextToText.from_pretrained(taught)
    assert PictureProcessor(AutoTokenizer.from_pretrained(taught)).placeholder == "<|image_pad|>"


def test_sft_learns_nothing_if_pictures_are_ignored(folder, tmp_path, monkeypatch):
    features = Vision._features_of

    def ignore(*args: Any) -> Any:
        seen = features(*args)
        return type(seen)(*(layer * 0 for layer in seen[:1]), tuple(one * 0 for one in seen.deep))

    monkeypatch.setattr("postgrad.model.load.load.has_processor", lambda loaded: False)
    with pytest.raises(ConfigError, match="without the files of a processor"):
        train(run_config("sft", folder, folder / "model", tmp_path, *SFT), Reporter())
    monkeypatch.undo()
    monkeypatch.setattr(Vision, "_features_of", ignore)
    monkeypatch.setattr("postgrad.model.load.picture_gate.PictureGate.decide", lambda gate: None)
    train(run_config("sft", folder, folder / "model", tmp_path, *SFT), Reporter())
    answers = answer_all(tmp_path / "sft" / "checkpoints" / "step-40" / "policy")
    assert sum(answer == right for right, answer in answers.items()) <= 2


def test_grpo_raises_the_reward_with_a_frozen_tower(folder, taught, tmp_path):
    sft = (*SFT, "training.steps=14", "name=some")
    train(run_config("sft", folder, folder / "model", tmp_path, *sft), Reporter())
    start = tmp_path / "some" / "checkpoints" / "step-14" / "policy"
    settings = ("training.steps=24", "rollout.samples=8", "optimizer.lr=3e-3", *REWARD)
    config = run_config("grpo", folder, start, tmp_path, *settings)
    train(config, Reporter())
    rewards = [row["reward/mean"] for row in metrics_of(tmp_path / "grpo")]
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + 0.15
    last = tmp_path / "grpo" / "checkpoints" / "step-24"
    before = load_file(last / "policy" / "model.safetensors")
    of_start = load_file(start / "model.safetensors")
    towers = [name for name in before if "visual" in name]
    assert towers and all(torch.equal(before[name], of_start[name]) for name in towers)


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_killed_run_with_pictures_ends_the_same(vision, folder, taught, tmp_path):
    overrides = [
        f"model.vision={vision}",
        f"data.train={folder / 'rows.jsonl'}",
        f"data.validation={folder / 'rows.jsonl'}",
        "data.template=chat",
        "rollout.samples=4",
        "rollout.max_response_tokens=4",
        "optimizer.lr=1e-3",
        "training.problems_per_step=4",
        "training.updates_per_step=2",
        "training.steps=6",
        "training.checkpoint_every=2",
        "training.keep_checkpoints=4",
        "training.validate_every=3",
        *REWARD,
    ]
    assert_a_killed_run_ends_the_same("grpo", taught, tmp_path, 5, overrides)
    complete = tree(tmp_path / "complete" / "test" / "pictures")
    assert len(complete) == len(ANSWERS)
    assert tree(tmp_path / "killed" / "test" / "pictures") == complete
    (line, *_) = (tmp_path / "complete" / "test" / "eval" / "validation-000003").glob("*.jsonl")
    shown = [json.loads(row)["images"] for row in line.read_text().splitlines()]
    assert {f"{key}.png" for keys in shown for key in keys} == complete.keys()


SHORT = ("training.steps=2", "optimizer.lr=1e-3")
METHODS: dict[str, tuple[str, ...]] = {
    "dpo": ("data.train=pairs.jsonl",),
    "kto": ("data.train=labels.jsonl",),
    "ppo": ("rollout.samples=2", *REWARD),
    "luffy": ("rollout.samples=3", *REWARD),
    "exgrpo": ("rollout.samples=2", *REWARD),
    "online_dpo": ("rollout.samples=2", *REWARD),
    "sft": ("model.lora.rank=2",),
    "bupo": ("rollout.samples=2", *REWARD, "method.phase_one_steps=1", "method.num_blocks=1"),
    "distill": ("rollout.samples=2", "method.teacher=TAUGHT", "method.divergence=forward"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_methods_learn_from_pictures(method, folder, taught, tmp_path):
    settings = [one.replace("TAUGHT", str(taught)) for one in METHODS[method]]
    config = run_config(method, folder, taught, tmp_path, *SHORT, *in_folder(settings, folder))
    train(config, Reporter())
    assert len(metrics_of(tmp_path / method)) == 2


@pytest.mark.slow
def test_a_classmate_sees_the_pictures_of_the_problem(folder, taught, tmp_path, tiny, monkeypatch):
    """What it is asked has its own processor's tokens; one that reads text only is refused."""
    asked: list[Request] = []
    generate = NativeEngine.generate
    monkeypatch.setattr(
        NativeEngine, "generate", lambda *args: asked.extend(args[1]) or generate(*args)
    )
    settings = [*SHORT, *REWARD, "rollout.samples=2", "method.unclosed_thought=allow"]
    config = run_config("classmate", folder, taught, tmp_path, *settings)
    train(config, Reporter())
    assert len(asked) > 2 * 9 and all(len(request.images) == 1 for request in asked)
    config = run_config(
        "classmate", folder, taught, tmp_path, *settings, "name=text", f"method.classmates=[{tiny}]"
    )
    with pytest.raises(ConfigError, match="a model of text only") as caught:
        train(config, Reporter())
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_transformers_has_no_reward_models_of_most_families(folder, taught, tmp_path):
    settings = (*SHORT, f"data.train={folder / 'pairs.jsonl'}")
    config = run_config("reward_model", folder, taught, tmp_path, *settings)
    with pytest.raises(ConfigError, match="no AutoModelForSequenceClassification") as caught:
        train(config, Reporter())
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5"])
def test_a_reward_model_scores_pictures_as_the_stock_classifier_does(model_type, folder, tmp_path):
    start = save_vision_model(tmp_path / "model", model_type)
    settings = [*SHORT, f"data.train={folder / 'pairs.jsonl'}", "model.vision=trained"]
    config = run_config("reward_model", folder, start, tmp_path, *settings)
    train(config, Reporter())
    trained = tmp_path / "reward_model" / "checkpoints" / "step-2" / "policy"
    stock = AutoModelForSequenceClassification.from_pretrained(trained, dtype=torch.float32).eval()
    model = ModelConfig(path=str(trained), device="cpu", dtype="float32")
    encoder = Encoder(AutoTokenizer.from_pretrained(trained), "chat")
    processor = PictureProcessor(encoder.tokenizer).stock
    problems = [
        Problem(str(i), tuple(MESSAGES), "", images=(drawn(*shown),))
        for i, shown in enumerate([(1, 1), (2, 1), (1, 1)])
    ]
    problems[2] = Problem("2", ({"role": "user", "content": "1+1"},), "")
    ours = ModelVerifier(RewardModel(model, torch.device("cpu")), encoder).score(
        problems, ["12", "12", "12"]
    )
    expected = []
    for problem in problems:
        images = [picture.open() for picture in problem.images]
        text = encoder.tokenizer.apply_chat_template(
            [*problem.messages, {"role": "assistant", "content": "12"}], tokenize=False
        )
        inputs = processor(text=[text], images=images or None, return_tensors="pt")
        expected.append(float(stock(**inputs).logits.detach()))
    values = [score.value for score in ours]
    assert values == pytest.approx(expected, abs=1e-5)
    assert values[0] != pytest.approx(values[1], abs=1e-4)
    # The trainer computes the same scores, and continues from the folder.
    config = run_config("reward_model", folder, trained, tmp_path, *settings)
    loaded = load(config.model, torch.device("cpu"), uses_lm_head=False)
    method = find_method("reward_model")(config)
    method.ports = type("", (), {"encoder": encoder})()
    pairs = [replace(problem, extra={"chosen": "12", "rejected": "3"}) for problem in problems[:2]]
    batch = Batch.of([row for pair in pairs for row in method.pair_rows(pair)])
    scores = RewardPolicy(config, loaded, method.objective).logprobs(batch)["scores"]
    chosen = response_scores(batch, scores)[::2].tolist()
    assert chosen == pytest.approx(expected[:2], abs=1e-5)
