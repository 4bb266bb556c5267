"""Passes with pictures: log-probs and gradients are those of the stock model that reads pixels."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel import (
    TENSOR,
    LogprobsAndEntropy,
    compute,
    difference,
    local_policy,
    rank_policy,
    sharded_policy,
)
from ranks import run_on_ranks
from refused import refused
from test_gradient_invariance import collect_gradients
from tiny_runs import config_of
from transformers import AutoModelForImageTextToText, AutoTokenizer
from vision_models import FAMILIES, save_vision_model, square

from postgrad.config.schema import LoraConfig
from postgrad.errors import ConfigError, RunError
from postgrad.methods import find_method
from postgrad.model.load.formats import tower_parameters
from postgrad.model.load.gate import probe_rows
from postgrad.model.load.load import load
from postgrad.model.load.picture_gate import enable_pictures, picture_rows
from postgrad.model.lora import adapted_modules, add_adapters
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes.support import support_of, vision_of
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL, after
from postgrad.model.views import find_blocks
from postgrad.model.vision import Vision
from postgrad.picture_processor import PictureProcessor
from postgrad.types import REPLAY, Batch, Trajectory

TEXT_KINDS = dict.fromkeys(FAMILIES, "packed") | {"qwen3_5": "rows"}
KINDS = TEXT_KINDS | {"gemma3": "shared"}


def policy_of(folder: Path, *overrides: str) -> LocalPolicy:
    config = config_of("sft", folder, *overrides)
    loaded = load(config.model, torch.device("cpu"))
    return LocalPolicy(config, loaded, find_method("sft")(config).objective)


def rows_with_pictures(folder: Path) -> Batch:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return picture_rows(PictureProcessor(tokenizer), tokenizer)


def stock_logprobs(
    model: Any, folder: Path, batch: Batch, num_blocks: int = -1
) -> list[torch.Tensor]:
    """Return the log-probs of each response by the stock model and the stock processor.

    With `num_blocks` they are those of the stock states after so many blocks.
    """
    processor = PictureProcessor(AutoTokenizer.from_pretrained(folder)).stock
    columns = []
    for row in batch.trajectories():
        ids = torch.tensor([[*row.prompt, *row.response]])
        inputs: dict[str, Any] = {}
        if row.images:
            images = [picture.open() for picture in row.images]
            defaults = processor.valid_processor_kwargs._defaults.get("images_kwargs", {})
            inputs = dict(processor.image_processor(images, **defaults, return_tensors="pt"))
            inputs = {name: value for name, value in inputs.items() if name.startswith(PIXELS)}
            types = (ids == processor.image_token_ids[0]).int()
            family = model.config.model_type
            if family == "gemma3":
                inputs["token_type_ids"] = types
            elif family.startswith("qwen"):
                inputs["mm_token_type_ids"] = types
        output = model(input_ids=ids, output_hidden_states=True, **inputs)
        logits = output.logits
        if num_blocks > 0:
            logits = model.get_output_embeddings()(output.hidden_states[num_blocks])
        logits = logits[0, len(row.prompt) - 1 : -1]
        targets = torch.tensor(row.response)[:, None]
        columns.append(torch.log_softmax(logits, -1).gather(1, targets)[:, 0])
    return columns


PIXELS = ("pixel", "image_grid")
VIEWS = [(family, FULL, vision) for family in FAMILIES for vision in ("frozen", "trained")]
# The blocks of Qwen3.5 cannot be called one by one: some of them are linear attention.
VIEWS += [(family, after(2), "trained") for family in FAMILIES if family != "qwen3_5"]


@pytest.mark.parametrize(("model_type", "view", "vision"), VIEWS)
def test_log_probs_and_gradients_are_those_of_the_stock_model(model_type, view, vision, tmp_path):
    folder = save_vision_model(tmp_path, model_type)
    policy = policy_of(folder, f"model.vision={vision}", "method.aggregation=token-sum")
    assert support_of(policy.model).passes == TEXT_KINDS[model_type]
    assert vision_of(policy.model).passes == KINDS[model_type]
    batch = rows_with_pictures(folder)
    stock = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    expected = torch.cat(stock_logprobs(stock, folder, batch, view.num_blocks or -1))
    ours = policy.logprobs(batch, view)["logprobs"]
    torch.testing.assert_close(ours, expected.detach(), atol=2e-4, rtol=0)

    policy.accumulate(policy.objective.prepare(batch), view, MetricAccumulator())
    (-expected.sum()).backward()
    masters = policy.optimizer.masters
    towers = tower_parameters(stock)
    assert towers
    for name, parameter in stock.named_parameters():
        if name in towers and vision == "frozen":
            assert name not in masters
        elif parameter.grad is not None:
            scale = parameter.grad.abs().max()
            difference = (masters[name].grad - parameter.grad).abs().max()
            assert difference <= 2e-4 * max(1.0, scale), name


def test_a_gradient_does_not_depend_on_the_split_of_the_rows(tmp_path):
    folder = save_vision_model(tmp_path, "qwen3_vl")
    batch = rows_with_pictures(folder)
    gradients = []
    for budget in (8192, 1):
        policy = policy_of(folder, "model.vision=trained", f"training.token_budget={budget}")
        policy.accumulate(policy.objective.prepare(batch), FULL, MetricAccumulator())
        gradients.append(collect_gradients(policy))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)


def test_a_frozen_tower_sees_each_picture_once(tmp_path, monkeypatch):
    folder = save_vision_model(tmp_path, "qwen3_vl")
    policy = policy_of(folder)
    batch = rows_with_pictures(folder)
    vision = vision_of(policy.model)
    vision.kept.clear()
    seen = []
    compute = Vision._compute
    monkeypatch.setattr(Vision, "_compute", lambda *args: seen.extend(args[-1]) or compute(*args))
    for _ in range(3):
        policy.logprobs(batch)
    assert len(seen) == len(set(seen)) == 3


def test_image_tokens_that_the_policy_sampled_show_nothing(tmp_path):
    folder = save_vision_model(tmp_path, "qwen3_vl")
    policy = policy_of(folder)
    rows = rows_with_pictures(folder).trajectories()
    rows[0].response = [3, vision_of(policy.model).processor.image_token_id, 5, 7]
    logprobs = policy.logprobs(Batch.of(rows))["logprobs"]
    assert logprobs.isfinite().all()
    rows[0].source = REPLAY  # another run of the policy sampled it
    rows[0].token_source = [REPLAY] * 4
    assert torch.equal(policy.logprobs(Batch.of(rows))["logprobs"], logprobs)
    rows[0].images = (*rows[0].images, square("red"))
    with pytest.raises(RunError, match="image tokens"):
        policy.logprobs(Batch.of(rows))


MISTAKES = {
    "ignores the pictures": (
        "_features_of",
        lambda features: features._replace(embeddings=torch.zeros_like(features.embeddings)),
    ),
    "forgets deepstack": ("_features_of", lambda features: features._replace(deep=())),
    "forgets the axes": ("_axes", lambda axes: axes[:1].expand(4, -1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_gate_finds_a_mistake(mistake, tmp_path, monkeypatch):
    folder = save_vision_model(tmp_path / "model", "qwen3_vl")
    policy = policy_of(folder)
    name, change = MISTAKES[mistake]
    right = getattr(Vision, name)
    monkeypatch.setattr(Vision, name, lambda *args: change(right(*args)))
    enable_pictures(policy.loaded, False, tmp_path)
    with pytest.raises(ConfigError, match="log-probs differ"):
        policy.logprobs(rows_with_pictures(folder))


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_adapters_are_in_the_tower_only_if_it_is_trained(vision, tmp_path):
    folder = save_vision_model(tmp_path, "gemma3")
    loaded = policy_of(folder, f"model.vision={vision}").loaded
    add_adapters(loaded.model, LoraConfig(rank=2), 0)
    names = list(adapted_modules(loaded.model))
    assert any("language_model" in name for name in names)
    assert any("vision_tower" in name for name in names) == (vision == "trained")


def test_files_of_another_processor_leave_the_text_passes_as_they_are(tmp_path):
    folder = save_vision_model(tmp_path, "qwen3_vl")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"merge_size": 1}))
    policy = policy_of(folder)
    with refused("unsupported", "model.path"):
        vision_of(policy.model)
    batch = probe_rows(policy.model)
    ours = policy.logprobs(batch)["logprobs"]
    policy.model.set_attn_implementation("sdpa")
    stock = stock_logprobs(policy.model, folder, batch)
    assert torch.allclose(ours, torch.cat(stock), atol=2e-4)


def test_a_model_without_a_processor_refuses_pictures_in_one_line(tmp_path, tiny):
    folder = save_vision_model(tmp_path, "qwen3_vl")
    batch = rows_with_pictures(folder)
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()
    for path in (folder, tiny):
        policy = policy_of(path)
        with pytest.raises(ConfigError, match="without the files of a processor") as caught:
            policy.logprobs(batch)
        assert "\n" not in str(caught.value)
    text = Trajectory("text", [1, 2], [3, 4])
    assert policy.logprobs(Batch.of([text]))["logprobs"].isfinite().all()


def shown_to_ranks(folder: Path) -> list[Batch]:
    """Return rows for two ranks; then rows of which one rank shows none, and one has no pass."""
    rows = rows_with_pictures(folder).trajectories()
    batches = [Batch.of(part) for part in (rows, [*rows[3:4], *rows[5:]], rows[:1])]
    for batch in batches:
        batch.tokens["advantages"] = torch.linspace(-1, 2, batch.num_tokens)
    return batches


def results_of_ranks(folder: Path, settings: list[str]) -> list[dict[str, torch.Tensor]]:
    results = []
    for batch in shown_to_ranks(folder):
        policy = rank_policy(folder, settings, torch.device("cpu"), LogprobsAndEntropy)
        results.append(compute(policy, batch))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_two_ranks_give_the_numbers_of_one_process(model_type, vision, tmp_path):
    folder = save_vision_model(tmp_path, model_type)
    settings = [f"model.vision={vision}"]
    on_ranks = run_on_ranks(2, results_of_ranks, folder, settings)
    for number, batch in enumerate(shown_to_ranks(folder)):
        expected = compute(local_policy(folder, settings), batch)
        towers = [name for name in expected if "gradient" in name and "vis" in name]
        assert bool(towers) == (vision == "trained")
        for results in on_ranks:
            assert not difference(expected, results[number])


def refused_on_ranks(folder: Path) -> str:
    policy = sharded_policy(folder, [TENSOR])
    with pytest.raises(ConfigError) as caught:
        policy.logprobs(rows_with_pictures(folder))
    return str(caught.value)


@pytest.mark.slow
def test_ranks_that_share_a_row_refuse_pictures_in_one_line(tmp_path):
    folder = save_vision_model(tmp_path, "gemma3")
    (line, _) = run_on_ranks(2, refused_on_ranks, folder)
    assert "cluster.tensor_parallel=2 does not support pictures" in line and "\n" not in line


def test_blocks_are_those_of_the_language_model_also_if_the_tower_has_more(tmp_path):
    policy = policy_of(save_vision_model(tmp_path, "qwen3_vl", num_hidden_layers=1))
    (block,) = find_blocks(policy.model)
    assert block is policy.model.model.language_model.layers[0]
