"""How a model's forward passes are run, and what the model does with its logits after the head.

`model/load/gate.py` decides it when a model is loaded and notes it on the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from postgrad.errors import Unsupported
from postgrad.model.device import supports_captured_experts

if TYPE_CHECKING:  # imported by runs with pictures
    from postgrad.model.vision import Vision

PassKind = Literal["packed", "shared", "rows"]
PASS_KINDS: tuple[PassKind, ...] = ("packed", "shared", "rows")
STOCK_ATTENTION = "sdpa"  # of transformers, for the stock forward pass
# Model types whose blocks the captured graphs and the paged decoder know.
CAPTURED_FAMILIES = (
    "gemma3_text",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl_text",
)


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
    rounding: mean and largest effect of rounding on the stock model's log-probs, in nats.
    """

    passes: PassKind
    transform: LogitTransform = NO_TRANSFORM
    reasons: tuple[str, ...] = ()
    rounding: tuple[float, float] = (0.0, 0.0)


def set_support(model: Any, support: Support) -> None:
    """Note on the model how its passes are run."""
    model.postgrad_support = support


def support_of(model: Any) -> Support:
    """Return what set_support noted; a model that was built without load() counts by its family."""
    support = vars(model).get("postgrad_support")
    if support is None:
        known = in_captured_family(model) and not packing_problem(model)
        passes: PassKind = "packed" if known else "shared"
        support = Support(passes, transform_of(model))
    return support


def sees_pictures(model: Any) -> bool:
    """Return whether the model was loaded with what reads pictures, and the gate approved."""
    return not isinstance(vars(model).get("postgrad_vision"), str | None)


def vision_of(model: Any) -> "Vision":
    """Return how the model sees pictures. Raises ConfigError if it does not.

    picture_gate.py notes it on the model, or why the model sees none.
    """
    vision: Vision | str | None = vars(model).get("postgrad_vision")
    name = type(model).__name__
    if vision is None:
        raise Unsupported(
            f"the data have pictures, and {name} was loaded without the files of a processor "
            "(preprocessor_config.json); train a model of text and images, with these files"
        )
    if isinstance(vision, str):
        raise Unsupported(f"{name} cannot learn from pictures: {vision}", at="model.path")
    return vision


def set_attention(model: Any, name: str) -> None:
    """Choose the attention function of the language model; a vision tower keeps its own one."""
    config = model.config
    text = [key for key in config.sub_configs if getattr(config, key) is config.get_text_config()]
    model.set_attn_implementation({"": name, **dict.fromkeys(text, name)})


def packing_problem(model: Any) -> str:
    """Return why packed attention cannot express the model's attention; empty when it may."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := ", ".join(sorted(kinds - {"full_attention", "sliding_attention"})):
        return f"packed attention does not support {other}"
    if getattr(config, "attn_logit_softcapping", None):
        return "packed attention does not support capped scores"
    return ""


def in_captured_family(model: Any) -> bool:
    """Return whether the model's blocks are of a family that graphs and the paged decoder know."""
    return not family_problem(model)


def family_problem(model: Any) -> str:
    """Return why graphs and the paged decoder do not know the model's blocks; empty if they do."""
    model_type = model.config.get_text_config().model_type
    if model_type not in CAPTURED_FAMILIES:
        return f"model type {model_type} is not one of {', '.join(CAPTURED_FAMILIES)}"
    if not hasattr(model.get_decoder(), "layers"):
        return f"{type(model).__name__} has no list of blocks"
    return ""


def capture_problem(model: Any) -> str:
    """Return why passes through the model's blocks cannot be captured; empty when they can."""
    if problem := family_problem(model):
        return problem
    parameter = next(model.parameters())
    has_experts = any(hasattr(block.mlp, "experts") for block in model.get_decoder().layers)
    if has_experts and not supports_captured_experts(parameter.device, parameter.dtype):
        return "products of experts wait for the host here; in bfloat16 on Hopper they do not"
    return ""


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


def window_of(attention: Any) -> int:
    """Return the sliding window of an attention layer in tokens; 0 without one."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window or 0
    return getattr(attention.config, "sliding_window", None) or 0


def has_window(model: Any) -> bool:
    """Return whether some layer attends to a sliding window only."""
    return bool(getattr(model.config.get_text_config(), "sliding_window", None))


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Switch off what only training does (activation checkpointing, router noise)."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
