"""The memory of pictures: towers, their activations, and the features that are kept."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vision_models
from fixture_types import Patch
from tiny_runs import config_of
from vision_models import FAMILIES, save_vision_model

from postgrad.config.schema import ModelConfig
from postgrad.doctor.fit import read_workload
from postgrad.model.load.load import load, model_config
from postgrad.model.passes.support import vision_of
from postgrad.model.vision import KEPT_FEATURE_BYTES, Vision
from postgrad.sizing.choose import choose_passes
from postgrad.sizing.devices import Device, find_gpu
from postgrad.sizing.memory import estimate, is_captured, picture_bytes
from postgrad.sizing.simulate import LiveBytes, measure_size
from postgrad.sizing.workload import NO_PICTURES, Plan, lay_out_step
from postgrad.training.prepare import Prepared, prepare
from postgrad.training.resolve import _plan_on_gpu

CPU = torch.device("cpu")


def prepared(folder: Path, root: Path, vision: str) -> Prepared:
    settings = ["data.train=arithmetic:1:picture", "data.template=chat", f"runs={root}"]
    settings += ["training.problems_per_step=4", "rollout.samples=2", "data.max_prompt_tokens=900"]
    run = prepare(config_of("grpo", folder, *settings, f"model.vision={vision}"))
    run.scorer.close()
    return run


def plan_of(run: Prepared) -> Plan:
    return Plan(run.config, model_config(run.config.model), read_workload(run))


def deep_model(root: Path, family: str, patch: Patch) -> Path:
    """Write a model whose tower has eight blocks."""
    kind, settings, pixels, processor = FAMILIES[family]
    tower = dict(settings["vision_config"])
    tower["depth" if "depth" in tower else "num_hidden_layers"] = 8
    settings = {**settings, "vision_config": tower}
    patch.setitem(vision_models.FAMILIES, family, (kind, settings, pixels, processor))
    return save_vision_model(root, family)


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_tower_has_gradients_and_state_only_if_it_is_trained(vision: str, tmp_path: Path) -> None:
    folder = save_vision_model(tmp_path, "gemma3")
    config = config_of("sft", folder, f"model.vision={vision}")
    size = measure_size(config, model_config(config.model))
    parameters = list(load(config.model, CPU).model.parameters())
    assert size.trained == sum(p.numel() for p in parameters if p.requires_grad)
    assert size.parameters == sum(p.numel() for p in parameters)
    assert (size.trained < size.parameters) == (vision == "frozen")


def test_a_tower_may_name_its_widths_as_qwen2_vl_does() -> None:
    names = {"hidden_size": 16, "intermediate_size": 64}, {"embed_dim": 16, "mlp_ratio": 4}
    estimates: list[object] = []
    for widths in names:
        tower = SimpleNamespace(**{"hidden_size": 99, **widths}, patch_size=2, depth=3)
        settings = ModelConfig(vision="trained", device="cuda", dtype="float32")
        plan: Any = SimpleNamespace(
            workload=SimpleNamespace(pictures=(10, 100.0)),
            config=SimpleNamespace(model=settings),
            model=SimpleNamespace(vision_config=tower),
        )
        layout: Any = SimpleNamespace(passes=[SimpleNamespace(image_tokens=4)])
        estimates.append(picture_bytes(plan, layout))
    assert estimates[0] == estimates[1] and estimates[0][1]["activations of the tower"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3", "internvl"])
def test_activations_of_a_trained_tower(family: str, tmp_path: Path, monkeypatch: Patch) -> None:
    run = prepared(deep_model(tmp_path, family, monkeypatch), tmp_path, "trained")
    plan = plan_of(run)
    layout = lay_out_step(plan)
    _, parts = picture_bytes(plan, layout)
    (one,) = layout.passes
    shown = sorted({row.problem for row in one.rows})
    assert len(shown) == 4
    model = load(run.config.model, CPU).model
    composed = [group.image_tokens for group in plan.workload.groups]
    vision = vision_of(model)
    pictures = [problem.images[0] for problem in run.train]
    wanted = [next(p for p in pictures if vision.processor.num_tokens([p]) == n) for n in composed]
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        features = [vision._compute(model, [picture]) for picture in wanted]
        kept = live.now
    assert features
    assert parts["activations of the tower"] == pytest.approx(kept, rel=1 / 3)


@pytest.mark.slow
def test_features_of_a_frozen_tower_are_kept(tmp_path: Path) -> None:
    run = prepared(save_vision_model(tmp_path, "qwen3_vl"), tmp_path, "frozen")
    run.train[8:] = []
    run.held_out[:] = []
    plan = plan_of(run)
    held, phase = picture_bytes(plan, lay_out_step(plan))
    assert not phase
    model = load(run.config.model, CPU).model
    vision: Vision = vision_of(model)
    vision.kept.clear()
    vision.kept_pixels.clear()
    vision.features(model, [problem.images[0] for problem in run.train])
    features = sum(layer.nbytes for one in vision.kept.values() for layer in one.layers)
    assert held["features of pictures"] == features
    pixels = [value for one in vision.kept_pixels.values() for value in one.values()]
    assert held["pixels of pictures"] == pytest.approx(sum(v.nbytes for v in pixels), rel=0.05)


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm", "internvl"])
def test_tokens_per_pass_on_a_gpu_follow_from_the_tower(
    family: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The data are not read yet: every token of a prompt may stand for a picture."""
    folder = deep_model(tmp_path, family, monkeypatch)
    settings = ["training.problems_per_step=64", "rollout.samples=2", "data.max_prompt_tokens=100"]
    settings += ["rollout.max_response_tokens=20", "rollout.cache_gib=0.001"]
    config = config_of("grpo", folder, *settings, "model.vision=trained")
    config.model.device = "cuda"
    planned = _plan_on_gpu(config, None, CPU, find_gpu("h200"))
    assert planned is not None
    plan, large = planned
    text = replace(plan, workload=replace(plan.workload, pictures=NO_PICTURES))
    assert choose_passes(plan, large, 8192, 16384) == (8192, False)
    gpu = Device("gpu", round(1.2 * estimate(text, large).peak))
    assert choose_passes(text, gpu, 8192, 16384) == (8192, False)
    budget, recompute = choose_passes(plan, gpu, 8192, 16384)
    assert (budget, recompute) != (8192, False)
    chosen = plan.changed("training.token_budget", budget)
    chosen = chosen.changed("model.activation_checkpointing", recompute)
    assert estimate(chosen, gpu).peak <= gpu.usable < estimate(plan, gpu).peak
    assert not is_captured(plan, measure_size(config, plan.model), 512)


def test_frozen_towers_hold_features_and_gemma3_has_no_estimate(tmp_path: Path) -> None:
    config = config_of("grpo", save_vision_model(tmp_path / "qwen3_vl", "qwen3_vl"))
    config.model.device = "cuda"
    planned = _plan_on_gpu(config, None, CPU, find_gpu("h200"))
    assert planned is not None
    held = {"features of pictures": KEPT_FEATURE_BYTES}
    assert picture_bytes(planned[0], lay_out_step(planned[0])) == (held, {})
    config.model.path = str(save_vision_model(tmp_path / "gemma3", "gemma3"))
    assert _plan_on_gpu(config, None, CPU, find_gpu("h200")) is None
