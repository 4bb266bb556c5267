"""BuPO: layer-wise learning rates, refused settings, and that it learns."""

from pathlib import Path

import pytest
import torch
from bupo_models import bupo, is_above, run
from families import save_family
from method_runs import bound
from refused import refused
from tiny_runs import config_of

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


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt_neox", r"GPTNeoXForCausalLM has no embed_tokens"),
        ("granite", r"GraniteForCausalLM.*between its blocks"),
    ],
)
def test_a_model_of_another_layout_is_refused_by_name_and_nothing_is_written(
    family, message, verifiers, tmp_path
):
    model = save_family(tmp_path / "model", family)
    with refused("unsupported", "model.path", shows=message) as caught:
        run(
            "bupo",
            model,
            tmp_path / "runs",
            verifiers,
            "method.num_blocks=1",
            "method.phase_one_steps=1",
        )
    assert "\n" not in str(caught.value) and not (tmp_path / "runs").exists()


def test_the_depth_has_no_default(tiny):
    with refused("wrong_value", "method.num_blocks"):
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
