"""Policy losses and rollout correction of verl: their options, defaults and aggregation here."""

from postgrad.config.import_result import Translation, split_list

_CORRECTION = "algorithm.rollout_correction."
_UNSET = ("null", "None", "none", "", "False", "false")
# Options of losses by the last part of verl's name: the losses that read them, the option here.
LOSS_OPTIONS = {
    "tau_pos": (("sapo",), "temperature_positive"),
    "tau_neg": (("sapo",), "temperature_negative"),
    "clip_cov_ratio": (("clip_cov",), "cov_share"),
    "clip_cov_lb": (("clip_cov",), "cov_low"),
    "clip_cov_ub": (("clip_cov",), "cov_high"),
    "kl_cov_ratio": (("kl_cov",), "cov_share"),
    "ppo_kl_coef": (("kl_cov",), "coefficient"),
    "dro_beta": (("dro",), "beta"),
}
_DPPO = ("dppo_tv", "dppo_kl")
# verl clips all of them at 0.2, unless set; the losses have the bounds of their papers here.
_CLIPPED = ("gspo", "cispo", "geo_mean", "clip_cov", *_DPPO)
# verl ignores its loss_agg_mode for them, for gspo in all versions but 0.9.1.
_BY_ROW = ("gspo", "sapo", "geo_mean")
BY_ROW = "seq-mean-token-mean"
REINFORCE = (
    "method.loss=cispo with method.correction=bypass and method.clip_high=C-1 is its form with "
    "weights per token of at most C"
)


def translate_loss(result: Translation, settings: dict[str, str]) -> None:
    """Replaces clips and aggregation of losses other than PPO's by what verl does with them."""
    overrides = result.overrides
    loss = overrides.get("method.loss", "ppo_clip")
    if loss == "ppo_clip":
        return
    dual_clip = overrides.pop("method.dual_clip", "3.0")
    if loss in _DPPO:
        overrides["method.loss_options.max_ratio"] = dual_clip
    for name in ("method.clip_low", "method.clip_high"):
        if loss in _CLIPPED:
            overrides.setdefault(name, "0.2")
        else:
            overrides.pop(name, None)
    if loss in _BY_ROW:
        given = overrides.get("method.aggregation", BY_ROW)
        if given != BY_ROW:
            result.missing.append(f"loss_agg_mode={given}: verl ignores it, its {loss} is {BY_ROW}")
        overrides["method.aggregation"] = BY_ROW
    for key, value in settings.items():
        losses, option = LOSS_OPTIONS.get(key.rpartition(".")[2], ((), ""))
        if loss in losses and value not in _UNSET:
            overrides[f"method.loss_options.{option}"] = value


def translate_correction(result: Translation, settings: dict[str, str]) -> None:
    """The correction of the gap between engine and trainer: weights, rules and bypass."""
    given = {
        key.removeprefix(_CORRECTION): value
        for key, value in settings.items()
        if key.startswith(_CORRECTION) and value not in _UNSET
    }
    overrides = result.overrides
    level = given.pop("rollout_is", "")
    bound = given.pop("rollout_is_threshold", "2.0")
    is_normalized = given.pop("rollout_is_batch_normalize", "")
    is_bypass = bool(given.pop("bypass_mode", ""))
    loss = given.pop("loss_type", "ppo_clip")
    if is_bypass and loss != "ppo_clip":
        result.missing.append(f"{_CORRECTION}loss_type={loss}: {REINFORCE}")
    if is_bypass:  # its ratio is that of policy and engine, so that weights would count twice
        overrides["method.correction"] = "bypass"
    elif level in ("token", "sequence"):
        overrides["method.correction"] = level
        overrides["method.correction_bound"] = bound
        if is_normalized:
            overrides["method.correction_normalize"] = "true"
    elif level:
        result.missing.append(f"{_CORRECTION}rollout_is={level}")
    _translate_rules(result, given.pop("rollout_rs", ""), given.pop("rollout_rs_threshold", ""))
    result.missing += [f"{_CORRECTION}{key}={value}" for key, value in given.items()]


def _translate_rules(result: Translation, rules: str, bounds: str) -> None:
    """Rules of rejection with their bounds: one per rule, or one for all."""
    names, limits = split_list(rules), split_list(bounds)
    if not names:
        return
    if len(limits) == 1:
        limits *= len(names)
    if len(limits) != len(names):
        result.missing.append(f"{_CORRECTION}rollout_rs={rules} with rollout_rs_threshold={bounds}")
        return
    for name, limit in zip(names, limits, strict=True):
        bound = _inverted(limit) if name.endswith("k1") else limit
        result.overrides[f"method.rejection.{name}"] = bound
    result.overrides.setdefault("method.correction", "rejection")


def _inverted(bound: str) -> str:
    """Bounds of 1 / rho, which verl compares, as bounds of rho. Raises ValueError."""
    low, separator, high = bound.partition("_")
    if not separator:  # u stands for 1/u to u
        return bound
    return "_".join(str(float(f"{1 / float(end):.6g}")) for end in (high, low))
