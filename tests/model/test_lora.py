"""LoRA: only adapters are trained, all ports see one policy, and files hold a stock model."""

import dataclasses
import json

import pytest
import torch
from families import make_family
from refused import refused
from safetensors.torch import load_file, save_file
from tiny_runs import config_of, metrics_of, random_batch, stock_model, stock_outputs

from postgrad.cluster.host import build_host
from postgrad.config.schema import LoraConfig
from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.model.load.load import load, load_tokenizer, model_config
from postgrad.model.lora import adapter_parameters, add_adapters, merge_adapter, merged_weights
from postgrad.model.policy import FrozenPolicy, LocalPolicy
from postgrad.model.port import FULL, View, after
from postgrad.rollout.native.engine import NativeEngine
from postgrad.sizing import simulate
from postgrad.sizing.memory import state_bytes
from postgrad.training.driver import train
from postgrad.training.report import Reporter

peft = pytest.importorskip("peft")

LORA = ("model.lora.rank=4", "optimizer.lr=2e-2")
CPU = torch.device("cpu")


def train_steps(host, batch, steps: int = 2):
    """Take a few updates; return the weights from before."""
    before = {name: p.detach().clone() for name, p in host.policy.model.named_parameters()}
    for step in range(1, steps + 1):
        host.policy.update(batch, step)
    return before


def test_only_adapters_are_trained_and_new_ones_change_nothing(tiny):
    batch = random_batch(3)
    config = config_of("grpo", tiny, *LORA)
    plain = FrozenPolicy(config, load(config.model, CPU)).logprobs(batch)["logprobs"]
    host = build_host(config)
    assert torch.equal(host.policy.logprobs(batch)["logprobs"], plain)
    before = train_steps(host, batch)
    adapters = set(adapter_parameters(host.policy.model))
    assert len(adapters) == 2 * 7 * 2, "two matrices for each of seven linear layers of two blocks"
    assert set(host.policy.optimizer.masters) == adapters
    for name, p in host.policy.model.named_parameters():
        assert torch.equal(p, before[name]) != (name in adapters), name
        assert p.requires_grad == (name in adapters), name
    assert not torch.allclose(host.policy.logprobs(batch)["logprobs"], plain, atol=1e-3)


def test_adapters_of_transposed_layers_are_merged():
    """The weights of GPT-2's layers are (in, out)."""
    model = make_family("gpt2").eval()
    add_adapters(model, LoraConfig(rank=2), seed=0)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if ".lora_B." in name:
                parameter.normal_(0, 0.1)
    ids = torch.arange(10)[None]
    plain = make_family("gpt2").eval()
    before = plain(input_ids=ids).logits
    plain.load_state_dict(merged_weights(model), strict=False)
    merged = plain(input_ids=ids).logits
    torch.testing.assert_close(merged, model(input_ids=ids).logits, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(merged, before, atol=0.1)
    add_adapters(make_family("gpt2"), LoraConfig(rank=2, targets="c_attn"), seed=0)


def test_an_adapter_that_cannot_be_merged_is_refused(tiny, tmp_path):
    base = load(config_of("grpo", tiny).model, CPU).model
    settings = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    peft.get_peft_model(base, settings).save_pretrained(tmp_path)
    with refused("unsupported", "model.path"):
        merge_adapter(load(config_of("grpo", tiny).model, CPU).model, str(tmp_path))


def test_an_adapter_that_lacks_weights_of_the_base_model_is_refused(tiny, tmp_path):
    model = load(config_of("grpo", tiny).model, CPU).model
    options = peft.LoraConfig(r=2, target_modules=["q_proj"])
    adapted = peft.get_peft_model(model, options)
    adapted.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file, {"format": "pt"})
    with refused("damaged", "model.path") as caught:
        merge_adapter(adapted.unload(), str(tmp_path))
    assert "lora_A" in str(caught.value)


def test_layers_that_peft_refuses_are_refused_in_one_line():
    with refused("unsupported", "model.lora.rank"):
        add_adapters(make_family("mamba2"), LoraConfig(rank=2), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3_next"])
def test_experts_have_no_adapters_and_merged_weights_are_the_models(family):
    model = make_family(family)
    ids = torch.arange(8)[None]
    stock = {name: p.shape for name, p in model.named_parameters()}
    add_adapters(model, LoraConfig(rank=2), seed=0)
    for p in adapter_parameters(model).values():
        torch.nn.init.normal_(p, std=0.3)
    merged = merged_weights(model)
    assert {name: p.shape for name, p in merged.items()} == stock
    plain = make_family(family)
    plain.load_state_dict(merged, strict=False)
    assert torch.allclose(plain(ids).logits, model(ids).logits, atol=1e-4)


def test_targets_that_peft_would_turn_into_experts_are_refused():
    targets = LoraConfig(rank=2, targets="q_proj,gate_proj,up_proj")
    with refused("unsupported", "model.lora.targets"):
        add_adapters(make_family("qwen3_next"), targets, seed=0)


@pytest.mark.slow
def test_the_same_seed_draws_the_same_adapters(tiny):
    drawn = []
    for seed in (1, 1, 2):
        loaded = load(config_of("grpo", tiny).model, CPU)
        add_adapters(loaded.model, config_of("grpo", tiny, *LORA).model.lora, seed)
        parameters = adapter_parameters(loaded.model).items()
        first_matrices = [p.detach().flatten() for name, p in parameters if ".lora_A." in name]
        drawn.append(torch.cat(first_matrices))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert drawn[0].abs().max().item() <= 1 / 32**0.5
    assert drawn[0].std().item() > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tiny", "tiny_untied"])
def test_merged_and_unmerged_weights_give_the_same_log_probs(request, tmp_path, kind):
    """Read by stock transformers, by stock peft, by an engine that gets the weights, and by us."""
    model = request.getfixturevalue(kind)
    batch = random_batch(3)
    config = config_of("grpo", model, *LORA)
    host = build_host(config)
    train_steps(host, batch)
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


def test_the_reference_is_the_policys_base_model(tiny):
    config = config_of("grpo", tiny, *LORA, "method.kl=loss")
    host = build_host(config)
    batch = random_batch(3)
    reference = host.models["reference"]
    assert reference.policy is host.policy, "no second copy"
    before = reference.logprobs(batch)["logprobs"]
    batch.tokens["reference_logprobs"] = before
    train_steps(host, batch)
    assert torch.equal(reference.logprobs(batch)["logprobs"], before)
    assert not torch.allclose(host.policy.logprobs(batch)["logprobs"], before, atol=1e-3), (
        "the adapters are enabled again"
    )
    assert all(p.requires_grad for p in adapter_parameters(host.policy.model).values())


class OneBlock(PolicyObjective):
    def view(self, step: int) -> View:
        return after(1) if step == 1 else FULL


def test_an_internal_policy_trains_the_adapters_below_it(tiny_untied):
    config = config_of("grpo", tiny_untied, *LORA)
    loaded = load(config.model, CPU)
    add_adapters(loaded.model, config.model.lora, 0)
    policy = LocalPolicy(config, loaded, OneBlock(config))
    batch = random_batch(4)
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
    with_gradient = {
        name for name, p in policy.model.named_parameters() if p.requires_grad or p.grad is not None
    }
    assert with_gradient == changed, "base weights get no gradient, even after a change of views"


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


@pytest.mark.parametrize(
    ("targets", "named"),
    [("q_porj,v_proj", "did you mean q_proj"), ("lm_head", "lm_head"), ("embed_tokens", "embed")],
)
def test_targets_that_cannot_be_adapted_are_refused_by_name(tiny_untied, targets, named):
    with refused("unknown_name", "model.lora.targets", shows=named):
        build_host(config_of("grpo", tiny_untied, *LORA, f"model.lora.targets='{targets}'"))


def test_only_named_targets_are_adapted(tiny):
    host = build_host(config_of("grpo", tiny, *LORA, "model.lora.targets='q_proj, v_proj'"))
    layers = {name.split(".")[4] for name in adapter_parameters(host.policy.model)}
    assert layers == {"q_proj", "v_proj"}


def test_without_peft_the_error_names_the_install_command(tiny, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("not_installed", "model.lora.rank"):
        build_host(config_of("grpo", tiny, *LORA))


def test_an_adapter_folder_loads_as_a_model(tiny, tmp_path):
    host = build_host(config_of("grpo", tiny, *LORA))
    host.policy.save(str(tmp_path))
    config = dataclasses.replace(config_of("grpo", tiny).model, path=str(tmp_path / "adapter"))
    assert load_tokenizer(config).vocab_size == 18 and model_config(config).hidden_size == 32
    merged = load(config, CPU).model
    assert all(p.requires_grad for p in merged.parameters()), "it can be trained"
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(file.read_text().replace(str(tiny), "/no/such/model"))
    with refused("unreadable", "model.path"):
        load(config, CPU)
    file.write_text("{}")
    with refused("missing", "model.path"):
        load(config, CPU)
    file.write_text("{")
    with refused("unreadable", "model.path"):
        load(config, CPU)


def test_the_memory_estimate_counts_adapters(tiny):
    config = config_of("grpo", tiny)
    lora_config = config_of("grpo", tiny, *LORA)
    sizes = simulate.measure_size(config, model_config(config.model))
    lora_sizes = simulate.measure_size(lora_config, model_config(lora_config.model))
    host = build_host(lora_config)
    num_adapter_weights = sum(p.numel() for p in adapter_parameters(host.policy.model).values())
    assert sizes.trained == sizes.parameters
    assert lora_sizes.trained == num_adapter_weights
    assert lora_sizes.parameters == sizes.parameters + num_adapter_weights
    assert state_bytes(lora_config, lora_sizes)["optimizer state"] == 8 * num_adapter_weights


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_adapters_have_the_dtype_of_their_layers(tiny, device):
    """Where ranks read shards, and in the memory estimate, the model is on the meta device."""
    config = config_of("grpo", tiny, *LORA, "model.dtype=bfloat16")
    with torch.device(device):
        model = simulate.build_model(config, model_config(config.model))
        add_adapters(model, config.model.lora, 0)
    assert {p.dtype for p in adapter_parameters(model).values()} == {torch.bfloat16}
