"""LoRA: only adapters learn, everybody sees one policy, and what leaves the process is a stock model."""

import dataclasses
import json

import pytest
import torch
from world import config_of, metrics_of, random_batch, stock_model, stock_outputs

from postgrad.cluster.host import build_host
from postgrad.doctor import fit, simulate
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.methods.grpo import Grpo
from postgrad.model.load import load, load_tokenizer, model_config
from postgrad.model.lora import adapter_parameters, add_adapters
from postgrad.model.policy import FrozenPolicy, LocalPolicy
from postgrad.model.views import FULL, View, after
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.engine import NativeEngine
from postgrad.training.driver import train
from postgrad.training.report import Reporter

peft = pytest.importorskip("peft")

LORA = ("model.lora.rank=4", "optimizer.lr=2e-2")
CPU = torch.device("cpu")


def moved(host, batch, steps: int = 2):
    """The host after a few updates, with its weights from before."""
    before = {name: p.detach().clone() for name, p in host.policy.model.named_parameters()}
    for step in range(1, steps + 1):
        host.policy.update(batch, step)
    return before


def test_only_adapters_learn_and_fresh_ones_change_nothing(tiny):
    batch = random_batch(3)
    config = config_of("grpo", tiny, *LORA)
    plain = FrozenPolicy(config, load(config.model, CPU)).logprobs(batch)["logprobs"]
    host = build_host(config)
    assert torch.equal(host.policy.logprobs(batch)["logprobs"], plain)
    before = moved(host, batch)
    own = set(adapter_parameters(host.policy.model))
    assert len(own) == 2 * 7 * 2, "two matrices for each of seven linear layers of two blocks"
    assert set(host.policy.optimizer.masters) == own
    for name, p in host.policy.model.named_parameters():
        assert torch.equal(p, before[name]) != (name in own), name
        assert p.requires_grad == (name in own), name
    assert not torch.allclose(host.policy.logprobs(batch)["logprobs"], plain, atol=1e-3)


def test_the_same_seed_draws_the_same_adapters(tiny):
    found = []
    for seed in (1, 1, 2):
        loaded = load(config_of("grpo", tiny).model, CPU)
        add_adapters(loaded.model, config_of("grpo", tiny, *LORA).model.lora, seed)
        found.append(
            torch.cat(
                [
                    p.detach().flatten()
                    for n, p in adapter_parameters(loaded.model).items()
                    if ".lora_A." in n
                ]
            )
        )
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert found[0].abs().max().item() <= 1 / 32**0.5 and found[0].std().item() > 0.05


@pytest.mark.parametrize("kind", ["tiny", "tiny_untied"])
def test_merged_is_unmerged_for_everybody(request, tmp_path, kind):
    """The checkpoint by stock transformers, the adapter by stock peft, an engine that is handed the weights, and our own loading."""
    model, batch = request.getfixturevalue(kind), random_batch(3)
    config = config_of("grpo", model, *LORA)
    host = build_host(config)
    moved(host, batch)
    ours = host.policy.logprobs(batch)["logprobs"]
    host.policy.save(str(tmp_path))
    with torch.no_grad():
        stock, _ = stock_outputs(stock_model(tmp_path / "policy"), batch)
        base = stock_model(model)
        through_peft, _ = stock_outputs(
            peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), batch
        )
    torch.testing.assert_close(stock.float(), ours, rtol=0, atol=1e-5)
    torch.testing.assert_close(through_peft.float(), ours, rtol=0, atol=1e-5)
    for folder in ("policy", "adapter"):
        again = load(dataclasses.replace(config.model, path=str(tmp_path / folder)), CPU)
        torch.testing.assert_close(
            FrozenPolicy(config, again).logprobs(batch)["logprobs"], ours, rtol=0, atol=1e-5
        )
    apart = load(config.model, CPU)
    assert host.policy.weights().keys() == dict(apart.model.named_parameters()).keys(), (
        "the base model's own names"
    )
    NativeEngine(apart, config.rollout).publish(host.policy.weights())
    torch.testing.assert_close(
        FrozenPolicy(config, apart).logprobs(batch)["logprobs"], ours, rtol=0, atol=1e-5
    )
    for name, p in load(config.model, CPU).model.named_parameters():
        differs = not torch.equal(p, host.policy.weights()[name])
        assert differs == ("proj" in name), name


def test_the_engine_samples_from_the_adapted_policy(tiny):
    config = config_of("grpo", tiny, *LORA)
    host, batch = build_host(config), random_batch(3)
    asked = [Request([1, 2, 3], [7, 8, 9]), Request([4, 15], [10])]
    fresh = host.engine.generate(asked, Sampling(1.0, 8))
    moved(host, batch, steps=4)
    sampled = host.engine.generate(asked, Sampling(1.0, 8))
    assert [c.logprobs for g in fresh for c in g] != [c.logprobs for g in sampled for c in g]
    from postgrad.types import Batch, Trajectory

    rows = [
        Trajectory("u", r.prompt, c.tokens, 0, 0)
        for r, group in zip(asked, sampled, strict=True)
        for c in group
    ]
    trainer = host.policy.logprobs(Batch.of(rows))["logprobs"]
    engine = torch.tensor([p for group in sampled for c in group for p in c.logprobs])
    torch.testing.assert_close(engine, trainer, rtol=0, atol=1e-5)


def test_the_reference_is_the_policys_own_base(tiny):
    config = config_of("grpo", tiny, *LORA, "method.kl=loss")
    host, batch = build_host(config), random_batch(3)
    reference = host.models["reference"]
    assert reference.model is host.policy.model, "no second copy"
    before = reference.logprobs(batch)["logprobs"]
    batch.tokens["reference_logprobs"] = before
    moved(host, batch)
    assert torch.equal(reference.logprobs(batch)["logprobs"], before)
    assert not torch.allclose(host.policy.logprobs(batch)["logprobs"], before, atol=1e-3), (
        "the adapters are on again"
    )
    assert all(p.requires_grad for p in adapter_parameters(host.policy.model).values())


class OneBlock(Grpo):
    def view(self, step: int) -> View:
        return after(1) if step == 1 else FULL


def test_an_internal_policy_trains_the_adapters_below_it(tiny_untied):
    config = config_of("grpo", tiny_untied, *LORA)
    loaded = load(config.model, CPU)
    add_adapters(loaded.model, config.model.lora, 0)
    policy, batch = LocalPolicy(config, loaded, OneBlock(config)), random_batch(4)
    start = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    policy.update(batch, 1)
    changed = {
        name for name, p in policy.model.named_parameters() if not torch.equal(p, start[name])
    }
    assert changed and all(
        name.startswith("model.layers.0.") and ".lora_" in name for name in changed
    )
    policy.update(batch, 2)
    changed = {
        name for name, p in policy.model.named_parameters() if not torch.equal(p, start[name])
    }
    assert changed == set(adapter_parameters(policy.model)), (
        "the full policy trains all adapters, and nothing else"
    )
    still = [
        name for name, p in policy.model.named_parameters() if p.requires_grad or p.grad is not None
    ]
    assert set(still) == changed, (
        "the model itself never gets a gradient, not after a change of views either"
    )


def test_load_goes_back_to_the_saved_bits(tiny, tmp_path):
    host, batch = build_host(config_of("grpo", tiny, *LORA)), random_batch(3)
    moved(host, batch)
    host.policy.save(str(tmp_path))
    saved = host.policy.logprobs(batch)["logprobs"]
    host.policy.update(batch, 3)
    further = {name: w.clone() for name, w in host.policy.weights().items()}
    other = build_host(config_of("grpo", tiny, *LORA))
    other.policy.load(str(tmp_path))
    assert torch.equal(other.policy.logprobs(batch)["logprobs"], saved)
    other.policy.update(batch, 3)
    assert all(torch.equal(w, further[name]) for name, w in other.policy.weights().items())


@pytest.mark.slow
def test_grpo_with_adapters_learns(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def threes(response, problem):\n    return response.count('3') / 3\n"
    )
    overrides = (
        "rollout.samples=8",
        "rollout.max_response_tokens=3",
        "training.problems_per_step=8",
        "reward.workers=1",
    )
    own = (
        "model.lora.rank=8",
        "optimizer.lr=2e-2",
        "training.steps=30",
        "training.checkpoint_every=30",
        "method.kl=loss",
    )
    given = (f"reward.verifier={tmp_path / 'mine.py'}:threes", f"runs={tmp_path}")
    result = train(config_of("grpo", tiny, *overrides, *own, *given), Reporter())
    rewards = [line["reward/mean"] for line in metrics_of(result.folder)]
    assert sum(rewards[:3]) / 3 < 0.2 and sum(rewards[-3:]) / 3 > 0.6, rewards
    assert max(line["engine/gap_max"] for line in metrics_of(result.folder)) < 1e-4
    kept = json.loads(
        (result.folder / "checkpoints" / "step-30" / "adapter" / "adapter_config.json").read_text()
    )
    assert kept["base_model_name_or_path"] == str(tiny) and kept["r"] == 8


def test_supervised_training_may_drop_inputs_and_repeats_them(tiny):
    overrides = (*LORA, "model.lora.dropout=0.5")
    config = config_of("sft", tiny, *overrides)
    find_method("sft")(config).check()
    ends = []
    for _ in range(2):
        host = build_host(config)
        moved(host, random_batch(3))
        ends.append(host.policy.weights())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    host = build_host(config_of("sft", tiny, *LORA))
    moved(host, random_batch(3))
    assert any(not torch.equal(ends[0][name], w) for name, w in host.policy.weights().items()), (
        "dropout does something"
    )
    with pytest.raises(ConfigError, match=r"model.lora.dropout=0.5 .* grpo refuses it"):
        find_method("grpo")(config_of("grpo", tiny, *overrides)).check()


@pytest.mark.parametrize(
    ("targets", "overrides"),
    [
        (
            "q_porj,v_proj",
            "'q_porj' is not a linear layer inside the model's blocks; did you mean q_proj?",
        ),
        ("lm_head", "'lm_head' is not a linear layer"),
        ("embed_tokens", "'embed_tokens' is not a linear layer"),
    ],
)
def test_targets_that_cannot_be_adapted_are_named(tiny_untied, targets, overrides):
    with pytest.raises(ConfigError, match=f"model.lora.targets={targets}") as caught:
        build_host(config_of("grpo", tiny_untied, *LORA, f"model.lora.targets='{targets}'"))
    assert overrides in str(caught.value)


def test_named_targets_only(tiny):
    host = build_host(config_of("grpo", tiny, *LORA, "model.lora.targets='q_proj, v_proj'"))
    assert {name.split(".")[4] for name in adapter_parameters(host.policy.model)} == {
        "q_proj",
        "v_proj",
    }


def test_without_peft_one_line_says_what_to_install(tiny, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'postgrad\[lora\]'"):
        build_host(config_of("grpo", tiny, *LORA))


def test_an_adapter_folder_is_a_model_path(tiny, tmp_path):
    host = build_host(config_of("grpo", tiny, *LORA))
    host.policy.save(str(tmp_path))
    config = dataclasses.replace(config_of("grpo", tiny).model, path=str(tmp_path / "adapter"))
    assert load_tokenizer(config).vocab_size == 18 and model_config(config).hidden_size == 32
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(file.read_text().replace(str(tiny), "/no/such/model"))
    with pytest.raises(ConfigError, match="/no/such/model"):
        load(config, CPU)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="names no model"):
        load(config, CPU)
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(config, CPU)


def test_the_foretold_memory_knows_adapters(tiny):
    whole, small = (config_of("grpo", tiny, *overrides) for overrides in ((), LORA))
    sizes = [simulate.measure(config, model_config(config.model)) for config in (whole, small)]
    host = build_host(small)
    assert sizes[0].trained == sizes[0].parameters
    assert sizes[1].trained == sum(
        p.numel() for p in adapter_parameters(host.policy.model).values()
    )
    assert sizes[1].parameters == sizes[0].parameters + sizes[1].trained
    assert fit.state_bytes(small, sizes[1])["optimizer state"] == 8 * sizes[1].trained
