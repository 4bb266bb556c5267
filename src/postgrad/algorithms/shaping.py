"""Shaped rewards and ratios: DAPO's overlong penalty, LUFFY's off-policy and on-policy shaping.

LUFFY's off-policy loss is -A · off_policy_shape(log_ratio). The log-ratio of a demonstration is its
log-prob (its author's probability counts as 1); that of a replay is logprobs - recorded log-probs
(ExGRPO). The on-policy loss is -A · on_policy_reshape(...).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from postgrad.errors import Conflict, NoEffect, UnknownName, WrongValue, did_you_mean

SHAPES = ("none", "p_div_p", "logp", "p_logp", "square_root", "pow")
DEFAULTS = {"gamma": 0.1, "weight": 0.1, "exponent": 0.5}
ON_OPTIONS = tuple(DEFAULTS)
BOUNDS = ("min_value", "max_value")
OFF_OPTIONS = (*ON_OPTIONS, *BOUNDS)
# The options that each shape reads. LUFFY weighs its `logp` off-policy only.
ON_READS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(SHAPES, ()),
    "p_div_p": ("gamma",),
    "p_logp": ("weight",),
    "pow": ("exponent",),
}
OFF_READS = {
    shape: (*names, *BOUNDS) for shape, names in (ON_READS | {"logp": ("weight",)}).items()
}
MAX_LOG_RATIO = 20.0


def overlong_penalty(
    lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0
) -> Tensor:
    """(rows,) DAPO's penalty: 0 up to max_length - buffer tokens, -factor at max_length and beyond.

    It falls linearly in between. Raises ConfigError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise WrongValue(
            f"overlong buffer {buffer} is out of range; use 1 to max_length={max_length}",
            at="buffer",
        )
    lengths = lengths if lengths.is_floating_point() else lengths.to(torch.get_default_dtype())
    exceeded = lengths - (max_length - buffer)
    return -factor * (exceeded / buffer).clamp(0, 1)


def _check(shape: str, gamma: float) -> None:
    """Raise ConfigError for an unknown shape or gamma <= 0."""
    if shape not in SHAPES:
        raise UnknownName(f"unknown shaping {shape!r}; {did_you_mean(shape, SHAPES)}", at="shape")
    if shape == "p_div_p" and not gamma > 0:
        raise WrongValue(f"shaping p_div_p needs gamma > 0; got {gamma}", at="gamma")


def check_options(
    key: str, options: Mapping[str, float], known: Sequence[str], read: Sequence[str], reason: str
) -> None:
    """Raise ConfigError for shape options that are unknown, out of range or without effect.

    Args:
        key: the setting that holds the options, for error messages.
        options: the options by name.
        known: the names that shapes take.
        read: the names that the chosen shape reads. An unread option may keep its default.
        reason: why the others have no effect, such as `method.off_shape=none`.
    """
    for name in options:
        if name not in known:
            raise UnknownName(f"{key}.{name} is unknown; {did_you_mean(name, known)}")
    if not options.get("gamma", 1.0) > 0:
        raise WrongValue(f"{key}.gamma={options['gamma']} is out of range; it must be above 0")
    if not options.get("min_value", -math.inf) < options.get("max_value", math.inf):
        raise Conflict(
            f"{key}.min_value={options['min_value']} is not below "
            f"{key}.max_value={options['max_value']}; lower it"
        )
    for name, value in options.items():
        if name not in read and value != DEFAULTS.get(name):
            raise NoEffect(f"{key}.{name}={value:g} has no effect with {reason}; remove it")


def off_policy_shape(
    log_ratio: Tensor,
    shape: str = "p_div_p",
    *,
    gamma: float = DEFAULTS["gamma"],
    weight: float = DEFAULTS["weight"],
    exponent: float = DEFAULTS["exponent"],
    min_value: float | None = None,
    max_value: float | None = None,
) -> Tensor:
    """(tokens,) g(p) with gradient, for p = exp(log_ratio):

        none         p
        p_div_p      p / (p + gamma)
        logp         weight · log p
        p_logp       p + weight · log p
        square_root  √p
        pow          p^exponent

    The derivative of p_div_p by log p is p·gamma / (p + gamma)^2. It is largest (1/4) at p = gamma,
    so that unlikely tokens of a demonstration have the largest gradient. LUFFY offers gamma 0.1,
    0.3 and 0.5. min_value and max_value clamp g; outside them the gradient is 0.

    Raises: ConfigError for an unknown shape or gamma <= 0.
    """
    _check(shape, gamma)
    bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
    if shape == "p_div_p":
        # p / (p + gamma) is a sigmoid of log p, which cannot overflow.
        value = torch.sigmoid(log_ratio - torch.log(torch.full_like(log_ratio, gamma)))
    elif shape == "logp":
        value = weight * log_ratio
    elif shape == "p_logp":
        value = bounded.exp() + weight * log_ratio
    elif shape == "none":
        value = bounded.exp()
    else:
        power = 0.5 if shape == "square_root" else exponent
        value = (power * bounded).exp()
    if min_value is None and max_value is None:
        return value
    return value.clamp(min_value, max_value)


def on_policy_reshape(
    logprobs: Tensor,
    old_logprobs: Tensor,
    shape: str = "none",
    *,
    gamma: float = DEFAULTS["gamma"],
    weight: float = DEFAULTS["weight"],
    exponent: float = DEFAULTS["exponent"],
) -> Tensor:
    """(tokens,) the shaped ratio of the policy's own tokens, with gradient.

    With r = exp(logprobs - old_logprobs), d = log r and f(p) = p / (p + gamma):

        none         r
        p_div_p      f(p) / f(p_old)
        logp         d
        p_logp       r + weight · d
        square_root  √r
        pow          r^exponent

    d is clamped to +-20 before exp. `logp` has no weight here, as in LUFFY.

    Raises: ConfigError for an unknown shape or gamma <= 0.
    """
    _check(shape, gamma)
    delta = logprobs - old_logprobs.detach()
    ratio = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if shape == "p_div_p":
        # Both f are sigmoids of log p. Their log-quotient is clamped as d is.
        log_gamma = math.log(gamma)
        log_f = logsigmoid(logprobs - log_gamma)
        log_f_old = logsigmoid(old_logprobs.detach() - log_gamma)
        return (log_f - log_f_old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if shape == "logp":
        return delta
    if shape == "p_logp":
        return ratio + weight * delta
    if shape == "none":
        return ratio
    return ratio.pow(0.5 if shape == "square_root" else exponent)


def reshaped_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    shape: str,
    *,
    clip_low: float = math.inf,
    clip_high: float = math.inf,
    **options: float,
) -> Tensor:
    """(tokens,) PPO's loss on a reshaped ratio: max(-A v, -A clip(v, 1 - clip_low, 1 + clip_high)).

    v is on_policy_reshape of the same arguments.
    """
    value = on_policy_reshape(logprobs, old_logprobs, shape, **options)
    clipped = value.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(-advantages * value, -advantages * clipped)


def drop_confident(logprobs: Tensor, mask: Tensor, max_probability: float) -> Tensor:
    """(tokens,) bool: `mask` without tokens of a probability above `max_probability`.

    LUFFY calls it all_max_clip.
    """
    return mask.bool() & (logprobs.detach().exp() <= max_probability)
