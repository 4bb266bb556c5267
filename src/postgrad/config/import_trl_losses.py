"""Translates the arguments of TRL's configs that make the loss.

`translate_losses` reads those of an argument's neighbors too: the loss here is one choice, and TRL
spreads it over several arguments. Formulas were compared with TRL 1.16.
"""

from collections.abc import Mapping

from postgrad.config.import_names import TRL_AGGREGATIONS, TRL_DPO_LOSSES
from postgrad.config.import_result import split_list

_OFF = ("0", "0.0", "False", "false")
# TRL's SFT losses and those here; chunked_nll is nll with less memory.
_SFT_LOSSES = {"nll": "nll", "chunked_nll": "nll", "dft": "dft"}
_SAPO = {
    "sapo_temperature_pos": "method.loss_options.temperature_positive",
    "sapo_temperature_neg": "method.loss_options.temperature_negative",
}


class LossTranslation:
    """What arguments of the loss become: `overrides`, `missing` lines, and arguments `read`."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.settings = settings
        self.overrides: dict[str, str] = {}
        self.missing: list[str] = []
        self.read: set[str] = set()

    def take(self, name: str, default: str = "") -> str:
        """The value of an argument, which is translated here and nowhere else."""
        self.read.add(name)
        return self.settings.get(name, default)

    def miss(self, name: str, reason: str) -> None:
        if name in self.settings:
            self.missing.append(f"{name}={self.settings[name]}: {reason}")


def translate_losses(
    recipe: str, settings: Mapping[str, str], sizes: Mapping[str, str]
) -> LossTranslation:
    """The translation of the arguments that make the loss of a recipe.

    Args:
        recipe: the recipe here.
        settings: all arguments of the config.
        sizes: the overrides of the batch sizes.
    """
    result = LossTranslation(settings)
    if recipe == "dpo":
        _translate_dpo(result)
    elif recipe == "grpo":
        _translate_grpo(result)
    elif recipe == "rloo":
        _translate_rloo(result, sizes)
    elif recipe == "sft" and settings.get("loss_type") in _SFT_LOSSES:
        loss = _SFT_LOSSES[result.take("loss_type")]
        if loss != "nll":
            result.overrides["method.loss"] = loss
    elif recipe == "kto" and settings.get("loss_type") == "kto":
        result.take("loss_type")
    return result


# ---- DPO


def _translate_dpo(result: LossTranslation) -> None:
    settings = result.settings
    names = words(result.take("loss_type")) or ["sigmoid"]
    weights = _weights(result.take("loss_weights"), len(names))
    if weights is None:
        result.miss("loss_weights", "TRL needs one number per loss_type")
        weights = [1.0] * len(names)
    terms = {name: weight for name, weight in zip(names, weights, strict=True) if weight}
    known = [name for name in terms if name in TRL_DPO_LOSSES]
    main = known[0] if known else ""
    others = [name for name in terms if name not in (main, "sft")]
    if not main or terms[main] < 0 or terms.get("sft", 0) < 0:
        result.miss("loss_type", f"no equivalent; a loss of {', '.join(TRL_DPO_LOSSES)} is needed")
        for name in ("rpo_alpha", "label_smoothing"):
            result.take(name)
        return
    if others:
        kept = f"{main} and sft" if "sft" in terms else main
        result.miss(
            "loss_type",
            f"{', '.join(others)} left out, the command trains {kept}; a run has one preference "
            f"loss of {', '.join(TRL_DPO_LOSSES)}, and an SFT term",
        )
    if "loss_type" in settings:
        result.overrides |= TRL_DPO_LOSSES[main]
    if "sft" in terms:
        _add_sft_term(result, "loss_type", terms["sft"] / terms[main])
    if terms[main] != 1:
        _scale_loss(result, terms[main])
    if "rpo_alpha" in settings:
        if _number(result.take("rpo_alpha")) is None:
            result.miss("rpo_alpha", "no number")
        else:
            _add_sft_term(result, "rpo_alpha", float(settings["rpo_alpha"]))
    _smooth_labels(result, main)


def _weights(value: str, count: int) -> list[float] | None:
    """The weights of the losses, 1 without any; None if they are not as many numbers."""
    if not value:
        return [1.0] * count
    numbers = [_number(word) for word in words(value)]
    found = [number for number in numbers if number is not None]
    return found if len(found) == count == len(numbers) else None


def _add_sft_term(result: LossTranslation, name: str, coefficient: float) -> None:
    """The SFT term, with a line unless TRL's mean over the tokens of a micro-batch is one row's."""
    if not coefficient:
        return
    result.overrides["method.sft_coef"] = plain(coefficient)
    if result.settings.get("per_device_train_batch_size") != "1":
        result.missing.append(
            f"{name}={result.settings[name]}: TRL's SFT term is a mean over all "
            "chosen tokens of a micro-batch, that of method.sft_coef a mean per response; they are "
            "equal with per_device_train_batch_size=1"
        )


def _scale_loss(result: LossTranslation, weight: float) -> None:
    """The loss here is TRL's divided by `weight`; its gradient is clipped at the same place."""
    settings = result.settings
    for name, key, default in (
        ("max_grad_norm", "optimizer.max_grad_norm", "1.0"),
        ("adam_epsilon", "optimizer.eps", "1e-8"),
    ):
        number = _number(settings.get(name, default))
        if number is not None:
            result.take(name)
            result.overrides[key] = plain(number / weight)
    result.miss(
        "loss_weights",
        f"the preference loss has weight 1 here; optimizer.max_grad_norm and optimizer.eps are "
        f"divided by {plain(weight)} instead, which makes AdamW's updates those of TRL",
    )


def _smooth_labels(result: LossTranslation, main: str) -> None:
    value = result.take("label_smoothing", "0")
    if value in _OFF or main not in ("sigmoid", "sigmoid_norm"):
        return  # TRL does not read it either
    result.overrides["method.label_smoothing"] = value
    result.miss(
        "label_smoothing",
        "TRL 1 ignores it with loss_type=sigmoid, older versions smooth as the command does",
    )


# ---- GRPO and RLOO


def _translate_grpo(result: LossTranslation) -> None:
    settings = result.settings
    kind = result.take("loss_type", "dapo")
    level = result.take("importance_sampling_level", "token")
    if kind in TRL_AGGREGATIONS:
        if "loss_type" in settings:
            result.overrides["method.aggregation"] = TRL_AGGREGATIONS[kind]
        accumulated = settings.get("gradient_accumulation_steps", "1")
        if kind == "bnpo" and accumulated != "1":
            result.miss("loss_type", "TRL's mean is one per micro-batch, here one per update")
    elif kind in ("cispo", "sapo"):
        if level != "token":
            result.miss("importance_sampling_level", f"{kind} here has one ratio per token")
        level = "token"
        if kind == "sapo":
            _translate_sapo(result)
        else:
            _translate_cispo(result)
    else:
        known = ", ".join(TRL_AGGREGATIONS)
        result.miss("loss_type", f"known are {known}, cispo and sapo")
    if kind not in ("cispo", "sapo"):
        _translate_clips(result, level)
    if level not in ("token", "sequence"):
        result.miss("importance_sampling_level", "no equivalent")
    _translate_kl(result, level)
    _translate_entropy(result)
    scale = result.take("scale_rewards", "group")
    if scale == "batch":
        result.overrides["method.advantage"] = "lite_ppo"
    elif "scale_rewards" in settings:
        is_on = scale.lower() not in ("false", "none")
        result.overrides["method.normalize_by_std"] = str(is_on).lower()


def _translate_clips(result: LossTranslation, level: str) -> None:
    """The bounds of the ratio; one argument of TRL sets both, unless there is another."""
    settings = result.settings
    is_given = "epsilon" in settings or "epsilon_high" in settings
    low = result.take("epsilon", "0.2")
    high = result.take("epsilon_high", low)
    if level == "sequence":  # the loss's own defaults are others
        result.overrides["method.loss"] = "gspo"
        is_given = True
        result.take("delta")
        result.miss("delta", "no bound of the ratio of a response besides method.clip_high")
    if is_given and (level == "sequence" or "epsilon" in settings):
        result.overrides["method.clip_low"] = low
    if is_given:
        result.overrides["method.clip_high"] = high


def _translate_cispo(result: LossTranslation) -> None:
    """TRL's epsilon_high is the largest weight; here the bound is 1 + method.clip_high."""
    result.overrides |= {"method.loss": "cispo", "method.aggregation": "token-mean"}
    high = _number(result.take("epsilon_high", result.take("epsilon", "0.2")))
    result.take("delta")
    if high is not None and high >= 1:
        result.overrides["method.clip_high"] = plain(high - 1)
    else:
        result.miss(
            "loss_type",
            "TRL's epsilon_high is the largest weight, 1 + method.clip_high; "
            "below 1 (its default is epsilon) it has no equivalent",
        )


def _translate_sapo(result: LossTranslation) -> None:
    """It reads no bounds of the ratio."""
    result.overrides |= {"method.loss": "sapo", "method.aggregation": "seq-mean-token-mean"}
    for name in ("epsilon", "epsilon_high", "delta"):
        result.take(name)
    for name, key in _SAPO.items():
        if name in result.settings:
            result.overrides[key] = result.take(name)


def _translate_kl(result: LossTranslation, level: str) -> None:
    beta = result.take("beta", "0")
    is_corrected = result.take("use_bias_correction_kl", "True").lower() != "false"
    number = _number(beta)
    if number is None:
        result.miss("beta", "its value could not be read; set it by hand")
    elif number:
        result.overrides |= {"method.kl": "loss", "method.kl_coef": beta}
        if is_corrected:
            result.overrides["method.kl_ratio"] = "true"
        if is_corrected and level == "sequence":
            result.miss(
                "beta",
                "TRL multiplies the KL by the ratio of the response, "
                "method.kl_ratio by that of the token",
            )


def _translate_entropy(result: LossTranslation) -> None:
    if "top_entropy_quantile" in result.settings:
        result.overrides["method.top_entropy"] = result.take("top_entropy_quantile")
    if "off_policy_mask_threshold" in result.settings:
        result.overrides["method.sequence_mask"] = result.take("off_policy_mask_threshold")
    is_adaptive = result.settings.get("use_adaptive_entropy", "False").lower() == "true"
    coefficient = result.settings.get("entropy_coef", "0.0")
    if is_adaptive:
        return
    result.take("entropy_coef")
    if coefficient in _OFF:
        return
    result.overrides["method.entropy_coef"] = coefficient
    if result.overrides.get("method.aggregation", "token-mean") != "token-mean":
        result.miss(
            "entropy_coef",
            "TRL's entropy is a mean over tokens; here it has the weights of the loss",
        )


def _translate_rloo(result: LossTranslation, sizes: Mapping[str, str]) -> None:
    """TRL clips the ratio of a response; it is 1 at the first update after a generation."""
    clips = {name: result.take(name) for name in ("epsilon", "epsilon_high")}
    updates = sizes.get("training.updates_per_step", "1")
    passes = result.settings.get("num_iterations", "1")
    if updates != "1" or passes != "1":
        given = [f"{name}={value}" for name, value in clips.items() if value]
        result.missing.append(
            f"{', '.join(given) or 'epsilon=0.2'}: TRL clips the ratio of a response, which is not "
            "1 after the first update of a generation; the recipe rloo has no ratio"
        )


# ---- values


def words(value: str) -> list[str]:
    """The items of a list in Python, or of words as the values of a flag."""
    return split_list(value.replace(" ", ","))


def plain(number: float) -> str:
    return f"{number:.10g}"


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None
