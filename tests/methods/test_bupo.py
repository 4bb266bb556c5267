"""BuPO: which policy is trained when, which weights stay, and what is compared with which policy.

Views are tested in tests/model/test_views.py.
"""

import math
from pathlib import Path

import pytest
import torch
from method_runs import SMALL, VERIFIERS, Bound, bound
from method_runs import run as run_recipe
from tiny_runs import config_of, metrics_of, random_batch, rows_of, stock_model, tree

from postgrad.cluster.backends import open_models
from postgrad.cluster.host import build_host
from postgrad.errors import ConfigError
from postgrad.methods.base import Step
from postgrad.methods.bupo import Bupo
from postgrad.model.load import load
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes.head import TokenOutputs
from postgrad.model.passes.layout import make_padded_micro_batches
from postgrad.model.policy import LocalPolicy
from postgrad.model.tiny import make_tiny, tiny_tokenizer
from postgrad.model.views import FULL, View, after
from postgrad.training.driver import train
from postgrad.training.log import is_timing
from postgrad.training.report import Reporter
from postgrad.types import Batch

LAYERS = 3
ONE = ("method.num_blocks=1", "method.phase_one_steps=1", "optimizer.lr=1e-2")


def bupo(model: Path, *overrides: str, value=None) -> Bound:
    return bound("bupo", model, *ONE, *overrides, **({} if value is None else {"value": value}))


def gradients(policy: LocalPolicy, batch: Batch, step: int) -> dict[str, torch.Tensor | None]:
    """Every parameter's gradient of one optimizer step at a step of the run; cleared."""
    view = policy.objective.view(step)
    policy._freeze_unused(view)
    policy.accumulate(
        policy.objective.prepare(batch.select(range(len(batch)))), view, MetricAccumulator()
    )
    out = {
        name: None if m.grad is None else m.grad.clone()
        for name, m in policy.optimizer.masters.items()
    }
    policy.optimizer.adam.zero_grad(set_to_none=True)
    return out


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


def is_above(name: str, num_blocks: int) -> bool:
    return name == "model.norm.weight" or any(
        name.startswith(f"model.layers.{i}.") for i in range(num_blocks, LAYERS)
    )


# ---- the internal policy of stock classes


KINDS = ("Llama", "Qwen2", "Qwen3")


def stock_folder(kind: str, tied: bool, folder: Path) -> Path:
    import transformers

    shape = {
        "vocab_size": 18,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
    }
    shape |= {
        "num_key_value_heads": 1,
        "eos_token_id": 17,
        "pad_token_id": 16,
        "bos_token_id": None,
        "tie_word_embeddings": tied,
    }
    shape |= {"head_dim": 8} if kind == "Qwen3" else {}
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**shape)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.dim() == 2 else 1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


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
        policy, model = LocalPolicy(config, loaded, Bupo(config)), stock_model(folder)
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
    config = config_of("bupo", stock_folder("Llama", True, tmp_path), "method.num_blocks=1")
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
        step, batch = Step(number, b.feed), b.until("score", number)
        stages = b.method.stages()
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
    policy.accumulate(b.method.prepare(batch.select(range(len(batch)))), b.method.view(1), metrics)
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
    values = b.method.token_losses(batch, current, MetricAccumulator())
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
    policy = LocalPolicy(config, loaded, Bupo(config))
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


# ---- the full policy, the reference, the engine


@pytest.mark.slow
def test_old_log_probs_are_the_internal_policys_and_nobody_takes_them_for_the_engines(tiny_untied):
    """Step 1 computes the full policy once; step 2 does not and logs no engine gap."""
    b = bupo(tiny_untied, "method.phase_one_steps=2", "training.updates_per_step=4")
    for number in (1, 2):
        batch = b.until("estimate", number)
        policy = b.host.policy
        inside, full = (policy.logprobs(batch, view)["logprobs"] for view in (after(1), FULL))
        torch.testing.assert_close(batch.tokens["old_logprobs"], inside, rtol=0, atol=0)
        assert float((inside - full).abs().mean()) > 0.5
        assert b.metrics["internal/divergence"] == pytest.approx(
            float((full - inside).mean()), abs=1e-4
        )
        assert b.metrics["full/entropy"] == pytest.approx(-float(full.mean()), abs=1e-4)
        assert b.metrics["phase"] == 1 and b.metrics["blocks_run"] == pytest.approx(1 / 3)
        assert ("kl/engine" in b.metrics) == (number == 1) and b.metrics.get(
            "engine/gap_max", 0.0
        ) < 1e-4
    b.until("publish", 3)
    assert (
        b.metrics["phase"] == 2
        and b.metrics["blocks_run"] == 1.0
        and b.metrics["engine/gap_max"] < 1e-4
    )
    assert "internal/divergence" not in b.metrics and "internal/entropy" not in b.metrics


def test_the_shortcut_of_one_update_logs_the_divergence_beside_the_model(tiny_untied):
    """No old log-probs, no second pass: the update itself measures, on the rows it computes."""
    b = bupo(
        tiny_untied, "training.updates_per_step=1", "method.phase_one_steps=2", "optimizer.lr=1e-12"
    )
    assert "compute_old_logprobs" not in b.stages()
    batch = b.until("publish", 2)
    moving = b.method.prepare(batch.select(range(len(batch))))
    inside = b.host.policy.logprobs(moving, after(1))
    gap = float((moving.tokens["behavior_logprobs"] - inside["logprobs"]).mean())
    assert b.metrics["internal/divergence"] == pytest.approx(gap, abs=1e-4) and abs(gap) > 0.2
    assert (
        b.metrics["internal/entropy"]
        == b.metrics["entropy"]
        == pytest.approx(float(inside["entropy"].mean()), abs=1e-4)
    )
    assert "kl/engine" not in b.metrics and "engine/gap_mean" not in b.metrics


class Apart:
    """An engine that says it has weights of its own."""

    shares_weights = False

    def __init__(self, engine) -> None:
        self.generate = engine.generate

    def publish(self, weights) -> None:
        pass


def test_an_engine_apart_is_corrected_by_the_full_policy(tiny_untied):
    """The engine gives first tokens a third of the full probability: weight 3, truncated to 2."""
    b = bupo(tiny_untied, "method.phase_one_steps=2")
    b.method.ports.engine = Apart(b.host.engine)
    stages = b.stages()
    assert (
        stages.index("measure")
        < stages.index("compute_old_logprobs")
        < stages.index("correct")
        < stages.index("estimate")
    )
    batch = b.until("score", 2)
    full = b.host.policy.logprobs(batch)["logprobs"]
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[batch.response.offsets[:-1]] = True
    batch.tokens["behavior_logprobs"] = full - math.log(3) * first
    step = Step(2, b.feed)
    for stage in (b.method.measure, b.method.compute_old_logprobs, b.method.correct):
        batch = stage(batch, step)
    torch.testing.assert_close(
        batch.tokens["rollout_weights"], torch.where(first, 2.0, 1.0), rtol=1e-4, atol=1e-4
    )
    inside = b.host.policy.logprobs(batch, after(1))["logprobs"]
    torch.testing.assert_close(batch.tokens["old_logprobs"], inside, rtol=0, atol=0)
    assert step.metrics["kl/engine"] == pytest.approx(
        -math.log(3) * float(first.float().mean()), abs=1e-4
    )
    assert step.metrics["internal/divergence"] == pytest.approx(
        float((full - inside).mean()), abs=1e-4
    )


def test_the_reference_is_asked_for_the_same_depth(tiny_untied):
    b = bupo(tiny_untied, "method.kl=loss", "method.kl_coef=0.5", "training.updates_per_step=1")
    batch = b.until("estimate")
    inside = b.host.policy.logprobs(batch, after(1))["logprobs"]
    torch.testing.assert_close(batch.tokens["reference_logprobs"], inside, rtol=0, atol=1e-6)
    b.until("publish")
    assert b.metrics["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    assert all(
        g is None for name, g in gradients(b.host.policy, batch, 1).items() if is_above(name, 1)
    )


# ---- the schedule


@pytest.mark.parametrize(("phase_one", "phases"), [(0, [2, 2, 2]), (1, [1, 2, 2]), (3, [1, 1, 1])])
def test_phases_by_step(tiny_untied, phase_one, phases):
    config = config_of(
        "bupo",
        tiny_untied,
        "method.num_blocks=2",
        f"method.phase_one_steps={phase_one}",
        "training.steps=3",
    )
    method = Bupo(config)
    method.check()
    assert [1 if method.view(step) == after(2) else 2 for step in (1, 2, 3)] == phases


SMALL_RUN = (
    "optimizer.lr=1e-2",
    "training.steps=4",
    "training.checkpoint_every=1",
    "training.keep_checkpoints=9",
)


def steady(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if not is_timing(k)} for line in metrics_of(folder)]


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("verifiers") / "mine.py"
    file.write_text(VERIFIERS)
    return file


def run(
    recipe: str,
    model: Path,
    runs: Path,
    verifiers: Path,
    *overrides: str,
    reporter: Reporter | None = None,
):
    own = (f"reward.verifier={verifiers}:graded", f"runs={runs}")
    return train(
        config_of(recipe, model, *SMALL, *SMALL_RUN, *own, *overrides), reporter or Reporter()
    )


@pytest.mark.slow
def test_no_phase_one_is_grpo_to_the_bit(tiny_untied, verifiers, tmp_path):
    same = ("training.updates_per_step=2", "training.steps=3")
    ours = run(
        "bupo",
        tiny_untied,
        tmp_path / "a",
        verifiers,
        "method.num_blocks=1",
        "method.phase_one_steps=0",
        *same,
    ).folder
    clip = ("method.clip_low=0.2", "method.clip_high=0.2", "method.dual_clip=10")
    theirs = run("grpo", tiny_untied, tmp_path / "b", verifiers, *clip, *same).folder
    for file in ("policy/model.safetensors", "optimizer.safetensors"):
        one, two = (folder / "checkpoints" / "step-3" / file for folder in (ours, theirs))
        assert one.read_bytes() == two.read_bytes(), file
    more = {"phase", "blocks_run", "full/entropy"}
    assert [{k: v for k, v in line.items() if k not in more} for line in steady(ours)] == steady(
        theirs
    )


class Presses(Reporter):
    """Presses Ctrl-C while a given step runs."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, metrics, batch) -> None:
        import signal

        if metrics["step"] == self.at:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_resuming_around_the_switch_changes_nothing(tiny_untied, verifiers, tmp_path):
    """Phase 1 has two steps.

    The run stops after step 1, 2 or 3 and resumes. Checkpoints are stock.
    """
    overrides = ("method.num_blocks=1", "method.phase_one_steps=2", "training.updates_per_step=2")
    whole = run("bupo", tiny_untied, tmp_path / "whole", verifiers, *overrides).folder
    assert [line["phase"] for line in metrics_of(whole)] == [1, 1, 2, 2]
    for step in (1, 2, 3):
        first = run(
            "bupo", tiny_untied, tmp_path / str(step), verifiers, *overrides, reporter=Presses(step)
        )
        assert first.interrupted and first.step == step
        folder = run("bupo", tiny_untied, tmp_path / str(step), verifiers, *overrides).folder
        assert steady(folder) == steady(whole)
        for file in ("policy/model.safetensors", "optimizer.safetensors", "method.bin"):
            assert (folder / "checkpoints/step-4" / file).read_bytes() == (
                whole / "checkpoints/step-4" / file
            ).read_bytes()
    stock = stock_model(whole / "checkpoints" / "step-2" / "policy", torch.float32)
    assert stock.config.model_type == "qwen3" and type(stock).__name__ == "Qwen3ForCausalLM"
    before = dict(stock_model(tiny_untied, torch.float32).named_parameters())
    for name, p in stock.named_parameters():
        assert torch.equal(p, before[name]) == is_above(name, 1), (
            "after phase 1 the upper blocks are the model's own, bit for bit"
        )


@pytest.mark.slow
def test_the_numbers_are_the_same_with_the_model_in_a_process_of_its_own(tiny_untied):
    """The column `phase` tells the worker which policy it trains."""
    overrides = ("method.phase_one_steps=2", "training.updates_per_step=1", "method.kl=loss")
    results = []
    for where in ((), ("cluster.backend=process",)):
        with open_models(config_of("bupo", tiny_untied, *ONE, *overrides, *where)) as placed:
            config = config_of(
                "bupo",
                tiny_untied,
                *SMALL,
                *ONE,
                *overrides,
                *where,
                "training.problems_per_step=4",
            )
            b = Bound(config, placed=type("Host", (), placed._asdict()))
            seen = []
            for number in (1, 2, 3):
                b.until(number=number)
                seen.append({k: v for k, v in b.metrics.items() if not is_timing(k)})
            results.append((seen, placed.policy.weights()))
    assert results[0][0] == results[1][0] and "internal/divergence" in results[0][0][1]
    assert all(torch.equal(w, results[1][1][name]) for name, w in results[0][1].items())


# ---- layer-wise learning rates


def moved(model: Path, *overrides: str) -> dict[str, float]:
    """How far each parameter went in one step of the full policy."""
    b = bound(
        "bupo_grpo",
        model,
        "method.num_blocks=1",
        *overrides,
        "training.updates_per_step=1",
        "optimizer.lr=1e-3",
    )
    start = {name: w.clone() for name, w in b.host.policy.weights().items()}
    b.until()
    return {
        name: float((w - start[name]).abs().mean()) for name, w in b.host.policy.weights().items()
    }


@pytest.mark.slow
def test_the_share_of_the_rate_above_and_below(tiny_untied):
    plain = ("optimizer.weight_decay=0", "optimizer.eps=1e-12")
    whole = moved(tiny_untied, *plain)
    scaled = moved(tiny_untied, *plain, "method.lr_scale_above=0.1", "method.lr_scale_below=0.5")
    for name, distance in whole.items():
        share = 0.1 if is_above(name, 1) else 0.5 if name.startswith("model.layers.0.") else 1.0
        assert scaled[name] == pytest.approx(share * distance, rel=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize("side", ["above", "below"])
def test_a_share_of_zero_is_frozen_without_gradient_and_state(tiny_untied, side, tmp_path):
    """Also where the phases change what is frozen, and after saving and loading."""
    frozen = (
        (lambda name: is_above(name, 1))
        if side == "above"
        else (lambda name: name.startswith("model.layers.0."))
    )
    phase_one = 1 if side == "above" else 0
    b = bupo(
        tiny_untied,
        f"method.lr_scale_{side}=0",
        f"method.phase_one_steps={phase_one}",
        "optimizer.weight_decay=0.5",
    )
    policy = b.host.policy
    start = {name: w.clone() for name, w in policy.weights().items()}
    for number in (1, 2):
        b.until(number=number)
        assert {name for name, w in policy.weights().items() if torch.equal(w, start[name])} == {
            n for n in start if frozen(n)
        }
    assert set(policy.optimizer.masters) == {name for name in start if not frozen(name)}
    assert all(
        p.requires_grad != frozen(name) and p.grad is None
        for name, p in policy.model.named_parameters()
    )
    policy.save(str(tmp_path))
    policy.load(str(tmp_path))
    b.until(number=3)
    assert all(torch.equal(w, start[name]) == frozen(name) for name, w in policy.weights().items())


# ---- what is refused


def odd_model(kind: str, folder: Path) -> Path:
    import transformers as t

    shape = {
        "vocab_size": 18,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    shape |= {
        "num_key_value_heads": 2,
        "eos_token_id": 17,
        "pad_token_id": 16,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    makers = {
        "layout": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**shape)),
        "scaled embeddings": lambda: t.GraniteForCausalLM(
            t.GraniteConfig(**shape, embedding_multiplier=4.0)
        ),
    }
    makers[kind]().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("layout", r"GPTNeoXForCausalLM has no embed_tokens"),
        (
            "scaled embeddings",
            r"GraniteForCausalLM.*between its blocks",
        ),
    ],
)
def test_a_model_of_another_layout_is_refused_by_name_and_nothing_is_written(
    kind, message, verifiers, tmp_path
):
    model = odd_model(kind, tmp_path / "model")
    with pytest.raises(ConfigError, match=message) as caught:
        run(
            "bupo",
            model,
            tmp_path / "runs",
            verifiers,
            "method.num_blocks=1",
            "method.phase_one_steps=1",
        )
    assert "\n" not in str(caught.value) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["method.num_blocks=4"], r"method\.num_blocks=4 .*1\.\.3"),
        (["method.num_blocks=0"], r"method\.num_blocks=0"),
        (
            ["method.num_blocks=1", "method.phase_one_steps=5"],
            r"method\.phase_one_steps=5",
        ),
        (
            ["method.num_blocks=1", "method.lr_scale_below=0"],
            r"method\.lr_scale_below=0",
        ),
        (
            ["method.num_blocks=1", "method.internal_norm=finall"],
            r"method\.internal_norm=finall",
        ),
        (
            ["method.num_blocks=1", "method.lr_scale_above=-1"],
            r"method\.lr_scale_above=-1",
        ),
        (
            ["method.num_block=1"],
            r"method\.num_block; did you mean method\.num_blocks\?",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_and_nothing_is_written(
    overrides, key, tiny_untied, verifiers, tmp_path
):
    with pytest.raises(ConfigError, match=key):
        run("bupo", tiny_untied, tmp_path, verifiers, "method.phase_one_steps=1", *overrides)
    assert tree(tmp_path) == {}


def test_the_depth_has_no_default(tiny):
    with pytest.raises(ConfigError, match=r"method\.num_blocks"):
        config_of("grpo", tiny, "method=bupo")


@pytest.mark.slow
def test_the_recipes_count_blocks_from_one(tiny):
    """The original's internal_layer 5 and 26 are our 6 and 27."""
    found = {
        name: config_of(name, tiny).method
        for name in ("bupo", "bupo_llama", "bupo_grpo", "bupo_layerwise_lr")
    }
    assert [m.num_blocks for m in found.values()] == [6, 27, 6, 6]
    assert [m.phase_one_steps for m in found.values()] == [30, 20, 0, 0] and found[
        "bupo_layerwise_lr"
    ].lr_scale_above == 0.1
    assert all((m.clip_low, m.clip_high, m.dual_clip) == (0.2, 0.2, 10.0) for m in found.values())


# ---- it learns


@pytest.mark.slow
def test_phase_one_then_two_learns_to_write_sevens(verifiers, tmp_path):
    """Six steps on block 1 of 2, then the full policy: the reward rises from 0.06 above 0.5."""
    fresh = make_tiny(tmp_path / "fresh", seed=0, layers=2, width=32)
    overrides = (
        "optimizer.lr=5e-3",
        "training.steps=30",
        "training.problems_per_step=8",
        "rollout.samples=8",
    )
    more = (
        "training.checkpoint_every=1000",
        "training.updates_per_step=1",
        f"reward.verifier={verifiers}:sevens",
    )
    lines = run_recipe(
        "bupo",
        fresh,
        tmp_path,
        *overrides,
        *more,
        "method.num_blocks=1",
        "method.phase_one_steps=6",
    )
    rewards = [line["reward/mean"] for line in lines]
    assert [line["phase"] for line in lines] == [1] * 6 + [2] * 24
    assert sum(rewards[:2]) / 2 < 0.15 and sum(rewards[-3:]) / 3 > 0.5, rewards
    inside = [line["internal/entropy"] for line in lines[:6]]
    assert inside[-1] < inside[0], "the internal policy becomes surer of what was rewarded"
