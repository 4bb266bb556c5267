"""Folders of reward models: no policy, but a critic may start from one."""

import json

import pytest
import torch
from tiny_runs import config_of

from postgrad.cluster.engines import describe_model, engine_config
from postgrad.cluster.host import build_host
from postgrad.config.schema import ModelConfig
from postgrad.errors import ConfigError
from postgrad.model.load import load
from postgrad.model.tiny import make_tiny, tiny_tokenizer

CPU = torch.device("cpu")


def save_classifier(folder, kind="Sequence", tied=True, num_labels=1):
    """Write a classifier of transformers, with random weights; return its folder."""
    import transformers

    auto_class = getattr(transformers, f"AutoModelFor{kind}Classification")
    causal = make_tiny(folder / "causal", seed=1, width=32, tied=tied)
    model = auto_class.from_pretrained(causal, num_labels=num_labels)
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(folder / "classifier")
    tiny_tokenizer().save_pretrained(folder / "classifier")
    return folder / "classifier"


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_reward_model_is_no_policy(tmp_path, kind, tied):
    folder = save_classifier(tmp_path, kind, tied)
    config = config_of("grpo", folder)
    with pytest.raises(ConfigError, match=r"reward\.verifier=model:") as refused:
        build_host(config)
    assert "\n" not in str(refused.value) and "damaged" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"reward\.verifier=model:"):
        describe_model(engine_config(config))  # a server generates


def test_a_causal_class_of_any_name_loads(tiny, tmp_path):
    make_tiny(tmp_path / "named", seed=0, width=32)
    file = tmp_path / "named" / "config.json"
    for names in (["OwnLMHeadModel"], [], None):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": names}))
        load(ModelConfig(path=str(file.parent), dtype="float32"), CPU)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reward_model_is_trained_further(tmp_path, tied):
    folder = save_classifier(tmp_path, tied=tied)
    build_host(config_of("reward_model", folder))


# ---- critics


def critic_of(tiny, folder):
    return build_host(config_of("ppo", tiny, f"method.critic_path={folder}")).models["critic"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_loads_a_reward_model(tiny, tmp_path, tied):
    folder = save_classifier(tmp_path, tied=tied)
    critics = [critic_of(tiny, folder) for _ in range(2)]
    for p, again in zip(*(c.loaded.model.parameters() for c in critics), strict=True):
        assert torch.equal(p, again), "a missing LM head is drawn from the seed"
