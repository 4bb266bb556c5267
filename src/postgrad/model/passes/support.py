"""How a model's forward passes are run, and what the model does with its logits after the head.

`model/gate.py` decides it when a model is loaded and notes it on the model.
"""

from dataclasses import dataclass
from typing import Any, Literal

PassKind = Literal["packed", "shared", "rows"]
PASS_KINDS: tuple[PassKind, ...] = ("packed", "shared", "rows")
PACKED_FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class LogitTransform:
    """How a model changes its logits before the softmax: softcap * tanh(scale * x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None


NO_TRANSFORM = LogitTransform()


@dataclass(frozen=True)
class Support:
    """How the passes of one model are run.

    passes: "packed" has no padding and computes each prompt once per pass; "shared" pads, and the
        responses of a prompt share it through a mask; "rows" is the stock forward pass with one
        padded row per trajectory, right for every architecture that is causal.
    reasons: for each faster kind that is not used, why.
    """

    passes: PassKind
    transform: LogitTransform = NO_TRANSFORM
    reasons: tuple[str, ...] = ()


def set_support(model: Any, support: Support) -> None:
    """Note on the model how its passes are run."""
    model.postgrad_support = support


def support_of(model: Any) -> Support:
    """Return what set_support noted; a model that was built without load() counts by its family."""
    support = vars(model).get("postgrad_support")
    if support is None:
        passes: PassKind = "packed" if in_packed_family(model) else "shared"
        support = Support(passes, transform_of(model))
    return support


def in_packed_family(model: Any) -> bool:
    """Return whether packed attention knows this architecture."""
    config = model.config.get_text_config()
    return config.model_type in PACKED_FAMILIES and not getattr(config, "use_sliding_window", False)


def transform_of(model: Any) -> LogitTransform:
    """Read from the configuration how the model scales and caps its logits."""
    config = model.config.get_text_config()
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale /= config.logits_scaling
    if getattr(config, "logit_scale", None):  # Cohere multiplies
        scale *= config.logit_scale
    if getattr(config, "lm_head_multiplier", None):  # Falcon H1 multiplies
        scale *= config.lm_head_multiplier
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))


def has_window(model: Any) -> bool:
    """Return whether some layer attends to a sliding window only."""
    return bool(getattr(model.config.get_text_config(), "sliding_window", None))
