"""BuPO: the internal policy, and what runs and what changes in phase 1.

Views are tested in tests/model/test_views.py.
"""

import math
from pathlib import Path

import pytest
import torch
from bupo_models import LAYERS, bupo, gradients, is_above
from families import save_family
from method_runs import bound
from tiny_runs import config_of, random_batch, rows_of, stock_model

from postgrad.cluster.host import build_host
from postgrad.methods.bupo import Bupo
from postgrad.methods.method import Step
from postgrad.model.load.load import load
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes.layout import make_padded_micro_batches
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import TokenOutputs, View, after
from postgrad.types import Batch


@torch.no_grad()
def wide_logprobs(policy: LocalPolicy, batch: Batch, view: View) -> torch.Tensor:
    """Log-probs in the model's own type, where the port answers in float32."""
    out = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for micro in make_padded_micro_batches(batch, 64, policy.width):
        where = batch.response.positions(torch.tensor(micro.rows))
        out[where] = policy.forward(micro, batch.response.values[where], view).logprobs
    return out


def in_phase(batch: Batch, phase: int) -> Batch:
    batch.rows["phase"] = [phase] * len(batch)
    return batch


# ---- the internal policy of stock classes


KINDS = ("llama", "qwen2", "qwen3")


def stock_folder(kind: str, tied: bool, folder: Path) -> Path:
    changes = {"num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
    return save_family(folder, kind, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_gradients_are_those_of_the_stock_hidden_state(
    kind, tied, checkpointing, tmp_path
):
    """The stock model's hidden_states[l] in float64: log-probs to 1e-6, gradients to 1e-5."""
    folder = stock_folder(kind, tied, tmp_path)
    batch = in_phase(random_batch(11), 1)
    del batch.tokens["old_logprobs"]
    for num_blocks in range(1, LAYERS):
        overrides = (
            f"method.num_blocks={num_blocks}",
            "rollout.temperature=0.7",
            f"model.activation_checkpointing={checkpointing}",
        )
        config = config_of("bupo", folder, *overrides)
        loaded = load(config.model, torch.device("cpu"))
        loaded.model.double()
        policy, model = LocalPolicy(config, loaded, Bupo(config).objective), stock_model(folder)
        ours = gradients(policy, batch, 1)
        logprobs = []
        for prompt, response in rows_of(batch):
            states = model(
                input_ids=torch.tensor([[*prompt, *response]]),
                output_hidden_states=True,
                use_cache=False,
            ).hidden_states
            logits = (
                states[num_blocks][0, len(prompt) - 1 : -1]
                @ model.get_output_embeddings().weight.T
                / 0.7
            )
            logprobs.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
        theirs = torch.cat(logprobs)
        torch.testing.assert_close(
            wide_logprobs(policy, batch, after(num_blocks)), theirs.detach(), rtol=0, atol=1e-6
        )
        mask, advantages = batch.tokens["loss_mask"], batch.tokens["advantages"].double()
        (
            -(advantages * theirs)[mask].sum() / mask.sum()
        ).backward()  # the ratio is 1, its gradient the log-prob's
        largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
        for name, p in model.named_parameters():
            if is_above(name, num_blocks):
                assert ours[name] is None and (p.grad is None or not p.grad.any()), name
            else:
                assert float(p.grad.abs().max()) > 0, name
                torch.testing.assert_close(
                    ours[name].double(), p.grad, rtol=0, atol=1e-5 * largest, msg=name
                )


def test_a_tied_head_is_one_tensor(tmp_path):
    config = config_of("bupo", stock_folder("llama", True, tmp_path), "method.num_blocks=1")
    policy = build_host(config).policy
    assert policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight
    assert "lm_head.weight" not in policy.weights()


@pytest.mark.slow
def test_all_blocks_with_the_norm_are_grpo_and_without_it_are_not(tiny_untied):
    """num_blocks = L with norm gives GRPO's loss and gradients.

    Without norm it is another policy.
    """
    overrides = (f"method.num_blocks={LAYERS}", "method.phase_one_steps=1")
    internal, full = (
        bound("bupo", tiny_untied, *overrides),
        bound("bupo_grpo", tiny_untied, f"method.num_blocks={LAYERS}"),
    )
    batch = random_batch(5)
    ours, theirs = (gradients(b.host.policy, in_phase(batch, 1), 1) for b in (internal, full))
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    tops = []
    hook = internal.host.policy.model.base_model.layers[-1].register_forward_hook(
        lambda *got: tops.append(got[-1])
    )
    prompt, response = rows_of(batch)[0]
    stock = internal.host.policy.model(
        input_ids=torch.tensor([[*prompt, *response]]), use_cache=False
    ).logits
    hook.remove()
    raw = tops[0] @ internal.host.policy.model.get_output_embeddings().weight.T
    assert float((raw.log_softmax(-1) - stock.log_softmax(-1)).detach().abs().max()) > 0.1


@pytest.mark.parametrize("norm", ["none", "final"])
def test_the_norm_is_a_setting_and_final_trains_it(tiny_untied, norm):
    policy = bupo(tiny_untied, f"method.internal_norm={norm}").host.policy
    batch = in_phase(random_batch(5), 1)
    assert policy.objective.view(1) == after(1, norm)
    assert (gradients(policy, batch, 1)["model.norm.weight"] is None) == (norm == "none")


def test_entropy_too_is_of_the_internal_policy_at_the_temperature(tiny_untied):
    policy = bupo(tiny_untied, "rollout.temperature=0.6").host.policy
    batch, model = random_batch(6), stock_model(tiny_untied)
    expected = []
    for prompt, response in rows_of(batch):
        states = model(
            input_ids=torch.tensor([[*prompt, *response]]), output_hidden_states=True
        ).hidden_states[1]
        logits = states[0, len(prompt) - 1 : -1] @ model.get_output_embeddings().weight.T / 0.6
        expected.append(torch.distributions.Categorical(logits=logits).entropy())
    found = policy.logprobs(batch, after(1))["entropy"]
    torch.testing.assert_close(found.double(), torch.cat(expected).detach(), rtol=1e-4, atol=1e-4)


# ---- what runs and what changes in phase 1


@pytest.mark.slow
def test_blocks_above_run_zero_times_in_both_passes(tiny_untied):
    """Counted calls: in phase 1 old log-probs and update stop after block 1.

    Phase 2 uses all blocks.
    """
    b = bupo(tiny_untied, "method.phase_one_steps=2")
    calls = [0] * LAYERS
    for i, block in enumerate(b.host.policy.model.base_model.layers):
        block.register_forward_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    for number, above in ((2, 0), (3, 1)):
        step, batch = Step(number, b.problem_queue), b.until("score", number)
        stages = [*b.method.sampling_stages(), *b.method.learning_stages()]
        names = [stage.__name__ for stage in stages]
        seen = {}
        for stage in stages[names.index("score") + 1 : names.index("publish")]:
            calls[:] = [0] * LAYERS
            batch = stage(batch, step)
            seen[stage.__name__] = list(calls)
        assert list(seen) == ["measure", "compute_old_logprobs", "estimate", "update"]
        assert seen["measure"] == seen["estimate"] == [0, 0, 0]
        for name in ("compute_old_logprobs", "update"):
            times = seen[name][0]
            assert times > 0 and seen[name] == [times, times * above, times * above], (number, name)


@pytest.mark.slow
def test_gradients_reach_embedding_head_and_the_blocks_below_only(tiny_untied):
    """Also with an entropy bonus: it is of the internal policy, so blocks above get no gradient."""
    for overrides in ((), ("method.entropy_coef=0.3",)):
        policy = bupo(tiny_untied, *overrides).host.policy
        found = gradients(policy, in_phase(random_batch(7), 1), 1)
        assert {name for name, g in found.items() if g is None} == {
            name for name in found if is_above(name, 1)
        }
        assert all(float(g.abs().max()) > 0 for g in found.values() if g is not None)
        assert {
            "model.embed_tokens.weight",
            "lm_head.weight",
            "model.layers.0.mlp.up_proj.weight",
        } <= {name for name, g in found.items() if g is not None}


def test_what_is_above_stays_and_has_no_state_until_phase_2(tiny_untied):
    b = bupo(tiny_untied, "optimizer.weight_decay=0.5", "training.updates_per_step=1")
    policy = b.host.policy
    start = {name: w.clone() for name, w in policy.weights().items()}
    b.until(number=1)
    first = {name: w.clone() for name, w in policy.weights().items()}
    assert {name for name in start if torch.equal(start[name], first[name])} == {
        name for name in start if is_above(name, 1)
    }
    masters, state = policy.optimizer.masters, policy.optimizer.adam.state
    assert {name for name, m in masters.items() if m not in state} == {
        name for name in start if is_above(name, 1)
    }
    b.until(number=2)
    assert all(not torch.equal(first[name], w) for name, w in policy.weights().items())
    steps = {name: int(state[m]["step"]) for name, m in masters.items()}
    assert steps == {name: 1 if is_above(name, 1) else 2 for name in steps}, (
        "the bias correction of the upper blocks starts afresh"
    )


@pytest.mark.parametrize("updates", [1, 4])
def test_the_first_update_starts_at_ratio_one(tiny_untied, updates):
    """The loss is minus the token mean of the advantages; nothing is clipped; policy_kl is 0."""
    b = bupo(tiny_untied, f"training.updates_per_step={updates}")
    batch = b.until("estimate")
    assert ("old_logprobs" in batch.tokens) == (updates > 1)
    policy, metrics = b.host.policy, MetricAccumulator()
    policy.accumulate(
        b.method.objective.prepare(batch.select(range(len(batch)))),
        b.method.objective.view(1),
        metrics,
    )
    out = metrics.result()
    mask = batch.tokens["loss_mask"]
    assert out["loss"] == pytest.approx(-float(batch.tokens["advantages"][mask].mean()), abs=1e-6)
    assert out["policy/clip_fraction"] == out["policy/dual_clip_fraction"] == 0.0
    assert out["policy/policy_kl"] == pytest.approx(0.0, abs=1e-6)


def test_the_authors_clip_bounds_reach_the_loss(tiny_untied):
    """A > 0: ratio at most 1.2.

    A < 0: at least 0.8, at most 10 without gradient, also beyond e^20.
    """
    b = bupo(tiny_untied)
    ratios = torch.tensor([1.5, 0.5, 0.5, 5.0, 12.0, math.exp(30)]).double()
    batch = in_phase(random_batch(3, groups=1, samples=1, longest=1), 1)
    batch = Batch.concat([batch] * 6)
    batch.tokens["loss_mask"] = torch.ones(6, dtype=torch.bool)
    batch.tokens["advantages"] = torch.tensor([1.0, 1, -1, -1, -1, -1]).double()
    batch.tokens["old_logprobs"] = torch.full((6,), -40.0).double()
    logprobs = (ratios.log() - 40).requires_grad_()
    current = TokenOutputs(logprobs, torch.zeros(6), torch.zeros(6))
    values = b.method.objective.token_losses(batch, current, MetricAccumulator())
    torch.testing.assert_close(
        values.detach(), torch.tensor([-1.2, -0.5, 0.8, 5.0, 10.0, 10.0]).double()
    )
    values.sum().backward()
    torch.testing.assert_close(
        logprobs.grad, torch.tensor([0.0, -0.5, 0.0, 5.0, 0.0, 0.0]).double()
    )


def test_split_packing_and_order_do_not_change_the_gradient_of_the_internal_policy(tiny_untied):
    config = config_of("bupo", tiny_untied, "method.num_blocks=2")
    loaded = load(config.model, torch.device("cpu"))
    loaded.model.double()
    policy = LocalPolicy(config, loaded, Bupo(config).objective)
    batch = in_phase(random_batch(101, groups=5, samples=4), 1)
    results = []
    for budget, width, order in ((8192, 10**6, 1), (8192, 1, -1), (13, 32, -1), (1, 32, 1)):
        policy.config.training.token_budget, policy.width = budget, width
        found = gradients(policy, batch.select(range(len(batch))[::order]), 1)
        results.append(torch.cat([g.flatten() for g in found.values() if g is not None]).double())
    scale = float(results[0].abs().max())
    for other in results[1:]:
        assert 0 <= float((other - results[0]).abs().max()) <= 1e-6 * scale


def test_a_later_token_or_a_neighbor_never_changes_an_internal_log_prob(tiny_untied):
    policy = bupo(tiny_untied).host.policy
    batch = random_batch(9, groups=2, samples=3, longest=6, longest_prompt=6)
    assert len(batch) > 2
    before = policy.logprobs(batch, after(2))["logprobs"].split(batch.response.lengths.tolist())
    for row, length in enumerate(batch.response.lengths.tolist()):
        changed = batch.select(range(len(batch)))
        last = int(batch.response.offsets[row]) + length - 1
        changed.response.values[last] = (int(changed.response.values[last]) + 5) % 16
        now = policy.logprobs(changed, after(2))["logprobs"].split(batch.response.lengths.tolist())
        for other in range(len(batch)):
            kept = length - 1 if other == row else None
            torch.testing.assert_close(now[other][:kept], before[other][:kept], rtol=0, atol=1e-5)
        assert abs(float(now[row][-1] - before[row][-1])) > 1e-3
