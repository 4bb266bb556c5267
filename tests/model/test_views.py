"""The policy after some blocks equals the stock model's hidden states through the head."""

import pytest
import torch
from families import save_family
from refused import refused
from tiny_runs import config_of, random_batch, rows_of, stock_model

from postgrad.cluster.host import build_host
from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.model.load.load import load
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL, View, after
from postgrad.model.views import check_view, hidden_states, unused_parameters

LAYERS = 3


@pytest.fixture(scope="module")
def policy(tiny_untied) -> LocalPolicy:
    return build_host(config_of("grpo", tiny_untied, "rollout.temperature=0.7")).policy


def internal_logprobs(model, batch, num_blocks: int, norm: str = "none") -> torch.Tensor:
    """Return log-probs of the stock model's hidden_states[num_blocks], row by row."""
    out = []
    for prompt, response in rows_of(batch):
        states = model(
            input_ids=torch.tensor([[*prompt, *response]]),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        hidden = states[num_blocks][0, len(prompt) - 1 : -1]
        hidden = model.base_model.norm(hidden) if norm == "final" else hidden
        logits = model.get_output_embeddings()(hidden) / 0.7
        out.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(out)


def test_internal_states_of_two_rotary_tables_are_the_stock_models():
    """Gemma 3 has other rotary positions in its sliding layers than in the full ones."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=18, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    ids = torch.arange(1, 4)[None]
    stock = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    for num_blocks in (1, 2):
        ours = hidden_states(model, ids, torch.arange(3)[None], None, after(num_blocks))
        torch.testing.assert_close(ours, stock[num_blocks])


@pytest.mark.parametrize("norm", ["none", "final"])
def test_a_view_of_phi_has_the_bias_of_the_head(norm, tmp_path):
    folder = save_family(tmp_path, "phi")
    policy = build_host(config_of("grpo", folder, "rollout.temperature=0.7")).policy
    batch = random_batch(23, groups=3, samples=2)
    ours = policy.logprobs(batch, after(1, norm))["logprobs"]
    model = stock_model(folder)
    model.model.norm = model.model.final_layernorm
    expected = internal_logprobs(model, batch, 1, norm)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["none", "final"])
@pytest.mark.parametrize("num_blocks", range(1, LAYERS))
def test_a_view_equals_the_hidden_state_through_the_head(policy, tiny_untied, num_blocks, norm):
    batch = random_batch(21, groups=4, samples=3)
    ours = policy.logprobs(batch, after(num_blocks, norm))["logprobs"]
    torch.testing.assert_close(
        ours.double(),
        internal_logprobs(stock_model(tiny_untied), batch, num_blocks, norm),
        rtol=1e-4,
        atol=1e-4,
    )


def test_after_all_blocks_is_the_full_policy(policy):
    batch = random_batch(22)
    full, last = policy.logprobs(batch, FULL), policy.logprobs(batch, after(LAYERS))
    torch.testing.assert_close(full["logprobs"], last["logprobs"], rtol=0, atol=1e-6)
    assert not torch.allclose(
        full["logprobs"], policy.logprobs(batch, after(LAYERS - 1))["logprobs"], atol=1e-2
    )


@pytest.mark.parametrize("num_blocks", [0, -1, LAYERS + 1])
def test_a_depth_out_of_range_is_refused_with_the_range(policy, num_blocks):
    with refused("wrong_value", "num_blocks", shows=f"1..{LAYERS}"):
        policy.logprobs(random_batch(1), View(num_blocks))


def test_a_model_of_another_layout_is_refused():
    import transformers

    config = transformers.GPT2Config(vocab_size=18, n_embd=8, n_layer=1, n_head=2)
    with refused("unsupported", "model.path", shows="embed_tokens"):
        check_view(transformers.GPT2LMHeadModel(config), after(1))


@pytest.mark.parametrize("num_blocks", [1, 2, 3, None])
def test_blocks_above_the_view_do_not_run(policy, num_blocks):
    calls = [0] * LAYERS
    hooks = [
        block.register_forward_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
        for i, block in enumerate(policy.model.base_model.layers)
    ]
    try:
        policy.logprobs(random_batch(3, groups=1, samples=1), View(num_blocks))
    finally:
        for hook in hooks:
            hook.remove()
    below = LAYERS if num_blocks is None else num_blocks
    assert calls == [1] * below + [0] * (LAYERS - below)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, None])
@pytest.mark.parametrize("norm", ["none", "final"])
def test_unused_parameters_are_the_blocks_above_and_the_norm(policy, num_blocks, norm):
    unused = {id(p) for p in unused_parameters(policy.model, View(num_blocks, norm))}
    names = {name for name, p in policy.model.named_parameters() if id(p) in unused}
    blocks_above = range(num_blocks or LAYERS, LAYERS)
    prefixes = tuple(f"model.layers.{block}." for block in blocks_above)
    if num_blocks not in (None, LAYERS) and norm == "none":
        prefixes += ("model.norm.",)
    expected = {name for name, _ in policy.model.named_parameters() if name.startswith(prefixes)}
    assert names == expected


class TwoPhases(PolicyObjective):
    def view(self, step: int) -> View:
        return after(1) if step == 1 else FULL


def test_an_update_of_a_view_changes_no_bit_above_it(tiny_untied):
    config = config_of("grpo", tiny_untied, "optimizer.lr=1e-2", "optimizer.weight_decay=0.5")
    policy = LocalPolicy(config, load(config.model, torch.device("cpu")), TwoPhases(config))
    batch = random_batch(4)
    start = {name: w.clone() for name, w in policy.weights().items()}
    policy.update(batch.select(range(len(batch))), 1)
    first = {name: w.clone() for name, w in policy.weights().items()}
    changed = {name for name in start if not torch.equal(start[name], first[name])}
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert "lm_head.weight" in changed
    assert "model.embed_tokens.weight" in changed
    above = ("model.layers.1.", "model.layers.2.", "model.norm")
    assert not any(name.startswith(above) for name in changed)
    policy.update(batch.select(range(len(batch))), 2)
    second = policy.weights()
    assert all(not torch.equal(first[name], second[name]) for name in first), (
        "the full policy trains everything again"
    )
