"""The loss of TRL's GRPOConfig: loss_type, importance_sampling_level and what goes with them."""

from collections.abc import Mapping

# (loss, aggregation) here by loss_type.
GRPO_LOSSES = {
    "grpo": ("ppo_clip", "seq-mean-token-mean"),
    "dapo": ("ppo_clip", "token-mean"),
    "bnpo": ("ppo_clip", "token-mean"),
    "dr_grpo": ("ppo_clip", "seq-mean-token-sum-norm"),
    "luspo": ("ppo_clip", "seq-mean-token-sum"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "vespo": ("vespo", "token-mean"),
}
# Options of losses: the loss that reads them, the option here.
LOSS_OPTIONS = {
    "sapo_temperature_pos": ("sapo", "temperature_positive"),
    "sapo_temperature_neg": ("sapo", "temperature_negative"),
    "vespo_k_pos": ("vespo", "power_positive"),
    "vespo_lambda_pos": ("vespo", "decay_positive"),
    "vespo_k_neg": ("vespo", "power_negative"),
    "vespo_lambda_neg": ("vespo", "decay_negative"),
}
_CLIPS = ("epsilon", "epsilon_high", "delta")
HANDLED = ("loss_type", "importance_sampling_level", *_CLIPS, *LOSS_OPTIONS)
DEFAULT_CLIP = "0.2"


def translate_grpo_loss(settings: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(overrides, lines about what has no equivalent) of the arguments in HANDLED."""
    kind = settings.get("loss_type", "dapo")
    level = settings.get("importance_sampling_level", "token")
    if kind not in GRPO_LOSSES or level not in ("token", "sequence"):
        return {}, [f"{key}={settings[key]}" for key in HANDLED if key in settings]
    loss, aggregation = GRPO_LOSSES[kind]
    missing: list[str] = []
    if level == "sequence" and loss == "ppo_clip":
        loss = "gspo"
    elif level == "sequence" and loss != "vespo":  # vespo always has one ratio per response
        missing.append(f"importance_sampling_level=sequence: {loss} has a ratio per token here")
    overrides = {"method.aggregation": aggregation} if "loss_type" in settings else {}
    if loss != "ppo_clip":
        overrides["method.loss"] = loss
    clips, lines = _clips(loss, settings)
    for key, (reader, option) in LOSS_OPTIONS.items():
        if key in settings and loss == reader:
            overrides[f"method.loss_options.{option}"] = settings[key]
    return overrides | clips, missing + lines


def translate_rloo_clip(settings: Mapping[str, str], has_updates: bool) -> list[str]:
    """Lines about the clip of RLOOConfig, which acts from the second update of a rollout on."""
    if not has_updates:
        return []
    given = ", ".join(f"{key}={settings[key]}" for key in _CLIPS if key in settings)
    return [
        f"{given or 'epsilon=0.2'}: TRL clips the ratio of the whole response from the second "
        "update of a rollout on; the recipe rloo has no ratio"
    ]


def _clips(loss: str, settings: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The bounds of the ratio. TRL's other losses than GRPO's do not read epsilon and delta."""
    if loss == "cispo":
        return _cispo_clip(settings)
    if loss not in ("ppo_clip", "gspo"):
        return {}, []
    clips: dict[str, str] = {}
    if "epsilon" in settings or loss == "gspo":
        low = settings.get("epsilon", DEFAULT_CLIP)
        clips = {"method.clip_low": low, "method.clip_high": low}
    if "epsilon_high" in settings:
        clips["method.clip_high"] = settings["epsilon_high"]
    if "delta" not in settings:
        return clips, []
    if loss == "gspo":
        return clips, [f"delta={settings['delta']}: gspo has no bound where advantages are < 0"]
    return clips | {"method.dual_clip": settings["delta"]}, []


def _cispo_clip(settings: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """TRL's epsilon_high is the largest weight itself, and there is no smallest one."""
    largest = settings.get("epsilon_high", settings.get("epsilon", DEFAULT_CLIP))
    try:
        above = float(largest) - 1
    except ValueError:
        return {}, [f"epsilon_high={largest}"]
    if above < 0:
        line = f"epsilon_high={largest}: TRL's cispo limits all weights to it; here at least to 1"
        return {}, [line]
    return {"method.clip_high": f"{above:.6g}"}, []
