"""Models of text and images: their language model is trained, all of their weights are kept."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from refused import refused
from safetensors.torch import load_file
from tiny_runs import config_of, random_batch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from postgrad.config.schema import ModelConfig
from postgrad.model.load.formats import auto_class_of, save_tokenizer
from postgrad.model.load.gate import Gate, stock_logprobs
from postgrad.model.load.load import load
from postgrad.model.load.tiny import tiny_tokenizer
from postgrad.model.passes.support import support_of
from postgrad.model.policy import FrozenPolicy
from postgrad.training.driver import train
from postgrad.training.report import Reporter

TEXT: dict[str, Any] = {
    "vocab_size": 18,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 16,
    "eos_token_id": 17,
    "bos_token_id": None,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
QWEN_VISION |= {"out_hidden_size": 32}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
VISION |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
# model type -> settings, and the expected kind of pass
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_vl": (
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        },
        "packed",
    ),
    "qwen2_5_vl": (
        {"text_config": {**TEXT, "rope_parameters": MROPE}, "vision_config": QWEN_VISION},
        "packed",
    ),
    "mistral3": (
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**VISION, "model_type": "pixtral"},
        },
        "packed",
    ),
    "qwen3_5": ({"text_config": {**TEXT, **LINEAR}, "vision_config": QWEN_VISION}, "rows"),
}
TOKENS = {"image_token_id": 12, "video_token_id": 13, "vision_start_token_id": 14}
TOKENS |= {"vision_end_token_id": 15, "image_token_index": 12}


def save_model(folder: Path, model_type: str) -> Path:
    config = AutoConfig.for_model(model_type, **MODELS[model_type][0])
    for name, token in TOKENS.items():
        if hasattr(config, name):
            setattr(config, name, token)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_log_probs_are_those_of_the_stock_model(model_type, tmp_path):
    folder = save_model(tmp_path, model_type)
    loaded = load(ModelConfig(path=str(folder), device="cpu", dtype="float32"), torch.device("cpu"))
    assert support_of(loaded.model).passes == MODELS[model_type][1]
    batch = random_batch(seed=0)
    ours = FrozenPolicy(config_of("grpo", folder), loaded).logprobs(batch)["logprobs"]
    stock = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(ours, stock_logprobs(stock, batch), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_a_checkpoint_keeps_what_reads_images(model_type, tmp_path):
    folder = save_model(tmp_path / "model", model_type)
    processor = '{"image_processor_type": "Qwen2VLImageProcessor"}'
    (folder / "preprocessor_config.json").write_text(processor)
    steps = ["training.steps=2", "training.checkpoint_every=1", "training.keep_checkpoints=2"]
    sizes = ["training.problems_per_step=4", "rollout.max_response_tokens=6", f"runs={tmp_path}"]
    config = config_of("sft", folder, *steps, *sizes)
    train(config, Reporter())
    trained = tmp_path / "test" / "checkpoints" / "step-2" / "policy"
    before = read_folder(folder)
    after = read_folder(trained)
    shutil.rmtree(trained.parent)
    train(config, Reporter())  # continues from the first step
    again = read_folder(trained)
    assert all(torch.equal(after[name], again[name]) for name in after)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any("visual" in name for name in changed)
    assert (trained / "preprocessor_config.json").read_text() == processor
    names = AutoConfig.from_pretrained(trained).architectures
    assert names == AutoConfig.from_pretrained(folder).architectures


@pytest.mark.slow
def test_a_model_whose_source_is_gone_is_saved_without_its_processor(tmp_path):
    folder = save_model(tmp_path / "model", "qwen2_5_vl")
    loaded = load(ModelConfig(path=str(folder), device="cpu", dtype="float32"), torch.device("cpu"))
    for source in (str(folder), "", "nobody/no-such-model"):
        shutil.rmtree(folder, ignore_errors=True)
        loaded.tokenizer.name_or_path = loaded.model.config._name_or_path = source
        save_tokenizer(loaded, tmp_path / "saved")
    names = {file.name for file in (tmp_path / "saved").iterdir()}
    assert "tokenizer.json" in names and "preprocessor_config.json" not in names


@pytest.mark.slow
def test_an_adapter_of_the_language_model_alone_is_merged(tmp_path):
    peft = pytest.importorskip("peft")
    folder = save_model(tmp_path / "model", "qwen3_5")
    language_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(language_model, options)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted.merge_and_unload().model.layers[3].self_attn.q_proj.weight
    config = ModelConfig(path=str(tmp_path / "adapter"), device="cpu", dtype="float32")
    merged = load(config, torch.device("cpu")).model.model.language_model.layers[3]
    torch.testing.assert_close(merged.self_attn.q_proj.weight, expected)


def test_a_language_model_is_loaded_as_one():
    assert auto_class_of(AutoConfig.for_model("qwen3")) is AutoModelForCausalLM
    assert auto_class_of(AutoConfig.for_model("qwen3_5_text")) is AutoModelForCausalLM
    assert auto_class_of(AutoConfig.for_model("qwen3_vl")) is AutoModelForImageTextToText
    config = AutoConfig.for_model("qwen3_5")
    assert auto_class_of(config) is AutoModelForCausalLM
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    assert auto_class_of(config) is AutoModelForImageTextToText


def test_code_of_a_model_is_not_taken_for_transformers_own_of_the_same_name(tmp_path):
    code = "from transformers import LlamaConfig\n\n\nclass LlavaConfig(LlamaConfig):\n"
    (tmp_path / "own.py").write_text(f"{code}    model_type = 'own_llava'\n")
    settings = {"model_type": "own_llava", "auto_map": {"AutoConfig": "own.LlavaConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert auto_class_of(config) is AutoModelForCausalLM


def test_a_model_whose_own_pass_fails_is_refused(tiny, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(3, 3)
    with refused("unsupported", "model.path") as caught:
        Gate(model, tmp_path).measure()
    assert "\n" not in str(caught.value)
