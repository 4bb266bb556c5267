"""Folders of reward models: no policy, but a critic may start from one."""

import json

import pytest
import torch
from parallel import SquaredError, make_config
from ranks import run_on_ranks
from refused import refused
from tiny_runs import config_of, random_batch

from postgrad.cluster.engines import describe_model, engine_config
from postgrad.cluster.host import build_host, load_role
from postgrad.config.schema import ModelConfig
from postgrad.model.load.load import load
from postgrad.model.load.tiny import make_tiny, tiny_tokenizer
from postgrad.model.parallel.ranks import Ranks
from postgrad.model.scored import LocalCritic

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
    with refused("wrong_value", "model.path") as caught:
        build_host(config)
    assert "\n" not in str(caught.value) and "damaged" not in str(caught.value)
    with refused("wrong_value", "model.path"):
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


def reward_scores(folder, batch):
    """Return (tokens,) transformers' score of the text before each response token."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = None  # every token is text
    scores = []
    for prompt, response in zip(batch.prompt.split(), batch.response.split(), strict=True):
        for length in range(len(response)):
            with torch.no_grad():
                logits = model(input_ids=torch.cat([prompt, response[:length]])[None]).logits
            scores.append(float(logits[0, 0]))
    return torch.tensor(scores)


def test_values_of_a_critic_start_as_the_scores_of_its_reward_model(tiny, tmp_path):
    batch = random_batch(1, groups=2, samples=2)
    folder = save_classifier(tmp_path)
    values = critic_of(tiny, folder).values(batch)
    expected = reward_scores(folder, batch)
    assert expected.std() > 0.1
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


def test_values_of_a_critic_start_as_those_of_a_saved_critic(tiny, tmp_path):
    batch = random_batch(1, groups=2, samples=2)
    saved = critic_of(tiny, save_classifier(tmp_path))
    with torch.no_grad():
        saved.head.bias.fill_(0.25)
    saved.save(str(tmp_path))
    values = critic_of(tiny, tmp_path / "critic").values(batch)
    assert values.std() > 0.1
    torch.testing.assert_close(values, saved.values(batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_labels", [0, 2])
def test_values_start_at_zero_without_a_head_of_one_score(tiny, tmp_path, num_labels):
    folder = save_classifier(tmp_path, "Token", num_labels=2) if num_labels else tiny
    assert not critic_of(tiny, folder).values(random_batch(1)).any()


def values_on_rank(folder, batch):
    config = make_config(folder, ["cluster=ray"])
    ranks = Ranks.from_process_group(CPU, config.cluster)
    path = config.model.path
    loaded = load_role(config, "critic", path, ranks, uses_lm_head=False)
    return LocalCritic(config, loaded, SquaredError(), 1e-2, path, ranks).values(batch)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_values_on_ranks_start_as_the_scores_too(tmp_path, tied):
    batch = random_batch(1, groups=2, samples=2)
    folder = save_classifier(tmp_path, tied=tied)
    expected = reward_scores(folder, batch)
    for values in run_on_ranks(2, values_on_rank, folder, batch):
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
